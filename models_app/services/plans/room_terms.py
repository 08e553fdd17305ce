"""How far a plan may go: an operator who confirms it may do anything that the rules allow, a policy may do less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpus_app.policies.base import Harm, InstanceView


@dataclass(frozen=True)
class Terms:
    """What one plan may do beside the rules of models and GPUs.

    ``max_harm``: measures beyond it are not taken. ``spared``: ids of instances that are neither put to sleep nor
    stopped. ``held``: ids of instances that keep their limits. ``settled``: plan as if everybody had nothing to do and
    had been there for long, to learn whether waiting is of use; never to act on.
    """

    max_harm: Harm = Harm.STOP_BUSY
    spared: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    settled: bool = False

    def rows(self, rows: Sequence[InstanceView]) -> list[InstanceView]:
        """The instances as a plan under these terms sees them."""
        return [self._row(row) for row in rows]

    def _row(self, row: InstanceView) -> InstanceView:
        if row.id in self.spared:
            row = replace(row, pinned=True)
        if row.id in self.held:
            row = replace(row, guarantee_bytes=max(row.guarantee_bytes, row.limit_bytes))
        if self.settled:
            row = replace(row, running=0, waiting=0, ready_since=0.0)
        return row

    def json(self) -> dict[str, Any]:
        """For the facts of an operation."""
        return {"max_harm": int(self.max_harm), "spared": sorted(self.spared), "held": sorted(self.held)}

    @classmethod
    def of(cls, facts: dict[str, Any] | None) -> Terms:
        """As ``json`` wrote them; None: an operator's."""
        if not facts:
            return cls()
        return cls(Harm(facts["max_harm"]), frozenset(facts["spared"]), frozenset(facts["held"]))


#: What an operator confirms.
CONFIRMED = Terms()
