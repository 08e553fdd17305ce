"""Which vLLM and kvcached this process runs."""

from __future__ import annotations

import re
import sys
from importlib import metadata


def vllm_version() -> str:
    """``"0.24.0"``; "" when unknown."""
    module = sys.modules.get("vllm")
    found = getattr(module, "__version__", None)
    return str(found) if found else _distribution("vllm")


def kvcached_version() -> str:
    """``"0.1.6"``; "" when it is not installed. Does not import it: that alone would patch vLLM."""
    return _distribution("kvcached")


def major_minor(version: str) -> tuple[int, int] | None:
    """``(0, 24)`` of ``"0.24.0+cu130"``."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else None


def _distribution(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
