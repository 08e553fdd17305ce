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
from gpus_app.policies.base import GpuView, InstanceView, kv_headroom_bytes
from models_app import broker
from models_app.models import Instance, MemoryPolicy, Model
from models_app.services.memory.placement import READING_LIMIT_S, claim_bytes, need_on
from models_app.states import HAS_PROCESS, OCCUPIES_GPU, InstanceState, Stage

log = logging.getLogger(__name__)
S = InstanceState

#: When each instance was last seen at work: field = id, value = epoch seconds.
ACTIVE_KEY = "sardeenz:active"
#: How many tokens it had made by then: what is over between two looks shows in nothing else.
TOKENS_KEY = "sardeenz:active:tokens"
_ADJUSTABLE = frozenset({S.READY})
#: States before an engine serves: what it will have is known from its reservation and its first limit alone.
_TO_COME = frozenset({S.SCHEDULED, S.STARTING})
#: States in which it takes requests, or works off the last ones, under the limit that is in force.
_AT_WORK = frozenset({S.READY, S.UNREACHABLE, S.DRAINING})


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
        """Held at the limit that is wanted: the reading may be a second older than the operator's wish.

        In whole bundles, as the engine keeps it, and below the floor where the operator forced it there.
        """
        wanted = self.instances[row.id].limit_bytes or row.limit_bytes
        whole = wanted // row.bundle_bytes * row.bundle_bytes
        return replace(row, guarantee_bytes=whole, maximum_bytes=whole, floor_bytes=0)


@dataclass
class _Activity:
    """What was known of activity, and what this look found new."""

    known: dict[int, float]
    tokens: dict[int, float]
    seen: dict[int, float] = field(default_factory=dict)
    counted: dict[int, float] = field(default_factory=dict)


def policy_of(gpu: Gpu) -> GpuPolicy:
    """The policy in force, with its defaults where none was saved."""
    saved: GpuPolicy | None = getattr(gpu, "policy", None)
    return saved or GpuPolicy(gpu=gpu)


def cards(
    uuids: Iterable[str] | None = None, *, now: float | None = None, newcomer: Model | None = None
) -> dict[str, Card]:
    """The cards with these UUIDs (default: all), by UUID; ``newcomer``: a model that is to come to one of them.

    Two queries and a few calls to the broker for any number, and one query for each instance that is about to start.
    """
    now = time.time() if now is None else now
    rows = Gpu.objects.select_related("host", "policy")
    gpus = list(rows if uuids is None else rows.filter(uuid__in=list(uuids)))
    records = gpu_readings.latest_all(sorted({gpu.host.name for gpu in gpus})) if gpus else {}
    instances = list(
        Instance.objects.filter(state__in=OCCUPIES_GPU).select_related("model__memory_policy", "host", "attempt")
    )
    activity = _Activity(_activity_read(ACTIVE_KEY), _activity_read(TOKENS_KEY))
    found = {gpu.uuid: _card(gpu, records.get(gpu.host.name), instances, activity, now, newcomer) for gpu in gpus}
    _activity_write(ACTIVE_KEY, activity.seen)
    _activity_write(TOKENS_KEY, activity.counted)
    return found


def _card(
    gpu: Gpu,
    record: Mapping[str, Any] | None,
    instances: list[Instance],
    activity: _Activity,
    now: float,
    newcomer: Model | None,
) -> Card:
    reading = next((one for one in (record or {}).get("gpus", ()) if one["uuid"] == gpu.uuid), None)
    fresh = bool(record and reading and record["age_s"] <= READING_LIMIT_S and not reading.get("error"))
    here = [row for row in instances if gpu.uuid in row.gpu_uuids]
    seen, left_over = _parts(here, (reading or {}).get("instances", ()) if fresh else ())
    policy = policy_of(gpu)
    elastic = any(model.kvcached for model in (*(row.model for row in here), newcomer) if model)
    view = GpuView(
        uuid=gpu.uuid,
        total_bytes=gpu.total_bytes,
        reserve_bytes=policy.reserve_bytes,
        foreign_bytes=left_over + int(reading.get("other") or 0) if fresh and reading else 0,
        free_bytes=int(reading["free"]) if fresh and reading else None,
        kv_headroom_bytes=kv_headroom_bytes(gpu.total_bytes, elastic=elastic),
        foreign_names=tuple(
            f"{one.get('name', '?')} (pid {one.get('pid')})" for one in (reading or {}).get("other_processes") or ()
        ),
    )
    return Card(
        gpu=gpu,
        policy=policy,
        view=view,
        rows=tuple(_row(row, seen.get(row.pk), gpu, activity, now) for row in here),
        instances={row.pk: row for row in here},
        fresh=fresh,
        reading=reading,
    )


