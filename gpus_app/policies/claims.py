"""Sets of guarantees and reserves that no card can hold are refused when they are entered, with the numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpus_app.errors import ImpossiblePolicy
from gpus_app.policies.base import gib, kept_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one instance is owed on a card: its baseline, and at least the larger of guarantee and floor for KV."""

    name: str
    baseline_bytes: int
    guarantee_bytes: int = 0
    floor_bytes: int = 0
    maximum_bytes: int | None = None

    @property
    def owed_bytes(self) -> int:
        return self.baseline_bytes + max(self.guarantee_bytes, self.floor_bytes)


def check_claim(claim: Claim) -> None:
    """Raises ImpossiblePolicy when one instance's own numbers contradict each other."""
    guarantee, floor, maximum = claim.guarantee_bytes, claim.floor_bytes, claim.maximum_bytes
    if 0 < guarantee < floor:
        raise ImpossiblePolicy(
            f"The guarantee of {claim.name} ({gib(guarantee)}) lies below its safety floor ({gib(floor)}): "
            "with so little it could stop making progress. Guarantee at least the floor, or nothing."
        )
    if maximum is not None and maximum < max(guarantee, floor):
        raise ImpossiblePolicy(
            f"The maximum of {claim.name} ({gib(maximum)}) lies below its "
            f"{'guarantee' if guarantee >= floor else 'safety floor'} ({gib(max(guarantee, floor))})."
        )


def check_card(
    total_bytes: int, *, reserve_bytes: int = 0, headroom_bytes: int = 0, claims: Iterable[Claim] = ()
) -> None:
    """Raises ImpossiblePolicy when what is kept, weights and guarantees together exceed the card.

    ``headroom_bytes``: what kvcached leaves unmapped; the larger of it and the reserve is kept.
    """
    if reserve_bytes < 0:
        raise ImpossiblePolicy("A reserve cannot be negative.")
    if reserve_bytes >= total_bytes:
        raise ImpossiblePolicy(f"A reserve of {gib(reserve_bytes)} leaves nothing of a card of {gib(total_bytes)}.")
    rows = list(claims)
    for claim in rows:
        check_claim(claim)
    owed = sum(claim.owed_bytes for claim in rows)
    kept = kept_bytes(reserve_bytes, headroom_bytes)
    if owed + kept > total_bytes:
        name = "kvcached's headroom" if headroom_bytes > reserve_bytes else "Reserve"
        parts = ", ".join(
            f"{claim.name} {gib(claim.baseline_bytes)} + {gib(claim.owed_bytes - claim.baseline_bytes)}"
            for claim in rows
        )
        raise ImpossiblePolicy(
            f"{name} {gib(kept)} and what is owed to instances (weights + guarantee or floor: {parts}) "
            f"make {gib(owed + kept)}, {gib(owed + kept - total_bytes)} more than the card's "
            f"{gib(total_bytes)}."
        )
