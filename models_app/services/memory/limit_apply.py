"""KV limits, the engine's side: tell what is wanted, store what it said, look again while it shrinks. Host worker."""

from __future__ import annotations

import logging
import threading
from datetime import UTC, datetime
from typing import Any

from django.db import transaction
from django.utils import timezone

from gpus_app.policies.base import gib
from models_app import events, transitions
from models_app.engines.client import EngineRefused
from models_app.errors import EngineUnavailable
from models_app.models import Instance
from models_app.services.access import client, here
from models_app.services.memory.kv_status import kv_fields
from models_app.services.memory.limit_foreign import FOREIGN, foreign_drift, foreign_limit, foreign_trim
from models_app.states import LIMIT_NOW, InstanceState, LimitStatus

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
#: One change at a time where the segment alone tells: what one thread writes, another would take for a stranger's.
_FOREIGN = threading.Lock()
#: Answers after which there is more to see.
_UNSETTLED = frozenset({LimitStatus.PENDING, LimitStatus.DEFERRED, LimitStatus.STARVED, LimitStatus.UNAVAILABLE})
#: What an engine's refusal is called in our rows.
_REFUSALS = {"stale": LimitStatus.STALE, "conflict": LimitStatus.CONFLICT}


def limit_apply(instance_id: int) -> bool:
    """Tell the engine the wanted limit and store its answer. True: not settled yet, look again. Host worker.

    A limit that was told already is only compared with what is in force: a foreign writer's change (``kvctl``) is put
    back, and on record as drift.
    """
    row = here(instance_id)
    if row is None or InstanceState(row.state) not in LIMIT_NOW or not row.model.kvcached or row.provider == "none":
        return False
    if row.provider in FOREIGN:
        with _FOREIGN:
            return _foreign(row)
    if row.limit_bytes is not None and row.limit_acked_revision < row.limit_revision:
        return _send(row)
    return _look(row)


def _foreign(row: Instance) -> bool:
    """An engine that keeps no watch itself: what stands in its segment is compared here, and put right."""
    try:
        found = foreign_drift(row)
    except EngineUnavailable as exc:
        log.info("%s: %s", row, exc.message)
        found = None
    if found is not None:
        _drift_note(row, found)
    if row.limit_bytes is not None:
        return _send(row, noted=row.limit_acked_revision >= row.limit_revision)
    if found is not None:
        try:
            answer = foreign_limit(row, client(row))
        except (EngineUnavailable, EngineRefused) as exc:
            log.warning("%s: its limit above capacity cannot be put back: %s", row, exc.message)
            return True
        transitions.report(row.pk, effective_limit_bytes=answer["effective_limit_bytes"])
    return False


def limit_tell(row: Instance) -> None:
    """Tell the engine the wanted limit whatever the instance's state, in answer to a wish that it has not heard.

    For a sleeper that is about to wake: its pool takes a limit asleep, so that it never serves under the earlier one.
    What the engine refuses or does not hear is told again when it is ready. Host worker.
    """
    if row.limit_bytes is not None and row.model.kvcached and row.provider != "none":
        _send(row)


def _tell(row: Instance) -> dict[str, Any]:
    if row.provider in FOREIGN:
        return foreign_limit(row, client(row))
    return client(row).kvcache_limit(
        row.limit_bytes or 0,
        revision=row.limit_revision,
        force=row.limit_force,
        reclaim=row.limit_reclaim or None,
        by=row.limit_set_by,
    )


