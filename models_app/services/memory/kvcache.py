"""KV limits, the wanted side: say what is wanted (bytes + rising revision) and wait for what the engine said of it.

The other side, which speaks to the engine on its own host, is ``limit_apply``.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import F
from django.utils import timezone
from django.utils.text import capfirst

from gpus_app.models import Gpu
from gpus_app.policies.base import gib
from models_app import broker, dispatch, transitions
from models_app.errors import BelowFloor, Conflict, InvalidInput
from models_app.models import Instance, MemoryPolicy
from models_app.services.audit import audited
from models_app.services.sizes import check_percent, parse_percent, parse_size
from models_app.states import LIMIT_NOW, TERMINAL, InstanceState, LimitStatus

__all__ = [
    "LimitAnswer",
    "SafetyFloor",
    "kvcache_limit_percent_set",
    "kvcache_limit_set",
    "kvcache_safety_floor",
    "kvcache_trim",
    "parse_percent",
    "parse_size",
]

_POLL_S = 0.05
_LATER = {
    InstanceState.PENDING: "as soon as it has started",
    InstanceState.SCHEDULED: "as soon as it has started",
    InstanceState.STARTING: "as soon as it is ready",
    InstanceState.SLEEPING: "as soon as it is awake",
}


@dataclass(frozen=True)
class LimitAnswer:
    """What is wanted and what the engine said of it. Bytes are per GPU."""

    instance_id: int
    status: str  # LimitStatus: applied, deferred, pending, starved, stale, conflict, rejected, unavailable
    message: str
    revision: int
    requested_bytes: int | None
    limit_bytes: int | None
    effective_limit_bytes: int | None
    used_bytes: int | None = None
    prealloc_bytes: int | None = None
    freed_bytes: int | None = None
    overage_bytes: int | None = None
    capacity_bytes: int | None = None
    bundle_bytes: int | None = None
    hard_minimum_bytes: int | None = None
    safety_floor_bytes: int | None = None
    full_context_floor_bytes: int | None = None
    clamped: bool = False
    warnings: list[str] = field(default_factory=list)
    preempted: dict[str, Any] | None = None
    set_by: str = ""
    set_at: datetime | None = None
    wire: dict[str, Any] = field(default_factory=dict)  # the engine's whole answer


@dataclass(frozen=True)
class SafetyFloor:
    """The lowest sensible limits of one instance, bytes per GPU; None where the engine has not said."""

    safety_floor_bytes: int | None
    hard_minimum_bytes: int | None
    full_context_floor_bytes: int | None
    bundle_bytes: int | None
    capacity_bytes: int | None
    source: str  # "engine", or "estimate" from the model's architecture


def kvcache_limit_set(
    instance: Instance,
    *,
    size: str | int | float,
    actor: str,
    force: bool = False,
    reclaim: str | None = None,
    wait_s: float = 12.0,
) -> LimitAnswer:
    """Set the KV limit (bytes, ``3G``, ``40%`` of the own GPU) and wait up to ``wait_s`` for the engine's answer.

    While the instance starts or sleeps, the limit is kept (status pending) and applied as soon as it can be.
    Raises InvalidInput, BelowFloor (without ``force``), Conflict (no longer live), BrokerAway before anything is
    written.
    """
    percent = parse_percent(size)
    wanted = parse_size(size) if percent is None else _percent_bytes(instance, percent)
    return _limit_set(instance, wanted, str(size), actor=actor, force=force, reclaim=reclaim, wait_s=wait_s)


def kvcache_limit_percent_set(
    instance: Instance,
    *,
    percent: float,
    actor: str,
    force: bool = False,
    reclaim: str | None = None,
    wait_s: float = 12.0,
) -> LimitAnswer:
    """The same, in percent of the total memory of its own GPU (of the smallest, when it has several)."""
    wanted = _percent_bytes(instance, check_percent(percent))
    return _limit_set(instance, wanted, f"{percent:g}%", actor=actor, force=force, reclaim=reclaim, wait_s=wait_s)


def kvcache_trim(instance: Instance, *, actor: str, wait_s: float = 12.0) -> LimitAnswer:
    """Give idle KV memory back without changing the limit; ``freed_bytes`` is measured.

    Raises Conflict when the engine cannot be asked now, BrokerAway.
    """
    request_id = secrets.token_hex(8)
    with audited(actor, "limit.trim", str(instance)):
        row = Instance.objects.select_related("host").get(pk=instance.pk)
        if InstanceState(row.state) not in LIMIT_NOW or row.host is None:
            raise Conflict(f"It is {row.state}: there is no running engine that could be asked to trim.")
        dispatch.send(dispatch.TRIM, row.pk, request_id, actor, queue=row.host.queue, expires=max(wait_s, 5.0))
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        row.refresh_from_db()
        answer = row.limit_answer.get("trim", {})
        if answer.get("request_id") == request_id:
            return _answer(row, answer)
        time.sleep(_POLL_S)
    message = "The engine has not answered yet. Look again in a moment."
    return _answer(row, {"status": LimitStatus.PENDING, "message": message})


def kvcache_safety_floor(instance: Instance) -> SafetyFloor:
    """Floors as the engine told them, or an estimate from the architecture while it has not."""
    if instance.safety_floor_bytes is not None:
        return SafetyFloor(
            instance.safety_floor_bytes,
            instance.hard_minimum_bytes,
            instance.full_context_floor_bytes,
            instance.bundle_bytes,
            instance.capacity_bytes,
            "engine",
        )
    return _estimate(instance)


def _estimate(instance: Instance) -> SafetyFloor:
    """By the architecture's facts, until the engine has told; two bundles are kvcached's hard minimum."""
    facts = instance.model.facts or {}
    bundle = facts.get("bundle_bytes")
    return SafetyFloor(
        safety_floor_bytes=facts.get("safety_floor_bytes"),
        hard_minimum_bytes=2 * bundle if bundle else None,
        full_context_floor_bytes=None,
        bundle_bytes=bundle,
        capacity_bytes=instance.capacity_bytes,
        source="estimate",
    )


def _percent_bytes(instance: Instance, percent: float) -> int:
    totals = list(Gpu.objects.filter(uuid__in=instance.gpu_uuids).values_list("total_bytes", flat=True))
    if not totals:
        raise InvalidInput({"size": "A percentage needs a GPU, and this instance has none yet. Give a size."})
    return int(min(totals) * percent / 100)


def _check(row: Instance, wanted: int, force: bool) -> None:
    """Raise when the engine would refuse: the operator hears it at once, with the numbers."""
    if InstanceState(row.state) in TERMINAL | {InstanceState.STOPPING}:
        raise Conflict(f"It is {row.state}: a limit can be set while it runs, starts or sleeps.")
    if not row.model.kvcached or row.provider == "none":
        raise Conflict("It runs without kvcached: its KV memory is a fixed reservation that cannot be changed.")
    floor = kvcache_safety_floor(row)
    if floor.hard_minimum_bytes is not None and wanted < floor.hard_minimum_bytes:
        raise InvalidInput(
            {"size": f"{gib(wanted)} is below the hard minimum of {gib(floor.hard_minimum_bytes)} (two bundles)."}
        )
    if floor.safety_floor_bytes is not None and wanted < floor.safety_floor_bytes and not force:
        raise BelowFloor(
            f"{gib(wanted)} is below the safety floor of {gib(floor.safety_floor_bytes)}: requests could wait for "
            "ever. Use force if you mean it.",
            requested_bytes=wanted,
            safety_floor_bytes=floor.safety_floor_bytes,
            hard_minimum_bytes=floor.hard_minimum_bytes,
        )


def _limit_set(
    instance: Instance, wanted: int, asked: str, *, actor: str, force: bool, reclaim: str | None, wait_s: float
) -> LimitAnswer:
    if reclaim is not None and reclaim not in MemoryPolicy.Reclaim.values:
        raise InvalidInput({"reclaim": f"{reclaim!r} is no way to reclaim; use wait, preempt or abort."})
    force = force is True
    with audited(actor, "limit.set", str(instance), detail=f"{asked}{' with force' if force else ''}"):
        broker.require()
        with transaction.atomic():
            row = _locked(instance)
            _check(row, wanted, force)
            revision = _write(row, wanted, actor, force, reclaim, automatic=False)
            moving = _write_successor(row, wanted, actor, force, reclaim)
    later = _LATER.get(InstanceState(row.state))
    if later is not None:
        row.refresh_from_db()
        answer = _answer(row, {"status": LimitStatus.PENDING, "requested_bytes": wanted})
    else:
        answer = _wait(row, revision, wanted, wait_s)
    return replace(answer, warnings=[*answer.warnings, moving]) if moving else answer


def _write_successor(row: Instance, wanted: int, actor: str, force: bool, reclaim: str | None) -> str:
    """The same wish for the instance that is taking over from this one, or it would end with it. A sentence, or ''."""
    successor = Instance.objects.live().filter(replaces=row).first()
    if successor is None:
        return ""
    new = _locked(successor)
    _write(new, wanted, actor, force, reclaim, automatic=False)
    return f"It is moving: the instance that takes over ({new.state}) gets the same limit."


def _locked(instance: Instance) -> Instance:
    rows = Instance.objects.select_for_update(of=("self",)).select_related("model__memory_policy", "host")
    return rows.get(pk=instance.pk)


def limit_write(
    instance: Instance,
    wanted: int,
    *,
    actor: str,
    reclaim: str | None = None,
    reason: str = "",
    automatic: bool | None,
    expected_revision: int | None = None,
) -> int:
    """Write a wish without waiting for its answer; the revision it got. For the controller and for plans.

    ``automatic`` None leaves it open whose hand the limit is in. ``expected_revision``: the one that the plan was made
    from; a limit that an operator has set since then is not covered. Raises as ``kvcache_limit_set``, and Conflict.
    """
    broker.require()
    with transaction.atomic():
        row = _locked(instance)
        if expected_revision is not None and row.limit_revision != expected_revision:
            raise Conflict(f"{row.limit_set_by} has set another limit in the meantime.")
        _check(row, wanted, False)
        return _write(row, wanted, actor, False, reclaim, reason=reason, automatic=automatic)


def _write(
    row: Instance,
    wanted: int,
    actor: str,
    force: bool,
    reclaim: str | None,
    *,
    reason: str = "",
    automatic: bool | None,
) -> int:
    """Write the wish; returns its revision. ``automatic``: whether the controller may move it from now on."""
    policy = getattr(row.model, "memory_policy", None)
    reclaim = reclaim or (policy.reclaim if policy else "wait")
    hand: dict[str, Any] = {} if automatic is None else {"limit_automatic": automatic}
    later = _LATER.get(InstanceState(row.state))
    bound = wanted if row.capacity_bytes is None else min(wanted, row.capacity_bytes)
    message = f"It is {row.state}: the limit is kept and applied {later}." if later else "Asked; no answer yet."
    transitions.report(
        row.pk,
        limit_bytes=bound,
        limit_revision=F("limit_revision") + 1,
        limit_set_by=actor[:150],
        limit_set_at=timezone.now(),
        limit_reclaim=reclaim,
        limit_force=force,
        limit_status=LimitStatus.PENDING,
        limit_message=message,
        **hand,
    )
    before = gib(row.limit_bytes) if row.limit_bytes else "none"
    transitions.note(
        row.pk,
        "limit",
        f"KV limit {gib(bound)} asked (was {before}). {capfirst(reason)}".strip(),
        actor=actor,
        facts={"wanted_bytes": wanted, "limit_bytes": bound, "force": force, "reclaim": reclaim},
    )
    if later is None and row.host is not None:
        dispatch.send_on_commit(dispatch.LIMIT, row.pk, queue=row.host.queue)
    return row.limit_revision + 1


def _wait(row: Instance, revision: int, wanted: int, wait_s: float) -> LimitAnswer:
    deadline = time.monotonic() + wait_s
    while True:
        row.refresh_from_db()
        if row.limit_acked_revision >= revision:
            break
        if row.limit_revision > revision:
            message = f"{row.limit_set_by} set another limit in the meantime; that one counts."
            return _answer(row, {"status": LimitStatus.CONFLICT, "message": message, "requested_bytes": wanted})
        if time.monotonic() >= deadline:
            message = "The engine has not answered yet; the limit is sent again until it does."
            if row.limit_status == LimitStatus.UNAVAILABLE:
                message = row.limit_message
            return _answer(row, {"status": row.limit_status, "message": message, "requested_bytes": wanted})
        time.sleep(_POLL_S)
    wire = row.limit_answer.get("limit", {})
    return _answer(row, wire | {"requested_bytes": wanted})


def _answer(row: Instance, wire: dict[str, Any]) -> LimitAnswer:
    """The row's columns, with the engine's own words over them."""
    clamped = bool(wire.get("clamped")) or wire.get("requested_bytes", 0) > (row.limit_bytes or 2**63)
    return LimitAnswer(
        instance_id=row.pk,
        status=str(wire.get("status") or row.limit_status),
        message=str(wire.get("message") or row.limit_message),
        revision=row.limit_revision,
        requested_bytes=wire.get("requested_bytes", row.limit_bytes),
        limit_bytes=row.limit_bytes,
        effective_limit_bytes=row.effective_limit_bytes,
        used_bytes=wire.get("used_bytes"),
        prealloc_bytes=wire.get("prealloc_bytes"),
        freed_bytes=wire.get("freed_bytes"),
        overage_bytes=wire.get("overage_bytes"),
        capacity_bytes=row.capacity_bytes,
        bundle_bytes=row.bundle_bytes,
        hard_minimum_bytes=row.hard_minimum_bytes,
        safety_floor_bytes=row.safety_floor_bytes,
        full_context_floor_bytes=row.full_context_floor_bytes,
        clamped=clamped,
        warnings=list(wire.get("warnings") or []),
        preempted=wire.get("preempted"),
        set_by=row.limit_set_by,
        set_at=row.limit_set_at,
        wire=wire,
    )
