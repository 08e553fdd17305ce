"""Several router processes keep one limit: what each took is told to the others about once a second.

A message lost costs a second of over-admission, never a wrong refusal; with the broker away each process counts for
itself.
"""

from __future__ import annotations

import time
from typing import Any

from models_app.router.limits import Limiter
from models_app.router.queueing import Doors

#: A process that has said nothing for this long has nothing under way any more.
_SILENT_S = 5.0


class Peers:
    """What other processes said, and what there is to tell them."""

    def __init__(self, me: str, limiter: Limiter, doors: Doors) -> None:
        self.me = me
        self._limiter = limiter
        self._doors = doors
        self._debits: dict[int, tuple[int, int, int]] = {}
        self._said_at: dict[str, float] = {}
        self._keys: dict[str, dict[int, int]] = {}  # peer -> key id -> under way
        self._models: dict[str, dict[str, int]] = {}
        self._quiet = True

    def message(self) -> dict[str, Any] | None:
        """What to tell now; None when there is nothing and nothing was said last time either."""
        self._debits = self._limiter.take_debits()
        models = self._doors.capped()
        quiet = not self._debits and not models
        if quiet and self._quiet:
            return None
        self._quiet = quiet
        keys = {str(key_id): list(debit) for key_id, debit in self._debits.items()}
        return {"from": self.me, "keys": keys, "models": models}

    def not_told(self) -> None:
        """The last message did not go out."""
        self._limiter.give_back(self._debits)
        self._debits = {}

    def hear(self, message: dict[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for what is no such message."""
        peer = str(message["from"])
        if peer == self.me:
            return
        keys = {int(key_id): (int(one[0]), int(one[1]), int(one[2])) for key_id, one in message["keys"].items()}
        models = {str(name): int(count) for name, count in message["models"].items()}
        self._said_at[peer] = time.monotonic()
        before = self._keys.get(peer, {})
        self._keys[peer] = {key_id: one[2] for key_id, one in keys.items()}
        self._models[peer] = models
        for key_id, (requests, tokens, _) in keys.items():
            self._limiter.debit(key_id, requests, tokens)
        self._sum_keys(before.keys() | keys.keys())
        self._sum_models()

    def forget_silent(self) -> None:
        """Call now and then: what a process that ended had under way is over."""
        before = time.monotonic() - _SILENT_S
        for peer in [peer for peer, at in self._said_at.items() if at < before]:
            del self._said_at[peer]
            keys = self._keys.pop(peer, {})
            self._models.pop(peer, None)
            self._sum_keys(set(keys))
            self._sum_models()

    def _sum_keys(self, key_ids: set[int]) -> None:
        for key_id in key_ids:
            self._limiter.elsewhere(key_id, sum(keys.get(key_id, 0) for keys in self._keys.values()))

    def _sum_models(self) -> None:
        total: dict[str, int] = {}
        for models in self._models.values():
            for name, count in models.items():
                total[name] = total.get(name, 0) + count
        self._doors.elsewhere(total)
