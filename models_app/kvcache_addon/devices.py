"""The instance's own GPUs, by NVML: reading them through torch would make a CUDA context in the API server (hundreds
of MB).

Index 0 of a process is the first entry of ``CUDA_VISIBLE_DEVICES``, not GPU 0 of the machine. NVML stays open once it
is: this is read every second.
"""

from __future__ import annotations

import functools
import os
from typing import Any


def own_gpus(count: int) -> list[dict[str, Any]]:
    """The first ``count`` GPUs that this process may use: ``{"index", "uuid", "total", "free"}``, bytes.

    Empty where there is no NVML. Memory by the second version of the query: the first counts the driver's reserve as
    used.
    """
    nvml = _open()
    if nvml is None:
        return []
    try:
        return [_reading(nvml, handle) for handle in _visible(nvml)[:count]]
    except Exception:  # NVML's own error class lives in whichever module was found
        _open.cache_clear()
        return []


def _visible(nvml: Any) -> list[Any]:
    """Handles in the order in which this process sees them."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    handles = []
    for entry in (part.strip() for part in listed.split(",")):
        if entry.isdigit():
            handles.append(nvml.nvmlDeviceGetHandleByIndex(int(entry)))
        elif entry.startswith(("GPU-", "MIG-")):
            handles.append(_by_uuid(nvml, entry))
        else:
            break  # CUDA too stops at the first entry that it does not understand
    return handles


def _by_uuid(nvml: Any, wanted: str) -> Any:
    """CUDA accepts the beginning of a UUID; NVML wants all of it."""
    for i in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(i)
        if _text(nvml.nvmlDeviceGetUUID(handle)).startswith(wanted):
            return handle
    return nvml.nvmlDeviceGetHandleByUUID(wanted)


def _reading(nvml: Any, handle: Any) -> dict[str, Any]:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    return {
        "index": int(nvml.nvmlDeviceGetIndex(handle)),
        "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
        "total": int(memory.total),
        "free": int(memory.free),
    }


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


@functools.cache
def _open() -> Any | None:
    """NVML, ready for questions; None where there is no driver."""
    try:
        from vllm.third_party import pynvml
    except ImportError:
        try:
            import pynvml
        except ImportError:
            return None
    try:
        pynvml.nvmlInit()
    except Exception:
        return None
    return pynvml