def _parts(here: Iterable[Instance], parts: Iterable[Mapping[str, Any]]) -> tuple[dict[int, Mapping[str, Any]], int]:
    """What the reading says of each instance, and the bytes of engines of ours that are over and not gone yet."""
    names = {row.pk: row.ipc_name for row in here}
    seen: dict[int, Mapping[str, Any]] = {}
    left_over = 0
    for part in sorted(parts, key=lambda part: part.get("ipc") == names.get(part["id"])):
        pk = part["id"]
        if pk in names:
            left_over += int(seen[pk].get("resident") or 0) if pk in seen else 0
            seen[pk] = part
        else:
            left_over += int(part.get("resident") or 0)
    return seen, left_over


def _row(row: Instance, reading: Mapping[str, Any] | None, gpu: Gpu, activity: _Activity, now: float) -> InstanceView:
    read = reading or {}
    rules = getattr(row.model, "memory_policy", None) or MemoryPolicy(model=row.model)
    state = S(row.state)
    used, bundle = int(read.get("used") or 0), int(row.bundle_bytes or 0)
    running, waiting = int(read.get("running") or 0), int(read.get("waiting") or 0)
    # An engine that does not tell how many requests it has may be too busy to answer: never taken for idle.
    told = read.get("running") is not None
    idle_since = _idle_since(row, read, activity, now) if told else None
    if reading and not told and state in _AT_WORK:
        running = 1
    # What the engine answered may be newer than the reading, and a raise counts from the moment it is given.
    limit = max(int(read.get("limit") or 0), row.effective_limit_bytes or 0) or row.limit_bytes or 0
    memory = row.attempt.memory if row.attempt else {}
    adjustable = (
        state in _ADJUSTABLE and row.model.kvcached and row.provider in ("addon", "pr324") and bool(read.get("limit"))
    )
    reserved = claim_bytes(row)
    if row.model.kvcached and not adjustable:
        reserved = max(reserved, _promised(row, read, limit, gpu))
    return InstanceView(
        id=row.pk,
        name=row.model.served_model_name,
        adjustable=adjustable,
        asleep=state is S.SLEEPING,
        baseline_bytes=int(read.get("baseline") or 0),
        used_bytes=used,
        prealloc_bytes=int(read.get("prealloc") or 0),
        # An idle engine's use is its prefix cache, but for the page that it never gives back.
        evictable_bytes=max(used - bundle, 0) if told and running + waiting == 0 else 0,
        limit_bytes=limit,
        capacity_bytes=int(row.capacity_bytes or 0),
        bundle_bytes=bundle,
        floor_bytes=int(row.safety_floor_bytes or 0),
        full_context_bytes=int(row.full_context_floor_bytes or 0),
        reserved_bytes=reserved,
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


def _promised(row: Instance, read: Mapping[str, Any], limit: int, gpu: Gpu) -> int:
    """What an instance whose limit cannot be moved now may take without asking anyone; 0: nothing beyond its claim."""
    state = S(row.state)
    known = int((row.attempt.memory if row.attempt else {}).get("baseline_bytes") or read.get("baseline") or 0)
    if state in _TO_COME and row.limit_bytes:
        # The segment holds the whole capacity for a moment before the first limit is written into it.
        starts = state is S.SCHEDULED or row.stage != Stage.WAKING
        need = need_on(row.model, gpu_name=gpu.name, gpu_total_bytes=gpu.total_bytes) if starts else None
        return (need.baseline_bytes if need else known) + row.limit_bytes
    if state in _AT_WORK and limit:
        return (known or max(row.reserved_bytes - int(row.safety_floor_bytes or 0), 0)) + limit
    return 0


def _idle_since(row: Instance, read: Mapping[str, Any], activity: _Activity, now: float) -> float | None:
    """When it was last seen at work, at the earliest when it became ready; None while it works."""
    tokens = read.get("gen_tokens")
    known = activity.tokens.get(row.pk)
    if tokens is not None and tokens != known:
        activity.counted[row.pk] = int(tokens)
    if read.get("running") or read.get("waiting"):
        activity.seen[row.pk] = now
        return None
    if tokens is not None and known is not None and tokens > known:
        activity.seen[row.pk] = now  # a request came and went between two looks
        return now
    ready = row.ready_at.timestamp() if row.ready_at else now
    return max(activity.seen.get(row.pk, activity.known.get(row.pk, ready)), ready)


def _activity_read(key: str) -> dict[int, float]:
    connection = broker.client()
    if connection is None:
        return {}
    try:
        return {int(pk): float(value) for pk, value in connection.hgetall(key).items()}
    except (redis.RedisError, OSError, ValueError) as exc:
        log.info("activity not known: %s", exc)
        return {}


def _activity_write(key: str, seen: Mapping[int, float]) -> None:
    connection = broker.client()
    if connection is None or not seen:
        return
    try:
        connection.hset(key, mapping={str(pk): value for pk, value in seen.items()})
    except (redis.RedisError, OSError) as exc:
        log.info("activity not kept: %s", exc)
