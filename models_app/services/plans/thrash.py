"""Two models that put one another away at every request: seen in the plans that requests caused, slowed, and told.

Neither fits beside the other, and both are asked for. Each turn costs a load and the time of those who wait, so with
every turn each of the two is left where it is for twice as long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

from django.conf import settings
from django.utils import timezone

from gpus_app.policies.base import StepKind
from models_app.models import Instance, Model, Operation
from models_app.services.plans.room_steps import MAKE_ROOM

#: Whoever acts because a request asked for a model.
ON_DEMAND = "policy:on-demand"
#: How far back one turn counts.
WINDOW = timedelta(minutes=30)
#: Longest time for which one of a pair is safe from the other, in seconds.
MAX_RESIDENCE_S = 600.0
_BEGUN = frozenset({"running", "verified", "short"})


@dataclass
class Pair:
    """Two models of which each was put away for the other within the window. ``turns``: how often in all."""

    models: tuple[Model, Model]
    turns: int = 0
    since: datetime = field(default_factory=timezone.now)
    last: datetime = field(default_factory=timezone.now)

    @property
    def residence_s(self) -> float:
        """For how long each of them is safe from the other after it came up."""
        return residence_s(self.turns)

    @property
    def sentence(self) -> str:
        """Why, what is done about it, and what can be done."""
        one, other = self.models
        return (
            f"{one} and {other} do not fit beside one another and requests ask for both: one was put away for the "
            f"other {self.turns} times since {self.since:%H:%M} UTC. Each now stays for at least "
            f"{self.residence_s:.0f} s. Pin the one that matters, give one another GPU, or lower a limit so that both "
            "fit."
        )


def residence_s(turns: int) -> float:
    """Seconds: the minimum residence, doubled with every turn after the first."""
    first: float = settings.RESIDENCE_S
    return first if turns < 2 else max(first, min(first * 2.0 ** (turns - 1), MAX_RESIDENCE_S))


def turns_between(now: datetime | None = None) -> dict[frozenset[int], list[tuple[datetime, int]]]:
    """Per pair of model ids, each time that one was put away for the other: when, and for whom. Two queries."""
    since = (now or timezone.now()) - WINDOW
    rows = Operation.objects.filter(kind=MAKE_ROOM, created_by=ON_DEMAND, created_at__gte=since).order_by("created_at")
    plans = [(row.created_at, row.model_id, _victims(row.steps)) for row in rows if row.model_id]
    ids = {pk for _at, _model, victims in plans for pk in victims}
    model_of = dict(Instance.objects.filter(pk__in=ids).values_list("pk", "model_id"))
    found: dict[frozenset[int], list[tuple[datetime, int]]] = defaultdict(list)
    for at, newcomer, victims in plans:
        for victim in {model_of[pk] for pk in victims if pk in model_of} - {newcomer}:
            found[frozenset((newcomer, victim))].append((at, newcomer))
    return dict(found)


def _victims(steps: Iterable[dict[str, Any]]) -> set[int]:
    """Instances that a plan began to put to sleep or to stop."""
    ends = (StepKind.SLEEP, StepKind.STOP)
    return {step["instance_id"] for step in steps if step["kind"] in ends and step["state"] in _BEGUN}


def thrash_pairs(now: datetime | None = None) -> list[Pair]:
    """Pairs that put one another away, both ways, within the window; the worst first. Three queries."""
    both = {
        ids: turns
        for ids, turns in turns_between(now).items()
        if any(one != other for (_, one), (_, other) in pairwise(turns))
    }
    models = Model.objects.in_bulk([pk for ids in both for pk in ids])
    pairs = []
    for ids, turns in both.items():
        one, other = (models.get(pk) for pk in sorted(ids))
        if one is not None and other is not None:
            pairs.append(Pair((one, other), len(turns), turns[0][0], turns[-1][0]))
    return sorted(pairs, key=lambda pair: -pair.turns)
