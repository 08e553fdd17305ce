"""The cards as the memory policies see them: readings, rows and rules put together, once a look.

Everything a plan is made from comes from here, so that what a dialog shows, what the controller does and what a launch
is judged by are the same numbers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import redis

from gpus_app import selectors as gpu_readings
from gpus_app.models import Gpu, GpuPolicy
from gpus_app.policies.base import GpuView, InstanceView
from models_app import broker
from models_app.models import Instance, MemoryPolicy
from models_app.services.placement import READING_LIMIT_S
from models_app.states import HAS_PROCESS, OCCUPIES_GPU, InstanceState

log = logging.getLogger(__name__)
S = InstanceState

#: kvcached leaves this part of a card unmapped (KVCACHED_GPU_UTILIZATION, 0.95 by default).
KVCACHED_HEADROOM = 0.05
#: When each instance was last seen at work: field = id, value = epoch seconds.
ACTIVE_KEY = "sardeenz:active"
_ADJUSTABLE = frozenset({S.READY})


@dataclass(frozen=True)
class Card:
    """One GPU with what is on it. ``fresh`` is False when its newest reading is too old to act on."""

    gpu: Gpu
    policy: GpuPolicy
    view: GpuView
    rows: tuple[InstanceView, ...]
    instances: Mapping[int, Instance]
    fresh: bool
    reading: Mapping[str, Any] | None = None

    def for_rebalance(self) -> list[InstanceView]:
        """The instances with limits set by hand held where the operator put them."""
        return [
            self._by_hand(row) if row.elastic and not self.instances[row.id].limit_automatic else row
            for row in self.rows
        ]

    def _by_hand(self, row: InstanceView) -> InstanceView:
        """Held at the limit that is wanted: the reading may be a second older than the operator's wish."""
        wanted = self.instances[row.id].limit_bytes or row.limit_bytes
        return replace(row, guarantee_bytes=wanted, maximum_bytes=wanted)


@dataclass
class _Activity:
    """What was known of activity, and what this look found new."""

    known: dict[int, float]
    seen: dict[int, float] = field(default_factory=dict)


def policy_of(gpu: Gpu) -> GpuPolicy:
    """The policy in force, with its defaults where none was saved."""
    saved: GpuPolicy | None = getattr(gpu, "policy", None)
    return saved or GpuPolicy(gpu=gpu)


def cards(uuids: Iterable[str] | None = None, *, now: float | None = None) -> dict[str, Card]:
    """The cards with these UUIDs (default: all), by UUID. Three queries and two calls to the broker for any number."""
    now = time.time() if now is None else now
    rows = Gpu.objects.select_related("host", "policy")
    gpus = list(rows if uuids is None else rows.filter(uuid__in=list(uuids)))
    records = gpu_readings.latest_all(sorted({gpu.host.name for gpu in gpus})) if gpus else {}
    instances = list(
        Instance.objects.filter(state__in=OCCUPIES_GPU).select_related("model__memory_policy", "host", "attempt")
    )
    activity = _Activity(_activity_read())
    found = {gpu.uuid: _card(gpu, records.get(gpu.host.name), instances, activity, now) for gpu in gpus}
    _activity_write(activity.seen)
    return found


def _card(
    gpu: Gpu, record: Mapping[str, Any] | None, instances: list[Instance], activity: _Activity, now: float
) -> Card:
    reading = next((one for one in (record or {}).get("gpus", ()) if one["uuid"] == gpu.uuid), None)
    fresh = bool(record and reading and record["age_s"] <= READING_LIMIT_S and not reading.get("error"))
    seen = {row["id"]: row for row in (reading or {}).get("instances", ())} if fresh else {}
    here = [row for row in instances if gpu.uuid in row.gpu_uuids]
    policy = policy_of(gpu)
    elastic = any(row.model.kvcached for row in here)
    view = GpuView(
        uuid=gpu.uuid,
        total_bytes=gpu.total_bytes,
        reserve_bytes=policy.reserve_bytes,
        foreign_bytes=int(reading.get("other") or 0) if fresh and reading else 0,
        free_bytes=int(reading["free"]) if fresh and reading else None,
        kv_headroom_bytes=int(gpu.total_bytes * KVCACHED_HEADROOM) if elastic else 0,
        foreign_names=tuple(
            f"{one.get('name', '?')} (pid {one.get('pid')})" for one in (reading or {}).get("other_processes") or ()
        ),
    )
    return Card(
        gpu=gpu,
        policy=policy,
        view=view,
        rows=tuple(_row(row, seen.get(row.pk), activity, now) for row in here),
        instances={row.pk: row for row in here},
        fresh=fresh,
        reading=reading,
    )


