"""Emptying a host: it is cordoned, then each instance moves elsewhere, one after the other and without downtime.

What fits nowhere else stays and the operation says so; or, when that was asked for, it is stopped and waits for a place
with its wish kept. The operation is read anew at each look, so a killed worker's successor goes on.
"""

from __future__ import annotations

from typing import Any

from django.db import transaction

from gpus_app.models import Host
from gpus_app.services import host_cordon
from models_app import broker, transitions
from models_app.errors import BrokerAway, Conflict, DoesNotFit
from models_app.models import Instance, Operation
from models_app.services.lifecycle.host_loss import require_thaw
from models_app.services.lifecycle.stop import instance_stop_begin
from models_app.services.locks import instance_locked
from models_app.services.plans.operations import OPEN, Progress, handles, operation_cancel, operation_create
from models_app.services.plans.rollout import REPLACE, REPLACEABLE, instance_leave
from models_app.states import DesiredState, InstanceState

S = InstanceState
DRAIN = "drain_host"
_OVER = frozenset({"done", "failed", "skipped"})


def host_drain(host: Host, *, actor: str, note: str = "", stop: bool = False) -> Operation:
    """Cordon the host and move everything away from it. ``stop``: what fits nowhere else is stopped, and waits.

    Raises Conflict (drained already, most hosts away) and BrokerAway before anything is written.
    """
    require_thaw()
    broker.require()
    with transaction.atomic():
        Host.objects.select_for_update().get(pk=host.pk)
        if Operation.objects.filter(kind=DRAIN, facts__host=host.name, state__in=OPEN).exists():
            raise Conflict(f"Host {host.name} is being drained already; wait for it, or cancel it.")
        host_cordon(host, actor=actor, note=note or host.note)
        rows = Instance.objects.live().filter(host=host).select_related("model").order_by("pk")
        steps = [
            {
                "kind": "leave",
                "instance_id": row.pk,
                "name": str(row),
                "state": "waiting",
                "reason": "Starts on another host beside the old one, which drains then.",
            }
            for row in rows
        ]
        return operation_create(
            DRAIN,
            title=f"Drain host {host.name}",
            actor=actor,
            steps=steps,
            facts={"host": host.name, "stop": stop},
        )


@handles(DRAIN)
def drain_step(operation: Operation) -> Progress:
    """One look at the instance whose turn it is."""
    steps: list[dict[str, Any]] = operation.steps
    if operation.cancel_requested:
        return _cancelled(operation, steps)
    step = next((one for one in steps if one["state"] not in _OVER), None)
    if step is not None:
        _advance(operation, step)
    left = [one for one in steps if one["state"] not in _OVER]
    share = 1 - len(left) / max(len(steps), 1)
    if left:
        message = f"{left[0]['name']}: {left[0].get('message', left[0]['reason'])}"
        return Progress(phase=left[0]["state"], message=message, progress=share, steps=steps)
    stayed = [f"{one['name']}: {one['message']}" for one in steps if one["state"] == "failed"]
    message = f"Not empty. {' '.join(stayed)}" if stayed else f"Host {operation.facts['host']} is empty and cordoned."
    return Progress(done=True, failed=bool(stayed), message=message, progress=1.0, steps=steps)


def _cancelled(operation: Operation, steps: list[dict[str, Any]]) -> Progress:
    for one in steps:
        move = Operation.objects.filter(pk=one.get("operation") or 0, state__in=OPEN).first()
        if one["state"] == "moving" and move is not None:
            operation_cancel(move, actor=operation.created_by)
        if one["state"] not in _OVER:
            one["state"] = "skipped"
    return Progress(done=True, cancelled=True, message="Cancelled; the host stays cordoned.", steps=steps)


def _advance(operation: Operation, step: dict[str, Any]) -> None:
    row = Instance.objects.select_related("model__host", "host").filter(pk=step["instance_id"]).first()
    if row is None or not row.is_live or row.host is None or row.host.name != operation.facts["host"]:
        step |= {"state": "done", "message": "It has left."}
    elif step["state"] == "moving":
        _look(operation, step, row)
    elif row.state == S.SCHEDULED:
        _unschedule(row, operation.created_by)
    elif step["state"] == "waiting" and row.state in REPLACEABLE and row.desired_state != DesiredState.STOPPED:
        _begin(operation, step, row)
    else:  # it comes up, or is on its way out: looked at again when it is settled
        step["message"] = row.reason


def _unschedule(row: Instance, actor: str) -> None:
    transitions.move(
        row.pk,
        S.PENDING,
        expected=S.SCHEDULED,
        reason="Its host is being drained: it is placed again.",
        actor=actor,
        host=None,
        gpu_uuids=[],
        reserved_bytes=0,
    )


def _begin(operation: Operation, step: dict[str, Any], row: Instance) -> None:
    if Operation.objects.filter(kind=REPLACE, model=row.model, state__in=OPEN).exists():
        step["message"] = "Its model is being moved or renewed: waiting for that."
        return
    try:
        move = instance_leave(row, actor=operation.created_by, why=f"host {operation.facts['host']} is being drained")
    except BrokerAway:
        return
    except (DoesNotFit, Conflict) as exc:
        _give_up(operation, step, row, exc.message)
        return
    step |= {"state": "moving", "operation": move.pk, "message": "Its successor starts elsewhere."}


def _look(operation: Operation, step: dict[str, Any], row: Instance) -> None:
    move = Operation.objects.filter(pk=step.get("operation") or 0).first()
    if move is not None and move.is_open:
        step["message"] = move.message
    elif row.desired_state != DesiredState.STOPPED:
        _give_up(operation, step, row, move.message if move else "Its move is gone.")


def _give_up(operation: Operation, step: dict[str, Any], row: Instance, why: str) -> None:
    """It stays, or is stopped while it is still wanted: after its end it waits for a place, and says for which."""
    if not operation.facts.get("stop"):
        step |= {"state": "failed", "message": why}
        return
    with transaction.atomic():
        locked = instance_locked(row.pk)
        instance_stop_begin(locked, reason="Its host is being drained.", actor=operation.created_by)
    step |= {"state": "stopping", "message": f"It is stopped and waits for a place. {why}"}
