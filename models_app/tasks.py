"""The consumer side of ``dispatch``: ids in, one service called. Short, bounded in time, safe to run twice."""

from __future__ import annotations

from collections.abc import Callable

from celery import shared_task
from django.conf import settings

from models_app import broker, dispatch, route_table, worker
from models_app.services import logs
from models_app.services.lifecycle import health, launch, reaping, sleep, stop, suspicion
from models_app.services.lifecycle.probe import PROBE_EVERY_S, instance_probe
from models_app.services.lifecycle.start import instance_start
from models_app.services.memory import leaks, limit_apply
from models_app.services.plans import (
    control,
    demand,
    host_drain,
    operations,
    presets,
    rebalancing,
    reconcile,
    rollout,
    room,
)

worker.connect()

#: Modules whose handlers the operations of this worker need: importing them registers these.
HANDLERS_FROM = (host_drain, presets, rollout, room)

#: Seconds. Far under the broker's visibility timeout (600 s), so that no task is delivered again while it runs.
QUICK = {"soft_time_limit": 25, "time_limit": 30}
#: A stop waits for processes in slices of a few seconds; a limit waits for the engine up to CONTROL_CALL_LIMIT_S.
SLOW = {"soft_time_limit": 55, "time_limit": 60}


def _look(
    name: str, look: Callable[[int], bool], row_id: int, chain: str, every_s: float, *, control: bool = False
) -> None:
    """Look once, and again later while the look says so; only the one chain that holds the lease goes on."""
    token = broker.chain_hold(name, row_id, chain)
    if chain and token is None:
        return
    again = look(row_id)
    if token and again:
        queue = dispatch.CONTROL_QUEUE if control else dispatch.host_queue(settings.SARDEENZ_HOST_NAME)
        dispatch.send(name, row_id, token, queue=queue, countdown=every_s)
    elif token:
        broker.chain_drop(name, row_id)


@shared_task(name=dispatch.PLACE, **QUICK)
def place(instance_id: int) -> None:
    launch.instance_place(instance_id)


@shared_task(name=dispatch.START, **QUICK)
def start(instance_id: int) -> None:
    instance_start(instance_id)


@shared_task(name=dispatch.PROBE, **QUICK)
def probe(instance_id: int, chain: str = "") -> None:
    _look(dispatch.PROBE, instance_probe, instance_id, chain, PROBE_EVERY_S)


@shared_task(name=dispatch.STOP, **SLOW)
def stop_step(instance_id: int, chain: str = "") -> None:
    _look(dispatch.STOP, stop.instance_stop_step, instance_id, chain, stop.STEP_EVERY_S)


@shared_task(name=dispatch.LIMIT, **SLOW)
def limit(instance_id: int, chain: str = "") -> None:
    _look(dispatch.LIMIT, limit_apply.limit_apply, instance_id, chain, limit_apply.CHECK_EVERY_S)


@shared_task(name=dispatch.TRIM, **SLOW)
def trim(instance_id: int, request_id: str = "", actor: str = "system") -> None:
    limit_apply.trim_apply(instance_id, request_id, actor)


@shared_task(name=dispatch.SLEEP, **SLOW)
def sleep_task(instance_id: int) -> None:
    sleep.sleep_apply(instance_id)


@shared_task(name=dispatch.WAKE, **SLOW)
def wake(instance_id: int) -> None:
    sleep.wake_apply(instance_id)


@shared_task(name=dispatch.RECONCILE_HOST, **SLOW)
def reconcile_host(host_name: str) -> None:
    reconcile.reconcile_host(host_name)


@shared_task(name=dispatch.HEALTH, **SLOW)
def health_check(instance_id: int) -> None:
    health.health_check(instance_id)


@shared_task(name=dispatch.LOG, **QUICK)
def leave_log(attempt_id: int) -> None:
    logs.attempt_log_leave(attempt_id)


@shared_task(name=dispatch.REAP, **QUICK)
def reap(attempt_id: int, actor: str = "system") -> None:
    reaping.orphan_reap_here(attempt_id, actor=actor)


@shared_task(name=dispatch.RECONCILE_CONTROL, **QUICK)
def reconcile_control() -> None:
    control.reconcile_control()


@shared_task(name=dispatch.REBALANCE, **QUICK)
def rebalance() -> None:
    rebalancing.rebalance_all()


@shared_task(name=dispatch.LEAKS, **QUICK)
def leaks_task() -> None:
    leaks.leaks_look()


@shared_task(name=dispatch.PUBLISH_ROUTES, **QUICK)
def publish_routes() -> None:
    route_table.publish()


@shared_task(name=dispatch.DEMAND, **QUICK)
def demand_task(served_model_name: str) -> None:
    demand.model_demand(served_model_name)


@shared_task(name=dispatch.SUSPECT, **QUICK)
def suspect(instance_id: int, kind: str) -> None:
    suspicion.instance_suspect(instance_id, kind=kind)


@shared_task(name=dispatch.OPERATION_STEP, **SLOW)
def operation_step(operation_id: int, chain: str = "") -> None:
    step = operations.operation_step
    _look(dispatch.OPERATION_STEP, step, operation_id, chain, operations.STEP_EVERY_S, control=True)
