"""What follows when an engine serves: its KV figures, its place in the routes, its measured footprint, its limit."""

from __future__ import annotations

import logging
import time
from typing import Any

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from gpus_app import selectors as gpu_readings
from gpus_app.errors import ProbeError
from gpus_app.models import Gpu
from gpus_app.policies.base import gib
from gpus_app.probes.segments import read_segment
from models_app import dispatch, transitions
from models_app.engines.client import EngineClient, EngineRefused
from models_app.engines.memory_log import read_memory
from models_app.engines.progress import head
from models_app.errors import EngineUnavailable
from models_app.models import Instance, LaunchAttempt, MemoryProfile
from models_app.services.access import host_of, run_dir, start_waiting
from models_app.services.audit import audit
from models_app.services.memory import placement
from models_app.services.memory.kv_status import kv_fields
from models_app.services.memory.limit_foreign import NEXT_ALLOCATION, SEGMENT
from models_app.states import InstanceState, LimitStatus, Stage

log = logging.getLogger(__name__)
S = InstanceState

_READING_LIMIT_S = 5.0


def kv_answer(row: Instance, engine: EngineClient) -> dict[str, Any] | None:
    """The columns that tell of its KV memory, once a limit is in force; None: not yet.

    An engine that was to be elastic and is not (kvcached did not take hold) is ready all the same, with its memory
    shown as fixed and a warning: to take it down would help nobody.
    """
    if not row.model.kvcached:
        return {"provider": "none", "health_reason": ""}
    try:
        status = engine.kvcache_status()
    except EngineUnavailable:
        return None  # the add-on's other half is not up yet, or the engine is busy: it is asked again
    except EngineRefused as exc:
        return _by_segment(row) if exc.status == 404 else None
    if not status.get("kvcached_active", True):
        reason = "kvcached is not active in this engine: its KV memory is a fixed reservation, no limit can be set."
        return {"provider": "none", "health_reason": reason}
    fields = kv_fields(status)
    return {**fields, "health_reason": ""} if fields.get("effective_limit_bytes") else None


def _by_segment(row: Instance) -> dict[str, Any] | None:
    """An engine without /kvcache: its segment can be read, and limited at its next allocation."""
    try:
        segment = read_segment(row.ipc_name)
    except ProbeError:
        return None
    if not segment.valid:
        return None
    return {
        "provider": SEGMENT,
        "capacity_bytes": segment.limit_bytes,
        "effective_limit_bytes": segment.limit_bytes,
        "health_reason": f"It has no /kvcache endpoints. {NEXT_ALLOCATION}",
    }


def instance_ready(row: Instance, answer: dict[str, Any], *, waking: bool) -> bool:
    """starting → ready, with all that is known now; the next start on its GPUs may begin. False: someone was first."""
    taken_s = _taken_s(row, waking)
    with transaction.atomic():
        moved = transitions.move(
            row.pk,
            S.READY,
            expected=S.STARTING,
            reason=f"{'Awake' if waking else 'Ready'} after {taken_s:.0f} s.",
            event_facts={"seconds": round(taken_s, 1), "provider": answer.get("provider", "")},
            stage=Stage.READY,
            stage_progress=None,
            sleep_level=None,
            health="ok",
            last_progress_at=timezone.now(),
            **answer,
        )
        if not moved:
            return False
        if not waking and row.attempt is not None:
            _attempt_ready(row, row.attempt)
            audit(row.created_by, "instance.start", str(row), "ok", f"Ready after {taken_s:.0f} s.")
        start_waiting(host_of(row).name)
        if row.limit_bytes is not None and answer.get("provider") != "none":
            transitions.report(row.pk, limit_status=LimitStatus.PENDING)
            dispatch.send_on_commit(dispatch.LIMIT, row.pk, queue=host_of(row).queue)
    return True


def _taken_s(row: Instance, waking: bool) -> float:
    begun = row.state_since
    if not waking and row.attempt is not None:
        begun = row.attempt.exec_at or row.attempt.started_at
    return (timezone.now() - begun).total_seconds()


