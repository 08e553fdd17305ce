"""What engines of a real vLLM need on a machine without GPUs: its environment, a model, and cards to name."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.contract import make_model
from tests.sardeenz_site.stack import ROOT, Stack

DRIVER = Path(__file__).resolve().parent / "driver"


def prepare(stack: Stack) -> None:
    """Make the tiny model in the stack's home and set its environment. Raises SystemExit without a vLLM.

    ``SARDEENZ_ENGINE_VENV`` names the environment that ``make test-engine`` makes; by default ``.venv-engine``.
    """
    venv = Path(os.environ.get("SARDEENZ_ENGINE_VENV") or ROOT / ".venv-engine")
    if not (venv / "bin" / "vllm").exists():
        raise SystemExit(f"There is no vLLM in {venv}: make test-engine makes that environment.")
    folder = make_model.make(stack.home / "models" / "tiny")
    subprocess.run([venv / "bin" / "python", Path(make_model.__file__), folder], check=True)
    stack.env |= {
        "SARDEENZ_ENGINE": "vllm",
        "SARDEENZ_VLLM": str(venv / "bin" / "vllm"),
        "VLLM_CACHE_ROOT": str(venv / ".vllm-cache"),
        "PYTHONPATH": str(DRIVER),
    }
