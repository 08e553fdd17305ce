"""Engines whose memory grows although nothing is asked of them, found in the minutes' means of the last hours.

The judgement is ``gpus_app.policies.leaks``. What is found stands in the instance's row, for the list of what needs
attention, and once in its events; it goes by itself when the growth ends, and with a new start.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from django.utils import timezone

from gpus_app.models import Gpu, GpuSample
from gpus_app.policies.base import gib
from gpus_app.policies.leaks import LEAST_SPAN_S, Leak, Point, leak
from models_app import broker, transitions
from models_app.models import Instance
from models_app.states import InstanceState

log = logging.getLogger(__name__)

ACTOR = "leak check"
RESOLUTION_S = 60
#: So far back growth is looked for.
WINDOW_S = 12 * 3600.0
#: An engine's first minutes are warm-up: caches of compilers, the first large batch.
WARM_UP_S = 600.0


def leaks_look() -> int:
    """Look once at every instance that has been ready for long enough; how many grow. Control worker.

    Costs one query for each GPU on which there is such an instance, a few hundred rows.
    """
    if not broker.once_in("leaks", 60.0):
        return 0
    now = timezone.now()
    ready = Instance.objects.filter(
        state=InstanceState.READY, ready_at__lte=now - timedelta(seconds=LEAST_SPAN_S + WARM_UP_S)
    ).select_related("model", "host")
    rows = {row.pk: row for row in ready}
    found: dict[int, tuple[Leak, str]] = {}
    for uuid in sorted({uuid for row in rows.values() for uuid in row.gpu_uuids}):
        here = [row for row in rows.values() if uuid in row.gpu_uuids]
        for pk, points in _points(uuid, here, now - timedelta(seconds=WINDOW_S)).items():
            one = leak(points)
            if one is not None and (pk not in found or one.grown_bytes > found[pk][0].grown_bytes):
                found[pk] = (one, uuid)
    for pk, row in rows.items():
        _record(row, *found.get(pk, (None, "")))
    return len(found)


def _points(uuid: str, rows: Iterable[Instance], since: datetime) -> dict[int, list[Point]]:
    """What each of these instances held on the GPU, since it was warm."""
    warm = {row.pk: row.ready_at.timestamp() + WARM_UP_S for row in rows if row.ready_at}
    points: dict[int, list[Point]] = defaultdict(list)
    samples = GpuSample.objects.filter(gpu__uuid=uuid, resolution_s=RESOLUTION_S, at__gte=since).order_by("at")
    for at, parts in samples.values_list("at", "instances").iterator():
        t = at.timestamp()
        for part in parts:
            pk, baseline = part["id"], part.get("baseline")
            if baseline is None or t < warm.get(pk, float("inf")):
                continue
            footprint = (part.get("used") or 0) + (part.get("prealloc") or 0)
            points[pk].append(Point(t, baseline, footprint, idle=part.get("busy") is False))
    return points


def _record(row: Instance, found: Leak | None, uuid: str) -> None:
    known = growth_of(row)
    if found is None:
        if row.memory_growth:
            transitions.report(row.pk, memory_growth={})
        if known:
            transitions.note(row.pk, "leak", "Its memory does not grow without load any more.", actor=ACTOR)
        return
    facts = {
        "attempt": row.attempt_id,
        "gpu_uuid": uuid,
        "since": found.since,
        "bytes_per_hour": found.bytes_per_hour,
        "grown_bytes": found.grown_bytes,
    }
    if transitions.report(row.pk, matching={"attempt": row.attempt_id}, memory_growth=facts) and not known:
        row.memory_growth = facts
        sentence = growth_sentence(row, free_bytes=_free(uuid))
        transitions.note(row.pk, "leak", sentence, actor=ACTOR, facts=facts)
        log.warning("%s: %s", row, sentence)


def _free(uuid: str) -> int | None:
    gpu = Gpu.objects.filter(uuid=uuid).first()
    last = GpuSample.objects.filter(gpu__uuid=uuid, resolution_s=RESOLUTION_S).order_by("-at").first()
    return None if gpu is None or last is None else gpu.total_bytes - last.used_bytes


def growth_of(row: Instance) -> Mapping[str, Any]:
    """What was found of this start; empty: nothing."""
    facts: Mapping[str, Any] = row.memory_growth or {}
    return facts if facts.get("attempt") == row.attempt_id else {}


def growth_sentence(row: Instance, *, free_bytes: int | None = None, now: float | None = None) -> str:
    """How much, since when, how fast, what next, and by when; for pages and events."""
    facts = growth_of(row)
    rate = int(facts["bytes_per_hour"])
    since = datetime.fromtimestamp(float(facts["since"]), UTC)
    text = (
        f"{gib(facts['grown_bytes'])} more than at {since:%d %b %H:%M} UTC, {gib(rate)} an hour, without a request "
        "that would explain it. Trim it; if that brings nothing back, restart it at a quiet time"
    )
    if free_bytes is None or rate <= 0:
        return f"{text}."
    elapsed = max((time.time() if now is None else now) - float(facts["since"]), 0) / 3600
    hours = max(free_bytes, 0) / rate
    return f"{text}: {gib(max(free_bytes, 0))} are free on its GPU, enough for {hours:.0f} h ({elapsed:.0f} h so far)."
