"""Stands before the real ``pynvml`` on a stack's PYTHONPATH: two empty GPUs where there is none, for engines on CPUs.

Codes and error classes are the real ones; the cards are those of the probes' tests.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_spec = importlib.machinery.PathFinder.find_spec("pynvml", [one for one in sys.path if Path(one).resolve() != _HERE])
assert _spec is not None and _spec.loader is not None, "nvidia-ml-py is not installed"
_real = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_real)
globals().update({name: value for name, value in vars(_real).items() if not name.startswith("__")})

from tests.gpus_app.probes.fake_nvml import FakeCard, FakeNvml  # noqa: E402 - it imports this module

_cards = FakeNvml(*(FakeCard(f"GPU-faults-{index}", total=80 << 30) for index in range(2)))
globals().update({name: getattr(_cards, name) for name in vars(FakeNvml) if name.startswith("nvml")})
