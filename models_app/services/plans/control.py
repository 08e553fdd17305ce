"""On the control worker: hosts that fell silent, lost hints, wanted replicas, due restarts, folding and pruning.

Every two seconds. Each part costs a fixed number of queries when there is nothing to do.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta

from django.conf import settings
from django.db import DatabaseError, IntegrityError, transaction
from django.utils import timezone

from gpus_app import services as gpu_services
from gpus_app.models import Host
from models_app import broker, dispatch, selectors, transitions
from models_app.errors import BrokerAway, SardeenzError
from models_app.models import IdempotencyRecord, Instance, InstanceEvent, Model, Operation
from models_app.services import capture, keys, router_events, usage
from models_app.services.lifecycle import host_loss, idle
from models_app.services.lifecycle.launch import instance_place, replica_make
from models_app.services.lifecycle.requeue import place_again, requeue
from models_app.services.lifecycle.stop import instance_stop_begin
from models_app.services.locks import instance_locked
from models_app.services.plans import gpu_faults, rollout
from models_app.services.plans.operations import OPEN
from models_app.states import DesiredState, InstanceState

log = logging.getLogger(__name__)
S = InstanceState
ACTOR = "reconciler"

#: A hint on its way is given so long before it counts as lost.
_HINT_S = 4.0
_OPERATION_S = 10.0
_IDEMPOTENCY_KEEP = timedelta(days=1)
_PRUNE_EVERY_S = 3600.0
_PRUNE_BATCH = 5000


def reconcile_control() -> None:
    """One round; what fails is logged and does not keep the other parts from running."""
    for part in (
        hosts_check,
        gpu_faults.gpu_faults_check,
        restarts_due,
        replicas_check,
        rollout.successors_check,
        places_check,
        hints_repeat,
        idle.idle_check,
        usage.usage_fold,
        router_events.router_events_fold,
        keys.graces_end,
        capture.captures_end,
        prune,
    ):
        _run(part)


def _run(part: Callable[[], object]) -> None:
    try:
        part()
    except (BrokerAway, SardeenzError) as exc:
        log.warning("%s: %s", part.__name__, exc.message)
    except DatabaseError as exc:
        log.warning("%s: the database: %s", part.__name__, exc)


# --- hosts -----------------------------------------------------------------------------------------


def hosts_check() -> None:
    """Silent hosts' instances become unreachable, those of lost hosts start elsewhere; hosts that speak again look.

    While most hosts are silent at once nothing of that is done: see ``host_loss``.
    """
    hosts = list(Host.objects.all())
    if host_loss.freeze_check(hosts):
        return
    names = {host.pk: host.name for host in hosts if not host.reachable}
    serving = Instance.objects.filter(host__in=names, state__in=(S.READY, S.SLEEPING, S.DRAINING))
    for row in serving:
        transitions.move(
            row.pk,
            S.UNREACHABLE,
            expected=S(row.state),
            reason=f"Host {names[row.host_id or 0]} has not been heard of for {settings.HOST_HEARTBEAT_LIMIT_S:g} s.",
            actor=ACTOR,
        )
    _silent_workers()
    host_loss.lost_hosts_give_up(hosts)
    back = Instance.objects.filter(state=S.UNREACHABLE).exclude(host__in=names).values_list("host__name", flat=True)
    for name in set(back):
        if name and broker.once_in(f"look:{name}", _HINT_S):
            dispatch.send(dispatch.RECONCILE_HOST, name, queue=dispatch.host_queue(name), expires=_HINT_S)


def _silent_workers() -> None:
    """What waits for a silent worker: a scheduled instance is placed again, the others say what they wait for."""
    limit = timezone.now() - timedelta(seconds=settings.HOST_HEARTBEAT_LIMIT_S)
    waiting = Instance.objects.filter(
        state__in=(S.SCHEDULED, S.STARTING, S.DRAINING, S.STOPPING),
        host__worker_seen_at__lt=limit,
        state_since__lt=limit,
    ).select_related("host")
    for row in waiting:
        where = row.host.name if row.host else "?"
        if row.state == S.SCHEDULED:
            place_again(row, reason=f"The worker of {where} is silent: it is placed again.", actor=ACTOR)
            continue
        reason = f"Waits for the worker of host {where}, which is silent."
        if row.reason != reason:
            transitions.report(row.pk, expected=S(row.state), reason=reason)


# --- desired against recorded -------------------------------------------------------------------------


def restarts_due() -> None:
    """Failed instances whose back-off is over, and stopped ones that are wanted, become pending; not in a freeze.

    Sleepers too: they sleep again once they are up, so that a wake finds them.
    """
    if host_loss.is_frozen(Host.objects.all()):
        return
    now = timezone.now()
    wanted = Instance.objects.exclude(desired_state=DesiredState.STOPPED).select_related("model", "host")
    for row in wanted.filter(state=S.FAILED, next_restart_at__lte=now):
        count = row.restart_count + 1
        reason = "Restarted by its policy."
        requeue(row, reason=reason, actor=ACTOR, restart_count=count, desired_state=row.desired_state)
    for row in wanted.filter(state=S.STOPPED, model__deployed=True):
        requeue(row, reason="It is wanted: started again.", actor=ACTOR, desired_state=row.desired_state)


def replicas_check() -> None:
    """Deployed models have as many replicas as they want: missing ones are made, surplus ones drained."""
    for model in Model.objects.filter(deployed=True).select_related("host").prefetch_related("instances"):
        rows = selectors.newest_by_replica(model.instances.all())
        for index in range(model.replicas):
            if index not in rows:
                _make_missing(model, index)
        for index, row in rows.items():
            if index >= model.replicas and row.is_live and row.desired_state == DesiredState.RUNNING:
                _stop_surplus(row)


def _make_missing(model: Model, index: int) -> None:
    try:
        with transaction.atomic():
            locked = Model.objects.select_for_update().get(pk=model.pk)
            if locked.deployed and index < locked.replicas and index not in selectors.replicas_of(locked):
                replica_make(locked, index, actor=ACTOR)
    except IntegrityError:
        log.info("replica %s of %s was made by somebody else", index, model)


def _stop_surplus(row: Instance) -> None:
    with transaction.atomic():
        locked = instance_locked(row.pk)
        if locked.replica_index < locked.model.replicas or not locked.is_live:
            return  # scaled up again since we looked
        transitions.report(locked.pk, desired_state=DesiredState.STOPPED, next_restart_at=None)
        instance_stop_begin(locked, reason=f"Scaled down to {locked.model.replicas}.", actor=ACTOR)


def places_check() -> None:
    """Pending instances are placed, the most important model first; a lost or too early message costs two seconds."""
    rows = Instance.objects.filter(state=S.PENDING).select_related("model__memory_policy").order_by("pk")

    def importance(row: Instance) -> int:
        policy = getattr(row.model, "memory_policy", None)
        return -(policy.priority if policy else 50)

    for row in sorted(rows, key=importance):
        instance_place(row.pk)


def hints_repeat() -> None:
    """Messages that should have been worked off by now are sent again; the first step of each task is a claim."""
    before = timezone.now() - timedelta(seconds=_HINT_S)
    names = {S.SCHEDULED: dispatch.START, S.DRAINING: dispatch.STOP, S.STOPPING: dispatch.STOP}
    rows = Instance.objects.filter(state__in=names, state_since__lt=before).exclude(host=None).select_related("host")
    for row in rows:
        if row.host is not None and broker.once_in(f"hint:{row.state}:{row.pk}", _HINT_S):
            dispatch.send(names[S(row.state)], row.pk, queue=row.host.queue, expires=_HINT_S)
    stale = timezone.now() - timedelta(seconds=_OPERATION_S)
    for pk in Operation.objects.filter(state__in=OPEN, updated_at__lt=stale).values_list("pk", flat=True):
        dispatch.send(dispatch.OPERATION_STEP, pk, queue=dispatch.CONTROL_QUEUE, expires=_OPERATION_S)


# --- pruning ---------------------------------------------------------------------------------------


def prune() -> None:
    """Once an hour: remembered answers, old events and old readings go, in batches that hold no lock for long."""
    if not broker.once_in("prune", _PRUNE_EVERY_S):
        return
    now = timezone.now()
    IdempotencyRecord.objects.filter(at__lt=now - _IDEMPOTENCY_KEEP).delete()
    old = InstanceEvent.objects.filter(at__lt=now - timedelta(seconds=settings.EVENTS_KEEP_S)).order_by("pk")
    while ids := list(old.values_list("pk", flat=True)[:_PRUNE_BATCH]):
        InstanceEvent.objects.filter(pk__in=ids).delete()
    usage.senders_prune()
    gpu_services.samples_prune(now=now)
