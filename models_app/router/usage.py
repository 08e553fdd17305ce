"""What was used: requests, tokens and times per key, model and day, added up in memory and handed on in batches.

Nothing is written per request. What waits to be handed on is one record per key and model, so it stays small however
long the receiver is away.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from datetime import UTC, datetime
from typing import Any

#: Upper bounds in milliseconds; a last bucket holds what is slower.
TTFT_BOUNDS_MS = (10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 30000, 60000)
INTER_TOKEN_BOUNDS_MS = (2, 5, 10, 20, 30, 50, 75, 100, 150, 250, 500, 1000, 2500)
_INTER_TOKEN_BOUNDS_S = tuple(bound / 1000 for bound in INTER_TOKEN_BOUNDS_MS)


class Gaps:
    """Times between the pieces of one stream, counted while it runs."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * (len(INTER_TOKEN_BOUNDS_MS) + 1)

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_INTER_TOKEN_BOUNDS_S, seconds)] += 1


class UsageRecord:
    """Sums of one key on one model in one day."""

    __slots__ = (
        "completion_tokens",
        "day",
        "errors",
        "inter_token",
        "key_id",
        "key_name",
        "last_at",
        "model",
        "prompt_tokens",
        "requests",
        "ttft",
        "ttft_ms_sum",
    )

    def __init__(self, day: str, key_id: int, key_name: str, model: str) -> None:
        self.day = day
        self.key_id = key_id
        self.key_name = key_name
        self.model = model
        self.requests = 0
        self.errors = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.ttft_ms_sum = 0
        self.last_at = 0.0
        self.ttft = [0] * (len(TTFT_BOUNDS_MS) + 1)
        self.inter_token = [0] * (len(INTER_TOKEN_BOUNDS_MS) + 1)

    def first_token(self, seconds: float) -> None:
        """Time from the request to its first generated token."""
        milliseconds = seconds * 1000
        self.ttft_ms_sum += round(milliseconds)
        self.ttft[bisect_left(TTFT_BOUNDS_MS, milliseconds)] += 1

    def gaps(self, counts: list[int]) -> None:
        """Add what a ``Gaps`` of one stream has counted."""
        self.inter_token = [a + b for a, b in zip(self.inter_token, counts, strict=True)]

    def is_empty(self) -> bool:
        return not (
            self.requests or self.errors or self.prompt_tokens or self.completion_tokens or any(self.inter_token)
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "day": self.day,
            "key_id": self.key_id,
            "key_name": self.key_name,
            "model": self.model,
            "requests": self.requests,
            "errors": self.errors,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "ttft_ms_sum": self.ttft_ms_sum,
            "ttft_histogram": _histogram(TTFT_BOUNDS_MS, self.ttft),
            "inter_token_histogram": _histogram(INTER_TOKEN_BOUNDS_MS, self.inter_token),
            "last_at": self.last_at,
        }

    def add(self, other: UsageRecord) -> None:
        self.requests += other.requests
        self.errors += other.errors
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.ttft_ms_sum += other.ttft_ms_sum
        self.last_at = max(self.last_at, other.last_at)
        self.ttft = [a + b for a, b in zip(self.ttft, other.ttft, strict=True)]
        self.inter_token = [a + b for a, b in zip(self.inter_token, other.inter_token, strict=True)]


def _histogram(bounds: tuple[int, ...], counts: list[int]) -> dict[str, int]:
    """Bound in ms ("inf" for the last) to the number of values at or under it and above the one before."""
    names = [*map(str, bounds), "inf"]
    return {name: count for name, count in zip(names, counts, strict=True) if count}


class UsageBook:
    """The records that wait to be handed on."""

    def __init__(self) -> None:
        self._records: dict[tuple[int, str], UsageRecord] = {}
        self._older: list[UsageRecord] = []  # of a day that has ended
        self._day = ""
        self._day_ends = 0.0

    def record(self, key_id: int, key_name: str, model: str) -> UsageRecord:
        """The record of today to add to."""
        now = time.time()
        if now >= self._day_ends:
            self._older.extend(record for record in self._records.values() if not record.is_empty())
            self._records = {}
            today = datetime.fromtimestamp(now, UTC)
            self._day = today.date().isoformat()
            self._day_ends = now - now % 86400 + 86400
        record = self._records.get((key_id, model))
        if record is None:
            record = self._records[key_id, model] = UsageRecord(self._day, key_id, key_name, model)
        record.last_at = now
        return record

    def take(self) -> list[UsageRecord]:
        """All that was added up since the last call."""
        records, self._records = self._records, {}
        older, self._older = self._older, []
        return older + [record for record in records.values() if not record.is_empty()]

    def give_back(self, records: list[UsageRecord]) -> None:
        """They could not be handed on: keep them, added up with what came since."""
        merged = {(record.day, record.key_id, record.model): record for record in self._older}
        for record in records:
            kept = merged.setdefault((record.day, record.key_id, record.model), record)
            if kept is not record:
                kept.add(record)
        self._older = list(merged.values())
