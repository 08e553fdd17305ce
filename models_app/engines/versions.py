"""Which vLLM and kvcached are there, and whether the pair works: said before a start is spent on finding out.

The engine has a Python of its own. It is asked for the metadata of its packages, which imports nothing heavy (torch
takes seconds, and must never be loaded here).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

#: Below this, kvcached needs vLLM's V1 model runner; vLLM 0.24 picks the V2 runner by itself for Qwen3, Llama,
#: Mistral ….
V2_RUNNER_SINCE = Version("0.28")
#: From this version on K and V share one packed buffer under kvcached, which halves the bundle.
PACKED_KV_SINCE = Version("0.26")

_ASK = """
import importlib.metadata as m, json, os, sys, sysconfig
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
found = {n: version(n) for n in ("vllm", "kvcached", "torch", "transformers")}
places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path}
found["autopatch"] = any(os.path.exists(os.path.join(p, "kvcached_autopatch.pth")) for p in places if p)
found["python"] = sys.version.split()[0]
found["executable"] = sys.executable
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Verdict:
    """What is known of a pair. ``ok`` False: do not start it. ``sentence`` names both versions."""

    ok: bool
    sentence: str
    warning: bool = False


_cache: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}


def detect_versions(vllm_command: str, *, limit_s: float = 30.0) -> dict[str, Any]:
    """Versions in the environment of ``SARDEENZ_VLLM``, kept until the program or its site-packages change.

    Keys: ``vllm``, ``kvcached``, ``torch``, ``transformers`` (None: not installed), ``autopatch`` (kvcached's .pth is
    there), ``python``, ``executable``; on trouble only ``error``, a sentence. Raises nothing.
    """
    python = engine_python(vllm_command)
    if python is None:
        return {"error": f"The vLLM command {vllm_command!r} is not found on this machine."}
    key = _fingerprint(python)
    kept = _cache.get(vllm_command)
    if kept and kept[0] == key:
        return dict(kept[1])
    try:
        answer = subprocess.run(
            [*python, "-I", "-c", _ASK],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        found: dict[str, Any] = json.loads(answer.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"The Python of {vllm_command!r} did not answer within {limit_s:g} s."}
    except subprocess.CalledProcessError as exc:
        last = (exc.stderr or "").strip().splitlines()[-1:] or [f"exit code {exc.returncode}"]
        return {"error": f"The Python of {vllm_command!r} does not work: {last[0]}"}
    except (OSError, ValueError, IndexError) as exc:
        return {"error": f"The Python of {vllm_command!r} could not be asked for versions: {exc}"}
    if not found.get("vllm"):
        found["error"] = f"No vLLM is installed for {vllm_command!r}."
    _cache[vllm_command] = (key, found)
    return dict(found)


def engine_python(vllm_command: str) -> list[str] | None:
    """The interpreter that runs a vLLM command: from its own words (``python -m …``) or from its first line."""
    try:
        words = shlex.split(vllm_command)
    except ValueError:
        return None
    program = shutil.which(words[0]) if words else None
    if program is None:
        return None
    if re.fullmatch(r"python[\d.]*", Path(program).name):
        return [program]
    try:
        with Path(program).open("rb") as file:
            first = file.readline(4096)
            second = file.readline(4096)
    except OSError:
        return None
    if not first.startswith(b"#!"):
        return None
    interpreter = first[2:].decode("utf-8", "replace").split()
    if interpreter and Path(interpreter[0]).name in ("sh", "bash", "dash"):
        # pip writes '''exec' /long/path/python "$0" "$@" when the path is too long for a first line.
        match = re.search(rb"exec'? \"?([^\"\s]+)\"? ", second)
        return [match[1].decode("utf-8", "replace")] if match and b"python" in match[1] else None
    if interpreter and Path(interpreter[0]).name == "env":
        found = shutil.which(interpreter[-1])
        return [found] if found else None
    return interpreter[:1] if interpreter and Path(interpreter[0]).exists() else None


def _fingerprint(python: list[str]) -> tuple[Any, ...]:
    """Changes when a package is installed or removed: the times of the interpreter and of its site-packages."""
    program = Path(python[0])
    seen: list[Any] = [str(program)]
    for path in (program, *sorted(program.parent.parent.glob("lib/python*/site-packages"))):
        try:
            stat = os.stat(path)  # noqa: PTH116 - follows links, as exec will
            seen.append((str(path), stat.st_mtime_ns))
        except OSError:
            continue
    return tuple(seen)


def parse(text: str | None) -> Version | None:
    """A version without its local part (``0.30.0+cpu``); None when there is none."""
    try:
        return Version(text.split("+")[0]) if text else None
    except InvalidVersion:
        return None


def judge(versions: Mapping[str, Any], *, kvcached: bool) -> Verdict:
    """Whether an instance can be started with what is installed. ``kvcached``: the model wants elastic KV memory.

    Known from kvcached 0.1.6's own code and release notes, and from starts of 0.24.0 on a GPU and 0.30.0 on a CPU.
    """
    vllm, library = parse(versions.get("vllm")), parse(versions.get("kvcached"))
    if vllm is None:
        return Verdict(False, str(versions.get("error") or "vLLM is not installed here."))
    if not kvcached:
        if vllm < Version("0.17"):
            return Verdict(False, f"vLLM {vllm} is too old: 0.17 is the first that Sardeenz can run.")
        if vllm > Version("0.33"):
            return Verdict(True, f"vLLM {vllm} is newer than any that Sardeenz was tried with.", warning=True)
        return Verdict(True, f"vLLM {vllm} without kvcached: KV memory is a static reservation.")
    if library is None:
        return Verdict(
            False,
            f"kvcached is not installed beside vLLM {vllm}, so KV memory cannot be elastic. Install kvcached 0.1.6 "
            "into vLLM's environment, or switch kvcached off for this model.",
        )
    pair = f"kvcached {library} with vLLM {vllm}"
    if library < Version("0.1.6"):
        return Verdict(
            False,
            f"{pair}: the engine dies when a limit is set below what is in use (fixed in kvcached 0.1.6). "
            "Install kvcached 0.1.6.",
        )
    if vllm >= Version("0.31") and library < Version("0.1.7"):
        return Verdict(
            False, f"{pair}: this kvcached has no runner adapter for vLLM 0.31 and later. Use vLLM 0.30.0 or older."
        )
    if vllm < Version("0.17"):
        return Verdict(False, f"{pair}: this kvcached is tested from vLLM 0.17.0 on. Use vLLM 0.19.1 to 0.30.0.")
    if not versions.get("autopatch", True):
        return Verdict(
            False,
            f"{pair}: kvcached_autopatch.pth is missing from vLLM's site-packages, so vLLM would start unpatched, with "
            "a static reservation. Install kvcached again.",
        )
    if library >= Version("0.1.7"):
        return Verdict(True, f"{pair}: newer than any kvcached that Sardeenz was tried with.", warning=True)
    if vllm < Version("0.19.1"):
        return Verdict(True, f"{pair}: tested by kvcached, not by Sardeenz.", warning=True)
    return Verdict(True, f"{pair}: a pair that works.")


def needs_v1_runner(versions: Mapping[str, Any]) -> bool:
    """Whether ``VLLM_USE_V2_MODEL_RUNNER=0`` must be set for kvcached to start."""
    vllm = parse(versions.get("vllm"))
    return vllm is not None and vllm < V2_RUNNER_SINCE
