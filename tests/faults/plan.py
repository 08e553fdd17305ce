"""What a run does, step by step, known in full from its seed: a seed that failed is played again by the same number."""

from __future__ import annotations

import random
from dataclasses import dataclass

#: Never stopped, put to sleep or killed by a step, so its clients must never notice anything.
STEADY = "steady"
#: Models with everything; ``wide`` spans both GPUs, ``big`` fits only where others give way.
MODELS: dict[str, dict[str, object]] = {
    STEADY: {"model": "Qwen/Qwen3-0.6B", "pinned": True},
    "alpha": {"model": "Qwen/Qwen3-0.6B", "enable_sleep_mode": True},
    "beta": {"model": "meta-llama/Llama-3.2-1B-Instruct", "enable_sleep_mode": True, "restart_policy": "always"},
    "wide": {"model": "Qwen/Qwen2.5-0.5B-Instruct", "tensor_parallel_size": 2},
    "big": {"model": "Qwen/Qwen3-32B", "enable_sleep_mode": True},
}
OTHERS = tuple(name for name in MODELS if name != STEADY)
OURS = ("web", "router", "control", "beat", "host", "sampler", "valkey")
PARTS = ("guardian", "engine", "core")

#: Step → how often it comes, and of which models.
_KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "launch": (16, OTHERS),
    "scale": (2, ("beta",)),
    "stop": (4, OTHERS),
    "force_stop": (2, OTHERS),
    "restart": (2, OTHERS),
    "sleep": (5, OTHERS),
    "wake": (5, OTHERS),
    "move": (5, (STEADY, "alpha", "beta")),
    "edit": (4, (STEADY, "alpha", "beta")),
    "cancel": (2, (STEADY, "alpha", "beta")),
    "limit": (6, tuple(MODELS)),
    "trim": (3, tuple(MODELS)),
    "make_room": (2, ("big",)),
    "preset": (3, ("evening",)),
    "kill": (12, OURS),
    "kill_engine": (7, OTHERS),
}


@dataclass(frozen=True)
class Step:
    """``number`` in [0, 1) settles whatever else has to be chosen; ``pause_s`` is waited afterwards."""

    index: int
    kind: str
    target: str
    number: float
    pause_s: float

    def __str__(self) -> str:
        return f"{self.index:4d} {self.kind} {self.target} {self.number:.2f}"


def plan(seed: int, steps: int) -> list[Step]:
    """The steps of a run. A longer run of the same seed begins with the steps of the shorter one."""
    dice = random.Random(seed)
    kinds = list(_KINDS)
    weights = [_KINDS[kind][0] for kind in kinds]
    found = []
    for index in range(steps):
        kind = dice.choices(kinds, weights)[0]
        target = dice.choice(_KINDS[kind][1])
        # Half of the steps follow at once: what falls between two acts is found by acts that overlap.
        pause = 0.0 if dice.random() < 0.5 else dice.random() * 0.8
        found.append(Step(index, kind, target, dice.random(), pause))
    return found
