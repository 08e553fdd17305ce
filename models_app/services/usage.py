"""Folding what the routers counted into one row per key, model and day.

Routers push batches to a Redis list; nothing is written per request. The list is cut only after the rows are committed:
a crash in between counts a batch twice rather than losing it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any, cast

import orjson
import redis
from django.db import transaction
from django.db.models import Q

from models_app import broker
from models_app.models import ApiKey, UsageRecord

log = logging.getLogger(__name__)

LIST = "sardeenz:usage"
_BATCH = 500
_SUMS = ("requests", "errors", "prompt_tokens", "completion_tokens", "ttft_ms_sum")
_HISTOGRAMS = ("ttft_histogram", "inter_token_histogram")


@dataclass
class _Sum:
    """What is added to one row."""

    counts: Counter[str] = field(default_factory=Counter)
    histograms: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in _HISTOGRAMS})


Key = tuple[date, str, str]


def usage_fold() -> int:
    """Add waiting batches to their rows; how many entries were folded. 0 while the broker is away."""
    connection = broker.client()
    if connection is None:
        return 0
    try:
        waiting = cast("list[bytes]", connection.lrange(LIST, 0, _BATCH - 1))
        if not waiting:
            return 0
        _write(entry for raw in waiting for entry in _entries(raw))
        connection.ltrim(LIST, len(waiting), -1)
    except (redis.RedisError, OSError) as exc:
        log.warning("usage not folded: %s", exc)
        return 0
    return len(waiting)


def _entries(raw: bytes) -> list[dict[str, Any]]:
    """A batch is one record or a list of them; what is neither is dropped, or it would block the list for ever."""
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        log.warning("usage entry dropped, it is no JSON: %r", raw[:80])
        return []
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, dict)]


def _write(entries: Iterable[dict[str, Any]]) -> None:
    sums: dict[Key, _Sum] = {}
    used: dict[int, float] = {}
    for entry in entries:
        try:
            key = (date.fromisoformat(entry["day"]), str(entry["key_name"])[:64], str(entry["model"])[:128])
            total = sums.setdefault(key, _Sum())
            total.counts.update({name: int(entry.get(name) or 0) for name in _SUMS})
            for name in _HISTOGRAMS:
                total.histograms[name].update({str(k): int(v) for k, v in (entry.get(name) or {}).items()})
            if entry.get("key_id") and entry.get("last_at"):
                used[int(entry["key_id"])] = max(used.get(int(entry["key_id"]), 0.0), float(entry["last_at"]))
        except (KeyError, TypeError, ValueError) as exc:
            log.warning("usage entry dropped: %s: %s", type(exc).__name__, exc)
    with transaction.atomic():
        for (day, key_name, name), total in sums.items():
            _add(day, key_name, name, total)
        for pk, at in used.items():
            when = datetime.fromtimestamp(at, UTC)
            ApiKey.objects.filter(Q(last_used_at=None) | Q(last_used_at__lt=when), pk=pk).update(last_used_at=when)


def _add(day: date, key_name: str, name: str, total: _Sum) -> None:
    row, _created = UsageRecord.objects.select_for_update().get_or_create(
        day=day, key_name=key_name, served_model_name=name
    )
    for column in _SUMS:
        setattr(row, column, getattr(row, column) + total.counts[column])
    for column in _HISTOGRAMS:
        setattr(row, column, dict(Counter(getattr(row, column)) + total.histograms[column]))
    row.save()
