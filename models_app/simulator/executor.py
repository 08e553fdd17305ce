"""The workers' memory beside the KV pool: weights and workspace, asleep and awake.

As measured with vLLM 0.24 on an H200: sleep frees the weights and the cached workspace, the CUDA context and all KV
bundles stay; waking maps the weights again; after level 2 they are garbage until they are read again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from models_app.simulator.cards import Cards
from models_app.simulator.logs import Log

FIRST_SLEEP_S = 2.1
SLEEP_S = {1: 0.067, 2: 0.027}
WAKE_S = {1: 0.063, 2: 0.018}
TAGS = ("weights", "kv_cache")


class Executor:
    """vLLM's executor, for what sleep mode asks of it."""

    def __init__(self, cards: Cards, log: Log, *, weights_bytes: int, workspace_bytes: int, speed: float) -> None:
        self.is_sleeping = False
        self.sleeping_tags: set[str] = set()
        self.weights_valid = True
        self.level: int | None = None
        self._cards = cards
        self._log = log
        self._weights_bytes = weights_bytes
        self._workspace_bytes = workspace_bytes
        self._speed = speed
        self._slept_before = False

    def sleep(self, level: int) -> None:
        """Give back weights and workspace. Level 1 keeps a copy in host memory, level 2 does not."""
        if self.is_sleeping:
            self._log.alert("abstract.py:361", "Executor is already sleeping.")
            return
        started = time.monotonic()
        # The first time host memory has to be pinned.
        seconds = FIRST_SLEEP_S if level == 1 and not self._slept_before else SLEEP_S.get(level, 0.067)
        time.sleep(seconds / self._speed)
        self._slept_before = self._slept_before or level == 1
        self._cards.give(self._weights_bytes + self._workspace_bytes)
        self._workspace_bytes = 0
        self.is_sleeping, self.sleeping_tags, self.level = True, set(TAGS), level
        self.weights_valid = level == 1
        self._log.say("abstract.py:390", f"It took {time.monotonic() - started:.6f} seconds to fall asleep.")

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Map what the tags name. Raises ``RuntimeError`` with torch's words when the card has no room."""
        if not self.is_sleeping:
            self._log.alert("abstract.py:395", "Executor is not sleeping.")
            return
        wanted = self.sleeping_tags & set(tags or TAGS)
        started = time.monotonic()
        if "weights" in wanted:
            if not self._cards.take(self._weights_bytes):
                raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:62")
            time.sleep(WAKE_S.get(self.level or 1, 0.063) / self._speed)
        self.sleeping_tags -= wanted
        self._log.say(
            "abstract.py:408", f"It took {time.monotonic() - started:.6f} seconds to wake up tags {sorted(wanted)}."
        )
        if not self.sleeping_tags:
            self.is_sleeping, self.level = False, None

    def collective_rpc(self, method: str, *_args: object, **_kwargs: object) -> list[None]:
        """Only ``reload_weights`` means anything here."""
        if method != "reload_weights":
            raise AttributeError(f"'Worker' object has no attribute '{method}'")
        time.sleep((0.2 + 0.03 * self._weights_bytes / 1e9) / self._speed)
        self.weights_valid = True
        return [None]
