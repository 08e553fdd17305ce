"""On a host worker: what its rows say against what its processes are. Observed state wins within one look.

At the worker's start, every few seconds and on hints. Each case leads to the step that would have been taken had no
message been lost and no process been killed; nothing here is done twice when it runs twice.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from gpus_app.models import Host
from models_app import broker, dispatch, transitions
from models_app.engines.process import Status
from models_app.errors import BrokerAway
from models_app.models import Instance, LaunchAttempt
from models_app.services.access import EngineSaidNo, client, share_log, status_of
from models_app.services.lifecycle import leftovers, sleep
from models_app.services.lifecycle.health import HUNG
from models_app.services.lifecycle.probe import end_found, instance_probe
from models_app.services.lifecycle.ready import asleep_record, footprint_record
from models_app.services.lifecycle.stop import instance_stop_begin
from models_app.services.memory.limit_foreign import FOREIGN
from models_app.states import HAS_PROCESS, DesiredState, InstanceState, LimitStatus

log = logging.getLogger(__name__)
S = InstanceState

#: Hints to oneself: the next look comes before they would be stale.
_EXPIRES_S = 10.0
_HEALTH_EVERY_S = 8.0
_PRUNE_EVERY_S = 3600.0
_UNSETTLED = frozenset({LimitStatus.PENDING, LimitStatus.DEFERRED, LimitStatus.STARVED, LimitStatus.UNAVAILABLE})


def reconcile_host(host_name: str) -> None:
    """Compare run directories (pid + start ticks) with rows; adopt, fail, end, or name orphans.

    Does nothing on another host than the one named: a message may have gone astray.
    """
    if host_name != settings.SARDEENZ_HOST_NAME:
        log.warning("asked to reconcile %s, but this is %s", host_name, settings.SARDEENZ_HOST_NAME)
        return
    host = Host.objects.filter(name=host_name).first()
    if host is None:
        return
    rows = (
        Instance.objects.filter(host=host, state__in=HAS_PROCESS | {S.SCHEDULED})
        .select_related("model__memory_policy", "host", "attempt__host")
        .order_by("state_since", "pk")
    )
    for row in rows:
        try:
            _reconcile(row)
        except BrokerAway as exc:
            log.warning("%s: %s", row, exc)
        except Exception:  # one strange instance must not keep the others from being looked at
            log.exception("%s could not be reconciled", row)
    leftovers.sweep(host_name)
    if broker.once_in(f"prune-runs:{host_name}", _PRUNE_EVERY_S):
        leftovers.run_dirs_prune()


def _reconcile(row: Instance) -> None:
    state = S(row.state)
    if row.desired_state == DesiredState.STOPPED and state in (S.STARTING, S.READY, S.SLEEPING, S.UNREACHABLE):
        with transaction.atomic():
            instance_stop_begin(row, reason="It is not wanted any more.", actor="reconciler")
        return
    if state is S.SCHEDULED:
        _hint(dispatch.START, row)
        return
    status = status_of(row)
    _adopt(row, status)
    if state in (S.DRAINING, S.STOPPING):
        _hint(dispatch.STOP, row)
        return
    if end_found(row, status):
        return
    if state is S.STARTING:
        instance_probe(row.pk)
        _hint(dispatch.PROBE, row)
    elif state is S.UNREACHABLE:
        _hint(dispatch.HEALTH, row) if row.health == HUNG else _back(row)
    elif state is S.SLEEPING:
        asleep_record(row)
        if row.desired_state == DesiredState.RUNNING:
            _hint(dispatch.WAKE, row)
    elif state is S.READY:
        _ready(row)
    if row.attempt is not None:
        share_log(row.attempt)


def _hint(name: str, row: Instance) -> None:
    dispatch.send(name, row.pk, queue=dispatch.host_queue(settings.SARDEENZ_HOST_NAME), expires=_EXPIRES_S)


def _adopt(row: Instance, status: Status | None) -> None:
    """A start whose worker died before it could write the pids down: its guardian's record has them."""
    attempt = row.attempt
    if attempt is None or status is None or attempt.guardian_pid == status.guardian_pid:
        return
    LaunchAttempt.objects.filter(pk=attempt.pk).update(
        guardian_pid=status.guardian_pid,
        guardian_start_ticks=status.guardian_start_ticks,
        engine_pid=status.engine_pid,
        engine_start_ticks=status.engine_start_ticks,
        exec_at=attempt.exec_at or timezone.now(),
    )
    transitions.note(row.pk, "adopt", f"Found running: engine pid {status.engine_pid}.", actor="reconciler")


def _back(row: Instance) -> None:
    """The host is heard of again: the instance is what its engine says that it is.

    Not at once after having been taken out: a host that comes and goes must not flap in the routes.
    """
    if timezone.now() - row.state_since < timedelta(seconds=settings.HOST_BACK_AFTER_S):
        return
    engine = client(row, limit_s=3.0)
    try:
        level = engine.metrics().sleep_level
    except EngineSaidNo:
        return
    transitions.move(
        row.pk,
        S.READY if level is None else S.SLEEPING,
        expected=S.UNREACHABLE,
        reason=f"Its host is back and its engine {'answers' if level is None else 'is asleep'}.",
        actor="reconciler",
        sleep_level=level,
    )


def _ready(row: Instance) -> None:
    if row.desired_state == DesiredState.SLEEPING:
        sleep.sleep_again(row.pk)
        return
    footprint_record(row)
    if broker.once_in(f"health:{row.pk}", _HEALTH_EVERY_S):
        _hint(dispatch.HEALTH, row)
    if row.model.kvcached and (row.limit_bytes is not None or row.provider in FOREIGN):
        unsettled = row.limit_acked_revision < row.limit_revision or row.limit_status in _UNSETTLED
        # Every ten seconds, settled or not: a foreign writer may have changed the segment without our knowing.
        if unsettled or row.provider != "none":
            _hint(dispatch.LIMIT, row)
    long_ready = row.ready_at is not None and timezone.now() - row.ready_at > timedelta(
        seconds=settings.RESTART_RESET_S
    )
    if row.restart_count and long_ready:
        transitions.report(row.pk, expected=S.READY, restart_count=0, first_cause="")