def _row(row: Instance, reading: Mapping[str, Any] | None, activity: _Activity, now: float) -> InstanceView:
    read = reading or {}
    rules = getattr(row.model, "memory_policy", None) or MemoryPolicy(model=row.model)
    state = S(row.state)
    used, bundle = int(read.get("used") or 0), int(row.bundle_bytes or 0)
    running, waiting = int(read.get("running") or 0), int(read.get("waiting") or 0)
    idle_since = _idle_since(row, running + waiting > 0, activity, now) if reading else None
    limit = int(read.get("limit") or row.effective_limit_bytes or row.limit_bytes or 0)
    memory = row.attempt.memory if row.attempt else {}
    return InstanceView(
        id=row.pk,
        name=row.model.served_model_name,
        adjustable=(
            state in _ADJUSTABLE
            and row.model.kvcached
            and row.provider in ("addon", "pr324")
            and bool(read.get("limit"))
        ),
        asleep=state is S.SLEEPING,
        baseline_bytes=int(read.get("baseline") or 0),
        used_bytes=used,
        prealloc_bytes=int(read.get("prealloc") or 0),
        # An idle engine's use is its prefix cache, but for the page that it never gives back.
        evictable_bytes=max(used - bundle, 0) if reading and running + waiting == 0 else 0,
        limit_bytes=limit,
        capacity_bytes=int(row.capacity_bytes or 0),
        bundle_bytes=bundle,
        floor_bytes=int(row.safety_floor_bytes or 0),
        full_context_bytes=int(row.full_context_floor_bytes or 0),
        reserved_bytes=row.reserved_bytes,
        running=running,
        waiting=waiting,
        guarantee_bytes=rules.guarantee_bytes,
        maximum_bytes=rules.maximum_bytes,
        priority=rules.priority,
        idle_shrink_after_s=rules.idle_shrink_after_s,
        reclaim=rules.reclaim,
        pinned=row.model.pinned,
        sleepable=row.model.enable_sleep_mode and state is S.READY,
        asleep_bytes=memory.get("asleep_bytes"),
        idle_since=idle_since,
        ready_since=row.ready_at.timestamp() if row.ready_at and state in HAS_PROCESS - {S.STARTING} else None,
        limit_set_at=row.limit_set_at.timestamp() if row.limit_set_at else None,
        tensor_parallel_size=row.model.tensor_parallel_size,
        dies_below_use=row.provider == "pr324",
    )


def _idle_since(row: Instance, busy: bool, activity: _Activity, now: float) -> float | None:
    """When it was last seen at work, at the earliest when it became ready; None while it works."""
    if busy:
        activity.seen[row.pk] = now
        return None
    ready = row.ready_at.timestamp() if row.ready_at else now
    return max(activity.known.get(row.pk, ready), ready)


def _activity_read() -> dict[int, float]:
    connection = broker.client()
    if connection is None:
        return {}
    try:
        return {int(pk): float(at) for pk, at in connection.hgetall(ACTIVE_KEY).items()}
    except (redis.RedisError, OSError, ValueError) as exc:
        log.info("activity not known: %s", exc)
        return {}


def _activity_write(seen: Mapping[int, float]) -> None:
    connection = broker.client()
    if connection is None or not seen:
        return
    try:
        connection.hset(ACTIVE_KEY, mapping={str(pk): at for pk, at in seen.items()})
    except (redis.RedisError, OSError) as exc:
        log.info("activity not kept: %s", exc)
