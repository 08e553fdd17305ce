"""From *serving* to *gone*: the route leaves first, requests finish, the processes end, the memory is back."""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime

from django.conf import settings
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from gpus_app import selectors as gpu_readings
from gpus_app.policies.base import gib
from models_app import broker, dispatch, events, transitions
from models_app.engines import process
from models_app.engines.causes import Cause
from models_app.engines.process import Status, StopProgress
from models_app.models import Instance, Model
from models_app.services.access import EngineSaidNo, client, here, host_of, run_dir, start_waiting, status_of
from models_app.services.audit import audited
from models_app.services.lifecycle.ending import attempt_close, find_cause, instance_fail, leftovers_end
from models_app.services.lifecycle.requeue import requeue
from models_app.services.locks import instance_locked
from models_app.states import HAS_PROCESS, DesiredState, InstanceState, LimitStatus

log = logging.getLogger(__name__)
S = InstanceState

STEP_EVERY_S = 0.4
#: A reading older than this comes from no living sampler: nobody can say whether the memory is back.
_READING_LIMIT_S = 5.0


def instance_stop(instance: Instance, *, actor: str, force: bool = False) -> Instance:
    """Stop in any phase; repeating it is harmless. ``force`` cuts requests in flight and skips the drain.

    Raises BrokerAway before anything is written when the engine has to be told.
    """
    with audited(actor, "instance.stop", str(instance), "with force" if force else ""):
        if Instance.objects.filter(pk=instance.pk, state__in=HAS_PROCESS).exists():
            broker.require()
        with transaction.atomic():
            row = instance_locked(instance.pk)
            transitions.report(row.pk, desired_state=DesiredState.STOPPED, next_restart_at=None)
            _undeploy(row)
            instance_stop_begin(row, reason=f"Stopped by {actor}.", actor=actor, force=force)
        instance.refresh_from_db()
    return instance


def _undeploy(row: Instance) -> None:
    """The model is no longer wanted once nobody wants any replica of it.

    ``row`` as it was before: one that had to go already, because another takes over, has that one for its replica.
    """
    replicas = Q(replaces=None)
    if row.desired_state == DesiredState.STOPPED:
        replicas |= Q(replaces=row.pk)
    others = Instance.objects.filter(replicas, model_id=row.model_id).exclude(pk=row.pk)
    if not others.exclude(desired_state=DesiredState.STOPPED).exists():
        Model.objects.filter(pk=row.model_id, deployed=True).update(deployed=False)
        events.publish_models_on_commit()


def instance_stop_begin(row: Instance, *, reason: str, actor: str, force: bool = False) -> None:
    """The first step of every end, by the state; the caller holds the row and has written what is wanted instead."""
    state = S(row.state)
    if state is S.STOPPED:
        return
    target = {
        S.PENDING: S.STOPPED,
        S.SCHEDULED: S.STOPPED,
        S.FAILED: S.STOPPED,
        S.STARTING: S.STOPPING,
        S.SLEEPING: S.STOPPING,
        S.READY: S.STOPPING if force else S.DRAINING,
        S.UNREACHABLE: S.STOPPING if force or row.sleep_level else S.DRAINING,  # a sleeper has nothing in flight
        S.DRAINING: S.STOPPING if force else None,
        S.STOPPING: None,
    }[state]
    if force and not row.stop_force:
        transitions.report(row.pk, stop_force=True)
    if target is not None:
        transitions.move(row.pk, target, expected=state, reason=reason, actor=actor)
    if row.host is not None and state is not S.PENDING:
        dispatch.send_on_commit(dispatch.STOP, row.pk, queue=row.host.queue)
        start_waiting(row.host.name)


def stop_all(*, actor: str, force: bool = False) -> list[Instance]:
    """Stop every live instance; returns those that were asked to stop. Raises BrokerAway before anything is written."""
    broker.require()
    rows = Instance.objects.live().select_related("model", "host").exclude(desired_state=DesiredState.STOPPED)
    return [instance_stop(row, actor=actor, force=force) for row in rows]


# --- on the host worker ------------------------------------------------------------------------------


def instance_stop_step(instance_id: int) -> bool:
    """One look at a draining or stopping instance, or at what a failed one left. True: look again soon. Host worker."""
    row = here(instance_id)
    if row is None:
        return False
    if row.state == S.DRAINING:
        return _drain(row)
    if row.state == S.STOPPING:
        return _end(row)
    if row.state in (S.FAILED, S.STOPPED):
        return leftovers_end(row)
    return False


def _drain(row: Instance) -> bool:
    """Wait for the requests in flight, at most DRAIN_LIMIT_S; the route is gone already."""
    status = status_of(row)
    if status is not None and status.ended and row.desired_state != DesiredState.STOPPED:
        instance_fail(row, find_cause(run_dir(row.attempt), status), status=status)
        return False
    elapsed = (timezone.now() - row.state_since).total_seconds()
    if elapsed < settings.ROUTE_GRACE_S and not row.stop_force:
        return True
    in_flight = 0 if status is not None and status.ended else _in_flight(row)
    if in_flight != 0 and elapsed < settings.DRAIN_LIMIT_S and not row.stop_force:
        left = settings.DRAIN_LIMIT_S - elapsed
        what = "The engine does not answer" if in_flight is None else _requests(in_flight)
        transitions.report(row.pk, expected=S.DRAINING, reason=f"{what} in flight; ends in {left:.0f} s at the latest.")
        return True
    if row.desired_state == DesiredState.SLEEPING:
        return _drained_to_sleep(row, in_flight)
    reason = "No request in flight." if in_flight == 0 else f"Drain limit of {settings.DRAIN_LIMIT_S:g} s is over"
    if in_flight:
        reason += f": {_requests(in_flight)} cut."
    return transitions.move(row.pk, S.STOPPING, expected=S.DRAINING, reason=reason)