def _send(row: Instance, *, noted: bool = False) -> bool:
    """Tell it, and store the answer. ``noted``: it was told before, the event log has it."""
    revision, wanted = row.limit_revision, row.limit_bytes or 0
    try:
        answer = _tell(row)
    except EngineUnavailable as exc:
        _store(row, revision, {}, LimitStatus.UNAVAILABLE, f"{exc.message} It is told again.", acked=False)
        return True
    except EngineRefused as exc:
        status = _REFUSALS.get(exc.code, LimitStatus.REJECTED)
        _store(row, revision, dict(exc.facts), status, exc.message)
        transitions.note(row.pk, "limit", f"The engine refused {gib(wanted)}: {exc.message}", actor=row.limit_set_by)
        return False
    status = LimitStatus(answer.get("status") or LimitStatus.PENDING)
    _store(row, revision, answer, status, str(answer.get("message") or ""), acked=status is not LimitStatus.PENDING)
    if status is not LimitStatus.PENDING and not noted:
        freed = answer.get("freed_bytes") or 0
        text = f"KV limit {gib(answer.get('limit_bytes') or wanted)} {status}; {gib(freed)} freed."
        transitions.note(row.pk, "limit", text, actor=row.limit_set_by, facts=_event_facts(answer))
    return status in _UNSETTLED


def _event_facts(answer: dict[str, Any]) -> dict[str, Any]:
    names = ("status", "requested_bytes", "limit_bytes", "used_bytes", "freed_bytes", "overage_bytes", "preempted")
    return {name: answer[name] for name in names if answer.get(name) is not None}


def _look(row: Instance) -> bool:
    """Compare what is in force with what is wanted; nothing is sent when they agree."""
    try:
        status = client(row).kvcache_status()
    except (EngineUnavailable, EngineRefused):
        return LimitStatus(row.limit_status) in _UNSETTLED
    fields = kv_fields(status)
    if not fields:
        return False
    own = status["segments"][0]
    if row.limit_bytes is None:
        _put_back(row, status)
        if row.effective_limit_bytes != fields["effective_limit_bytes"]:
            transitions.report(row.pk, **fields)
        return False
    put_back = _put_back(row, status)
    if not put_back and _drifted(row, status, own):
        _drift_note(row, int(own.get("limit_bytes") or 0))
        return _send(row)
    state = LimitStatus(own["state"]) if own.get("state") in LimitStatus.__members__.values() else None
    if state and (state != row.limit_status or row.effective_limit_bytes != fields["effective_limit_bytes"]):
        transitions.report(
            row.pk,
            matching={"limit_revision": row.limit_revision},
            limit_status=state,
            limit_message=_progress_message(state, own),
            **fields,
        )
        if state is LimitStatus.APPLIED and row.limit_status != LimitStatus.APPLIED:
            waited = (timezone.now() - row.limit_set_at).total_seconds() if row.limit_set_at else 0
            transitions.note(row.pk, "limit", f"KV limit in force after {waited:.0f} s.", actor=row.limit_set_by)
    return (state or LimitStatus(row.limit_status)) in _UNSETTLED


def _put_back(row: Instance, status: dict[str, Any]) -> bool:
    """Whether the engine has put a stranger's limit back since it was last on record; then it is now.

    Whoever asks first has the engine see and put it back: when that was the sampler, nothing else tells any more.
    """
    drift = status.get("last_drift") or {}
    if not drift.get("at"):
        return False
    since = datetime.fromtimestamp(float(drift["at"]), UTC)
    if row.events.filter(kind="drift", at__gte=since).exists():
        return False
    _drift_note(row, int(drift.get("found_bytes") or 0))
    return True


def _drift_note(row: Instance, found_bytes: int) -> None:
    wanted = row.limit_bytes or row.capacity_bytes or 0
    act = f"set the limit to {gib(found_bytes)}" if found_bytes else "deleted its KV segment, or set its limit to 0"
    transitions.note(
        row.pk,
        "drift",
        f"Somebody else {act}; {gib(wanted)} is put back.",
        facts={"found_bytes": found_bytes, "wanted_bytes": wanted},
    )