def _attempt_ready(row: Instance, attempt: LaunchAttempt) -> None:
    folder = run_dir(attempt)
    memory = dict(attempt.memory)
    if folder is not None:
        memory |= read_memory(head(folder)).to_json()
    LaunchAttempt.objects.filter(pk=attempt.pk).update(ready_at=timezone.now(), memory=memory)


def footprint_record(row: Instance) -> bool:
    """Write down what a ready instance really takes, from the newest reading; called until it is known.

    The highest baseline of all runs is kept: an estimate that is too low lets the next start die for lack of memory.
    """
    attempt = row.attempt
    if attempt is None or attempt.memory.get("baseline_bytes") is not None or row.state != S.READY:
        return False
    baseline = _baseline(row)
    if baseline is None:
        return False
    LaunchAttempt.objects.filter(pk=attempt.pk).update(memory={**attempt.memory, "baseline_bytes": baseline})
    policy = getattr(row.model, "memory_policy", None)
    owed = max(row.safety_floor_bytes or 0, policy.guarantee_bytes if policy else 0)
    transitions.report(row.pk, expected=S.READY, reserved_bytes=baseline + owed)
    gpu = Gpu.objects.filter(uuid__in=row.gpu_uuids).first()
    if gpu is not None:
        _profile(row, attempt, gpu.name, baseline)
    log.info("%s takes %s per GPU beside its KV cache", row, gib(baseline))
    return True


def awake_record(row: Instance) -> None:
    """Write down what it holds on each GPU before it falls asleep: what the sleep frees is measured against that."""
    held = [one.get("resident") or 0 for one in _seen(row)]
    if held and row.attempt is not None:
        row.attempt.memory = {**row.attempt.memory, "awake_bytes": max(held)}
        LaunchAttempt.objects.filter(pk=row.attempt.pk).update(memory=row.attempt.memory)


def asleep_record(row: Instance) -> None:
    """Write down what a sleeper really still holds on each GPU: what waking needs is the rest."""
    attempt = row.attempt
    if attempt is None or row.state != S.SLEEPING:
        return
    held = [one.get("resident") or 0 for one in _seen(row, since=row.state_since.timestamp())]
    if held and attempt.memory.get("asleep_bytes") != max(held):
        LaunchAttempt.objects.filter(pk=attempt.pk).update(memory={**attempt.memory, "asleep_bytes": max(held)})


def _baseline(row: Instance) -> int | None:
    """Resident minus KV footprint, on the GPU where it is most; None while no fresh reading shows the instance."""
    return max((one["baseline"] for one in _seen(row) if one.get("baseline")), default=None)


def _seen(row: Instance, since: float = 0.0) -> list[dict[str, Any]]:
    """What the newest reading says of the instance, once for each GPU; empty when that reading is old."""
    record = gpu_readings.latest(host_of(row).name)
    if record is None or record.get("source") != "broker" or record["t"] <= since:
        return []
    if time.time() - record["t"] > _READING_LIMIT_S:
        return []
    return [one for gpu in record["gpus"] for one in gpu.get("instances", ()) if one["id"] == row.pk]


def _profile(row: Instance, attempt: LaunchAttempt, gpu_name: str, baseline: int) -> None:
    begun = attempt.exec_at or attempt.started_at
    load_s = (row.ready_at - begun).total_seconds() if row.ready_at else None
    with transaction.atomic():
        profile, created = MemoryProfile.objects.select_for_update().get_or_create(
            key=placement.profile_key(row.model, gpu_name),
            defaults={
                "model": row.model.model,
                "gpu_name": gpu_name,
                "options": placement.profile_options(row.model),
                "baseline_bytes": baseline,
            },
        )
        MemoryProfile.objects.filter(pk=profile.pk).update(
            baseline_bytes=max(baseline, profile.baseline_bytes),
            weights_bytes=attempt.memory.get("weights_bytes"),
            bundle_bytes=row.bundle_bytes,
            safety_floor_bytes=row.safety_floor_bytes,
            load_s=load_s,
            runs=1 if created else F("runs") + 1,
            updated_at=timezone.now(),
        )