def _drained_to_sleep(row: Instance, in_flight: int | None) -> bool:
    """Sleep never cuts a request silently: what does not finish in time stays awake, unless it was forced."""
    if in_flight and not row.stop_force:
        transitions.move(
            row.pk,
            S.READY,
            expected=S.DRAINING,
            reason=f"Not put to sleep: {_requests(in_flight)} in flight after {settings.DRAIN_LIMIT_S:g} s.",
            desired_state=DesiredState.RUNNING,
            sleep_level=None,
        )
        return False
    dispatch.send(dispatch.SLEEP, row.pk, queue=host_of(row).queue)
    return False


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"


def _in_flight(row: Instance) -> int | None:
    """Requests that run or wait in the engine; None when it does not say."""
    try:
        figures = client(row, limit_s=2.0).metrics()
    except EngineSaidNo:
        return None
    return int(figures.running + figures.waiting)


def _end(row: Instance) -> bool:
    """End the processes; then wait until the memory is back."""
    attempt, folder = row.attempt, run_dir(row.attempt)
    if attempt is None or folder is None:
        return not _stopped(row, None, "It had not begun to start.")
    if attempt.ended_at is None:
        young = (timezone.now() - attempt.started_at).total_seconds() < settings.START_GRACE_S
        if young and process.read_status(folder) is None:
            return True  # claimed a moment ago: its guardian may be about to come up
        progress = process.stop_step(folder, limit_s=0.0 if row.stop_force else settings.STOP_LIMIT_S)
        if not progress.done:
            return _not_gone(row, progress)
        status = process.read_status(folder)
        if status is not None and not status.ended and status.guardian_alive:
            return True  # gone a moment ago: how it ended is being written down
        process.cleanup(folder)
        attempt_close(attempt, status)
        attempt.refresh_from_db()
    return _wait_for_memory(row, attempt.ended_at or timezone.now(), process.read_status(folder))


def _not_gone(row: Instance, progress: StopProgress) -> bool:
    """Say what is waited for; what outlives SIGKILL hangs in the driver: a visible failure, no waiting for ever."""
    if progress.asked_s > settings.STOP_LIMIT_S + settings.KILL_LIMIT_S:
        pids = ", ".join(map(str, progress.alive))
        stuck = Cause(
            code="stop_failed",
            sentence=f"Stop failed: process {pids} does not end, not even by SIGKILL.",
            advice="It hangs in the GPU's driver. Look at the host's kernel log; a reboot of the host ends it.",
            evidence_line="",
        )
        instance_fail(row, stuck, status=status_of(row))
        return False
    if progress.sent == "SIGKILL":
        transitions.report(row.pk, expected=S.STOPPING, reason="It did not end in time and is being killed.")
    return True


def _wait_for_memory(row: Instance, ended: datetime, status: Status | None) -> bool:
    waited = (timezone.now() - max(ended, row.state_since)).total_seconds()
    held = _held_bytes(row, ended)
    if held is None and waited < settings.MEMORY_BACK_LIMIT_S:
        return True
    if held and waited < settings.MEMORY_BACK_LIMIT_S:
        transitions.report(row.pk, expected=S.STOPPING, reason="Its processes are gone; waiting for the memory.")
        return True
    how = "killed" if status and status.signal == 9 else f"exit code {status.exit_code}" if status else "no record"
    note = f" {gib(held)} are still counted to it after {waited:.0f} s." if held else " Memory is back."
    return not _stopped(row, status, f"Stopped ({how}).{note}")


def _held_bytes(row: Instance, ended: datetime) -> int | None:
    """Bytes that the newest reading still counts to the instance; None: that reading is older than the end.

    0 when there is no living sampler: then nobody can tell, and nobody should wait.
    """
    record = gpu_readings.latest(host_of(row).name)
    if record is None or record.get("source") != "broker" or time.time() - record["t"] > _READING_LIMIT_S:
        return 0
    if datetime.fromtimestamp(record["t"], UTC) <= ended:
        return None
    return sum(
        one.get("resident") or 0 for gpu in record["gpus"] for one in gpu.get("instances", ()) if one["id"] == row.pk
    )


def _stopped(row: Instance, status: Status | None, reason: str) -> bool:
    """stopping → stopped, and at once pending again when that is what is wanted (restart). True: it is done."""
    with transaction.atomic():
        moved = transitions.move(
            row.pk,
            S.STOPPED,
            expected=S.STOPPING,
            reason=reason,
            event_facts={"exit_code": status.exit_code, "signal": status.signal} if status else {},
            port=None,
            reserved_bytes=0,
            stop_force=False,
            sleep_level=None,
            effective_limit_bytes=None,
            limit_status=LimitStatus.PENDING if row.limit_bytes else LimitStatus.NONE,
        )
        if moved:
            row.refresh_from_db()
            if row.host is not None:
                start_waiting(row.host.name)
            if row.desired_state != DesiredState.STOPPED:
                reason, wanted = "Restart: waits to be placed.", row.desired_state
                requeue(row, reason=reason, restart_count=row.restart_count, desired_state=wanted)
    return True