def _progress_message(state: LimitStatus, own: dict[str, Any]) -> str:
    if state is LimitStatus.APPLIED:
        return f"In force: {gib(own.get('limit_bytes') or 0)}."
    if state is LimitStatus.STARVED:
        return "A waiting request needs more than the limit: raise it, or end the request."
    return f"Shrinking: {gib(own.get('overage_bytes') or 0)} over the limit come back as requests end."


def _drifted(row: Instance, status: dict[str, Any], own: dict[str, Any]) -> bool:
    """Whether the segment holds another limit than the one that was told last, by more than rounding to a bundle."""
    if own.get("drift_bytes"):
        return True
    told = status.get("limit_revision")
    if told is not None and told < row.limit_acked_revision:
        return True
    bundle = own.get("bundle_bytes") or 0
    in_force, wanted = own.get("limit_bytes") or 0, min(row.limit_bytes or 0, row.capacity_bytes or 2**63)
    return bool(in_force and not wanted - bundle < in_force <= wanted) and row.limit_status == LimitStatus.APPLIED


def _store(
    row: Instance, revision: int, wire: dict[str, Any], status: LimitStatus, message: str, *, acked: bool = True
) -> None:
    """Write the answer, unless a newer wish stands there by now."""
    fields: dict[str, Any] = {"limit_status": status, "limit_message": message[:1000]}
    if acked:
        fields["limit_acked_revision"] = revision
    for name in ("capacity_bytes", "bundle_bytes", "hard_minimum_bytes", "safety_floor_bytes"):
        if wire.get(name) is not None:
            fields[name] = wire[name]
    effective = wire.get("effective_limit_bytes") or wire.get("limit_bytes")
    if acked and effective is not None and status not in (LimitStatus.REJECTED, LimitStatus.STALE):
        fields["effective_limit_bytes"] = effective
    if wire.get("full_context_floor_bytes") is not None:
        fields["full_context_floor_bytes"] = wire["full_context_floor_bytes"]
    answer_keep(row.pk, "limit", wire | {"revision": revision})
    transitions.report(row.pk, matching={"limit_revision": revision}, **fields)
    if acked:
        events.publish_instance_on_commit(row.pk, routes=True)


def answer_keep(instance_id: int, kind: str, wire: dict[str, Any]) -> None:
    """Keep the engine's words beside those of the other kind (limit, trim), so that whoever waits finds its own."""
    with transaction.atomic():
        held = Instance.objects.select_for_update().values_list("limit_answer", flat=True).get(pk=instance_id)
        transitions.report(instance_id, limit_answer={**held, kind: wire})


def trim_apply(instance_id: int, request_id: str = "", actor: str = "system") -> None:
    """Have the engine trim and store its answer under ``request_id``. Host worker.

    Whoever waits is always answered: an instance that left its state meanwhile is answered with that.
    """
    row = here(instance_id)
    if row is None:
        return
    if InstanceState(row.state) not in LIMIT_NOW:
        message = f"It is {row.state} by now: there is no running engine that could be asked to trim."
        answer_keep(row.pk, "trim", {"status": LimitStatus.UNAVAILABLE, "message": message, "request_id": request_id})
        return
    try:
        if row.provider in FOREIGN:
            with _FOREIGN:
                answer = foreign_trim(row, client(row))
                if answer.get("effective_limit_bytes"):
                    transitions.report(row.pk, effective_limit_bytes=answer["effective_limit_bytes"])
        else:
            answer = client(row).kvcache_trim()
    except EngineUnavailable as exc:
        answer = {"status": LimitStatus.UNAVAILABLE, "message": exc.message}
    except EngineRefused as exc:
        answer = {"status": LimitStatus.REJECTED, "message": exc.message}
    answer_keep(row.pk, "trim", answer | {"request_id": request_id})
    freed = answer.get("freed_bytes")
    text = f"Trimmed: {gib(freed)} freed." if freed is not None else f"Not trimmed: {answer.get('message', '')}"
    transitions.note(row.pk, "trim", text, actor=actor, facts={"freed_bytes": freed})
