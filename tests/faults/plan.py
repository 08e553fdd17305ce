"""What a run does, step by step, known in full from its seed: a seed that failed is played again by the same number."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.faults.cast import Cast


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


def plan(cast: Cast, seed: int, steps: int) -> list[Step]:
    """The steps of a run. A longer run of the same seed begins with the steps of the shorter one.

    Whom a kind of step hits goes round all of its targets before one comes again, in an order that changes.
    """
    dice = random.Random(seed)
    kinds = list(cast.kinds)
    weights = [cast.kinds[kind][0] for kind in kinds]
    decks: dict[str, list[str]] = {kind: [] for kind in kinds}
    found = []
    for index in range(steps):
        kind = dice.choices(kinds, weights)[0]
        if not decks[kind]:
            decks[kind] = dice.sample(cast.kinds[kind][1], len(cast.kinds[kind][1]))
        # Half of the steps follow at once: what falls between two acts is found by acts that overlap.
        pause = 0.0 if dice.random() < 0.5 else dice.random() * 0.8
        found.append(Step(index, kind, decks[kind].pop(), dice.random(), pause))
    return found
