"""The simulated cards that one engine runs on, as its allocators see them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from gpus_app.probes.sim_ledger import Holding, Ledger


class Cards(Protocol):
    """Memory of the GPUs of one instance; all of them take and give the same amount (tensor parallel)."""

    total_bytes: int

    def free_bytes(self) -> int:
        """Free on the first card: the one that EngineCore asks (``cudaMemGetInfo``)."""

    def take(self, amount: int) -> bool:
        """Map ``amount`` bytes on every card; False when one of them has no room."""

    def give(self, amount: int) -> None:
        """Unmap ``amount`` bytes on every card."""


class LooseCards:
    """One card that nobody else uses: for an engine that was started without ``SARDEENZ_SIM_DIR``, and for tests."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.taken_bytes = 0

    def free_bytes(self) -> int:
        return self.total_bytes - self.taken_bytes

    def take(self, amount: int) -> bool:
        if amount > self.free_bytes():
            return False
        self.taken_bytes += amount
        return True

    def give(self, amount: int) -> None:
        self.taken_bytes -= amount


class LedgerCards:
    """Cards in the shared ledger, held in the name of the calling process (EngineCore's)."""

    def __init__(self, folder: Path, uuids: Sequence[str]) -> None:
        self.ledger = Ledger(folder)
        self.uuids = tuple(uuids)
        first = self.ledger.gpu(self.uuids[0])
        self.total_bytes = first.total_bytes if first else 0

    def free_bytes(self) -> int:
        return self.ledger.free_bytes(self.uuids[0])

    def take(self, amount: int) -> bool:
        return self.ledger.claim_all(dict.fromkeys(self.uuids, amount))

    def give(self, amount: int) -> None:
        self.ledger.claim_all(dict.fromkeys(self.uuids, -amount))

    def busy(self, percent: float) -> None:
        """Show this engine's share of the cards' utilisation."""
        self.ledger.set(utilization=dict.fromkeys(self.uuids, round(percent, 1)))

    def holders(self) -> list[Holding]:
        """Who holds the first card: for the text of an out-of-memory error."""
        return self.ledger.read().get(self.uuids[0], [])
