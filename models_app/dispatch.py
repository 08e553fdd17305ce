"""Names of tasks and queues: the producer side. Imports no task, so services and tasks do not form a circle.

The broker is a hint, the database is the truth: every enqueue happens on commit, and a lost one is made good by the
reconcilers within seconds.
"""

from __future__ import annotations

from typing import Any

from celery import current_app
from django.db import transaction
from kombu.exceptions import OperationalError

from models_app import broker
from models_app.errors import BrokerAway

CONTROL_QUEUE = "control"

# control queue
PLACE = "models_app.place"
RECONCILE_CONTROL = "models_app.reconcile_control"
PUBLISH_ROUTES = "models_app.publish_routes"
DEMAND = "models_app.demand"
SUSPECT = "models_app.suspect"
OPERATION_STEP = "models_app.operation_step"
REBALANCE = "models_app.rebalance"
LEAKS = "models_app.leaks"
# queue of the instance's host
START = "models_app.start"
PROBE = "models_app.probe"
STOP = "models_app.stop"
LIMIT = "models_app.limit"
TRIM = "models_app.trim"
SLEEP = "models_app.sleep"
WAKE = "models_app.wake"
RECONCILE_HOST = "models_app.reconcile_host"
HEALTH = "models_app.health"
REAP = "models_app.reap"
LOG = "models_app.log"

TASK_NAMES = (
    PLACE,
    RECONCILE_CONTROL,
    PUBLISH_ROUTES,
    DEMAND,
    SUSPECT,
    OPERATION_STEP,
    REBALANCE,
    LEAKS,
    START,
    PROBE,
    STOP,
    LIMIT,
    TRIM,
    SLEEP,
    WAKE,
    RECONCILE_HOST,
    HEALTH,
    REAP,
    LOG,
)


def host_queue(host_name: str) -> str:
    return f"host.{host_name}"


def send(name: str, *args: Any, queue: str, countdown: float | None = None, expires: float | None = None) -> None:
    """Enqueue now. Raises BrokerAway with a sentence when Redis/Valkey does not take it."""
    try:
        current_app.send_task(name, args=args, queue=queue, countdown=countdown, expires=expires)
    except (OperationalError, OSError, TimeoutError) as exc:
        raise BrokerAway(broker.AWAY) from exc


def send_on_commit(name: str, *args: Any, queue: str, countdown: float | None = None) -> None:
    """Enqueue after the transaction. A broker that is away then is made good by the reconcilers."""

    def go() -> None:
        try:
            send(name, *args, queue=queue, countdown=countdown)
        except BrokerAway:
            return

    transaction.on_commit(go)
