"""Which engine this machine runs when SARDEENZ_ENGINE is ``auto``: vLLM on a real GPU, or simulated ones."""

from __future__ import annotations

import importlib.util
import shutil


def nvidia_gpus() -> int:
    """How many GPUs NVML shows; 0 without a driver. NVML is opened and closed here, never kept."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()


def vllm_found(command: str) -> bool:
    return shutil.which(command) is not None or importlib.util.find_spec("vllm") is not None


def choose_engine(wanted: str, vllm_command: str) -> tuple[str, str]:
    """``("vllm" | "simulated", why)``; the reason is a sentence for the operator."""
    if wanted != "auto":
        return wanted, f"SARDEENZ_ENGINE={wanted}."
    count = nvidia_gpus()
    if count == 0:
        return "simulated", "No NVIDIA GPU was found, so GPUs and engines are simulated."
    if not vllm_found(vllm_command):
        return "simulated", (
            f"{count} NVIDIA GPU(s) found, but {vllm_command!r} is not on PATH and vLLM cannot be imported, so GPUs "
            "and engines are simulated. Install vLLM (pip install 'sardeenz[gpu]') or set SARDEENZ_VLLM."
        )
    return "vllm", f"{count} NVIDIA GPU(s) and vLLM found."
