"""The released kvcached 0.1.6, fetched through pip: its Python part runs with a stub of torch and without its
extension.

kvcached comes as a source package only, and pip builds a source package's metadata before it hands the file over;
that step asks torch for its CUDA version and needs a newer setuptools than some environments have. Nothing is built
or installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

VERSION = "0.1.6"
_TORCH = {
    "torch/__init__.py": (
        "__version__ = '2.11.0'\n"
        "class version:\n    cuda, hip = '13.0', None\n"
        "class _C:\n    _GLIBCXX_USE_CXX11_ABI = True\n"
        "class cuda:\n    is_available = staticmethod(lambda: False)\n"
    ),
    "torch/utils/__init__.py": "",
    "torch/utils/cpp_extension.py": (
        "from setuptools import Extension\n"
        "from setuptools.command.build_ext import build_ext as BuildExtension\n"
        "def CUDAExtension(name, sources, **options):\n    return Extension(name, sources)\n"
        "CppExtension, CUDA_HOME, ROCM_HOME = CUDAExtension, '/usr', None\n"
        "def include_paths(*given, **options):\n    return []\n"
        "library_paths = include_paths\n"
    ),
}


class Unreachable(Exception):
    """The package registry did not answer, or not with the package."""


@dataclass(frozen=True)
class Kvcached:
    """Where its parts lie."""

    python_path: str

    def run(self, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """``kvctl ARGUMENTS``."""
        return subprocess.run(
            [sys.executable, "-m", "kvcached.cli.kvctl", *arguments],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": self.python_path, "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def python(self, code: str, *more_paths: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run code that imports kvcached."""
        return subprocess.run(
            [sys.executable, "-c", code],
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": os.pathsep.join((self.python_path, *more_paths)),
                "KVCACHED_LOG_LEVEL": "ERROR",
            },
            capture_output=True,
            text=True,
            timeout=timeout,
        )


def fetch(folder: Path) -> Kvcached:
    """Download and unpack. Raises ``Unreachable``."""
    stub, tools, needs = folder / "stub", folder / "tools", folder / "needs"
    for name, content in _TORCH.items():
        path = stub / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    _pip("install", "--target", str(tools), "setuptools>=77,<82", "wheel")
    _pip("install", "--target", str(needs), "numpy", "posix_ipc", "wrapt")
    _pip(
        "download", "--no-binary", "kvcached", "--no-deps", "--no-build-isolation", "--dest", str(folder),
        f"kvcached=={VERSION}", python_path=f"{tools}{os.pathsep}{stub}",
    )  # fmt: skip
    with tarfile.open(next(folder.glob("kvcached-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return Kvcached(os.pathsep.join((str(folder / f"kvcached-{VERSION}"), str(stub), str(needs))))


def _pip(*arguments: str, python_path: str = "") -> None:
    env = {**os.environ, **({"PYTHONPATH": python_path} if python_path else {})}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise Unreachable(done.stderr[-2000:])
