"""One line of what needs an operator."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Item:
    """One line. ``rank`` 0 is worst; ``acts``: (label, address, opens a dialog)."""

    rank: int
    tone: str
    icon: str
    title: str
    text: str
    href: str
    since: datetime | None = None
    acts: tuple[tuple[str, str, bool], ...] = ()
