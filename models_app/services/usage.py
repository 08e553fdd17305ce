"""Folding what the routers counted into one row per key, model and day.

Routers push batches to a Redis list; nothing is written per request. A batch carries its sender and a number, and the
last number of each sender is written with the rows: whoever dies in between, a batch is folded once. Batches are taken
off the list by their value afterwards, so two workers that fold at once take nothing of each other's away.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from typing import Any, cast

import orjson
import redis
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from models_app import broker
from models_app.models import ApiKey, UsageRecord, UsageSender

log = logging.getLogger(__name__)

LIST = "sardeenz:usage"
_BATCH = 500
_SENDERS_KEEP = timedelta(days=31)
_SUMS = ("requests", "errors", "prompt_tokens", "completion_tokens", "ttft_ms_sum")
_HISTOGRAMS = ("ttft_histogram", "inter_token_histogram")


@dataclass
class _Sum:
    """What is added to one row."""

    counts: Counter[str] = field(default_factory=Counter)
    histograms: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in _HISTOGRAMS})


@dataclass(frozen=True)
class _Batch:
    """What one router counted in a few seconds."""

    sender: str
    sequence: int
    records: list[Any]


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
        _write([batch for raw in waiting if (batch := _batch(raw)) is not None])
        with connection.pipeline(transaction=False) as pipeline:
            for raw in waiting:
                pipeline.lrem(LIST, 1, cast("str", raw))
            pipeline.execute()
    except (redis.RedisError, OSError) as exc:
        log.warning("usage not folded: %s", exc)
        return 0
    return len(waiting)


def _batch(raw: bytes) -> _Batch | None:
    """A router's batch; what is none is dropped, or it would block the list for ever."""
    try:
        value = orjson.loads(raw)
        return _Batch(str(value["sender"])[:64], int(value["sequence"]), list(value["records"]))
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as exc:
        log.warning("usage entry dropped: %s: %s", type(exc).__name__, exc)
        return None


def _write(batches: list[_Batch]) -> None:
    with transaction.atomic():
        sums: dict[Key, _Sum] = {}
        used: dict[int, float] = {}
        for record in _unseen(batches):
            _sum_up(record, sums, used)
        for (day, key_name, name), total in sums.items():
            _add(day, key_name, name, total)
        for pk, at in used.items():
            when = datetime.fromtimestamp(at, UTC)
            ApiKey.objects.filter(Q(last_used_at=None) | Q(last_used_at__lt=when), pk=pk).update(last_used_at=when)


def _unseen(batches: list[_Batch]) -> list[Any]:
    """The records of batches that were not folded before; remembers their numbers. Inside the transaction."""
    senders = {batch.sender for batch in batches}
    rows = UsageSender.objects.select_for_update().filter(sender__in=senders).order_by("pk")
    last = dict(rows.values_list("sender", "sequence"))
    known = set(last)
    records: list[Any] = []
    for batch in batches:
        if batch.sequence > last.get(batch.sender, 0):
            last[batch.sender] = batch.sequence
            records.extend(batch.records)
    now = timezone.now()
    for sender, sequence in last.items():
        if sender in known:
            UsageSender.objects.filter(sender=sender).update(sequence=sequence, at=now)
        else:
            UsageSender.objects.create(sender=sender, sequence=sequence, at=now)
    return records


def _sum_up(record: Any, sums: dict[Key, _Sum], used: dict[int, float]) -> None:
    """Add one record; one that makes no sense is dropped as a whole."""
    try:
        key = (date.fromisoformat(record["day"]), str(record["key_name"])[:64], str(record["model"])[:128])
        counts = {name: int(record.get(name) or 0) for name in _SUMS}
        histograms = {name: {str(k): int(v) for k, v in (record.get(name) or {}).items()} for name in _HISTOGRAMS}
        last = (int(record.get("key_id") or 0), float(record.get("last_at") or 0.0))
    except (AttributeError, KeyError, TypeError, ValueError) as exc:
        log.warning("usage record dropped: %s: %s", type(exc).__name__, exc)
        return
    total = sums.setdefault(key, _Sum())
    total.counts.update(counts)
    for name, counted in histograms.items():
        total.histograms[name].update(counted)
    if all(last):
        used[last[0]] = max(used.get(last[0], 0.0), last[1])


def senders_prune() -> int:
    """Forget routers that have sent nothing for a month; how many."""
    old = UsageSender.objects.filter(at__lt=timezone.now() - _SENDERS_KEEP)
    return old.delete()[0]


def _add(day: date, key_name: str, name: str, total: _Sum) -> None:
    row, _created = UsageRecord.objects.select_for_update().get_or_create(
        day=day, key_name=key_name, served_model_name=name
    )
    for column in _SUMS:
        setattr(row, column, getattr(row, column) + total.counts[column])
    for column in _HISTOGRAMS:
        setattr(row, column, dict(Counter(getattr(row, column)) + total.histograms[column]))
    row.save()
