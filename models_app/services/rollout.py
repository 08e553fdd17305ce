"""Move and edit without downtime: one mechanism for both.

For each instance a new one starts beside it, with all options of the model as saved now and, for a move, on other GPUs.
When the new one is ready the old one drains and stops. Where the new one fails, or the operator cancels, the old one
serves on: there is no phase in which both can be lost. A sleeper's successor is put to sleep before the old one ends.
Progress stands in the operation's steps, so a killed worker's successor goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from django.db import transaction

from models_app import broker, dispatch, events, transitions
from models_app.errors import Conflict, DoesNotFit, SardeenzError
from models_app.models import Instance, Model, Operation
from models_app.services import placement, specs
from models_app.services.launch import wish_elsewhere
from models_app.services.operations import OPEN, Progress, handles, operation_create
from models_app.services.placement import Wish
from models_app.services.sleep import instance_sleep
from models_app.services.stop import instance_stop, instance_stop_begin
from models_app.states import TERMINAL, DesiredState, InstanceState

S = InstanceState
REPLACE = "replace"
#: States in which an instance can be replaced: it serves, or could.
REPLACEABLE = frozenset({S.READY, S.SLEEPING, S.UNREACHABLE})
_SIDE_BY_SIDE = "Both do not fit side by side: stop it and start it there instead (it is away meanwhile)."


def instance_move(
    instance: Instance, *, actor: str, host: str | None = None, gpu_uuids: Sequence[str] | None = None
) -> Operation:
    """Move an instance to other GPUs or another host. Raises Conflict, InvalidInput, DoesNotFit (with the way out)."""
    if not host and not gpu_uuids:
        raise Conflict("Say where to: a host, or GPUs.")
    wish = wish_elsewhere(instance.model, host=host, gpu_uuids=gpu_uuids)
    if gpu_uuids and set(gpu_uuids) == set(instance.gpu_uuids):
        raise Conflict("It is on those GPUs already.")
    return _replace(instance.model, [instance], wish, title=f"Move {instance.model}", actor=actor)


def model_roll(model: Model, *, actor: str) -> Operation:
    """Bring every instance of the model to its saved options, one after another.

    Raises Conflict when all run them already.
    """
    rows = [
        row
        for row in model.instances.filter(replaces=None).order_by("replica_index")
        if row.state in REPLACEABLE and row.spec_revision != model.spec_revision
    ]
    if not rows:
        raise Conflict(f"Every running instance of {model} has its saved options.")
    return _replace(model, rows, None, title=f"Apply the options of {model}", actor=actor)


def _replace(model: Model, rows: Iterable[Instance], wish: Wish | None, *, title: str, actor: str) -> Operation:
    rows = list(rows)
    broker.require()
    for row in rows:
        if row.state not in REPLACEABLE:
            raise Conflict(f"{row} is {row.state}: only an instance that serves or sleeps can be moved or renewed.")
    with transaction.atomic():
        Model.objects.select_for_update().get(pk=model.pk)
        if Operation.objects.filter(kind=REPLACE, model=model, state__in=OPEN).exists():
            raise Conflict(f"An instance of {model} is being moved or renewed already; wait for it, or cancel it.")
        _check_fit(model, wish or Wish.of(model))
        asked = {} if wish is None else {"host": wish.host, "gpu_uuids": list(wish.gpu_uuids)}
        steps = [
            {
                "kind": REPLACE,
                "instance_id": row.pk,
                "name": str(row),
                "state": "waiting",
                "asleep": row.state == S.SLEEPING,
                "reason": "Starts beside the old one; that one drains when the new one is ready.",
            }
            for row in rows
        ]
        return operation_create(
            REPLACE, title=title, actor=actor, steps=steps, facts={"wish": asked}, model=model, deadline_s=7200.0
        )


def _check_fit(model: Model, wish: Wish) -> None:
    """With both copies in place, since both will be."""
    found = placement.place(model, wish, unusable=specs.unusable_hosts(model))
    if not found.decision.gpus:
        raise DoesNotFit(f"{placement.refusal(found)} {_SIDE_BY_SIDE}", **found.facts)


# --- one short look at a time -----------------------------------------------------------------------


@handles(REPLACE)
def replace_step(operation: Operation) -> Progress:
    """Start the next successor, or look at the one under way."""
    steps: list[dict[str, Any]] = operation.steps
    step = next((one for one in steps if one["state"] not in ("done", "failed", "undone")), None)
    if step is None:
        return Progress(done=True, message="Done.", progress=1.0, steps=steps)
    if operation.cancel_requested:
        return _cancel(operation, step)
    failed = _advance(operation, step)
    if failed:
        step |= {"state": "failed", "message": failed}
        return Progress(done=True, failed=True, message=failed, steps=steps)
    finished = sum(one["state"] == "done" for one in steps)
    return Progress(
        phase=step["state"],
        message=f"{step['name']}: {step.get('message', step['reason'])}",
        progress=finished / len(steps),
        steps=steps,
    )


def _advance(operation: Operation, step: dict[str, Any]) -> str:
    """One short act. Returns why it failed, or nothing."""
    old = Instance.objects.select_related("model", "host").filter(pk=step["instance_id"]).first()
    if step["state"] == "waiting":
        if old is None or old.state not in REPLACEABLE:
            return f"The old instance is {old.state if old else 'gone'}: nothing was started."
        return _begin(operation, step, old)
    new = Instance.objects.select_related("model", "host").filter(pk=step["new_id"]).first()
    if new is None:
        return "The successor is gone; the old one serves on."
    if step["state"] == "starting":
        return _starting(operation, step, old, new)
    if step["state"] == "falling asleep":
        return _falling_asleep(operation, step, old, new)
    return _draining(step, old, new)


def _begin(operation: Operation, step: dict[str, Any], old: Instance) -> str:
    """Make the successor. A look that was repeated after a crash finds the one that is there."""
    with transaction.atomic():
        new = Instance.objects.filter(replaces=old).exclude(state__in=TERMINAL).first()
        if new is None:
            new = Instance.objects.create(
                model=old.model,
                replica_index=old.replica_index,
                replaces=old,
                created_by=operation.created_by,
                placement_wish=operation.facts.get("wish") or {},
                limit_bytes=None if old.limit_automatic else old.limit_bytes,
                limit_automatic=old.limit_automatic,
                limit_revision=0 if old.limit_automatic else 1,
                limit_set_by="" if old.limit_automatic else old.limit_set_by,
                limit_reclaim=old.limit_reclaim,
                reason="Waits to be placed.",
            )
            transitions.note(new.pk, "move", f"Takes over from instance {old.pk}.", actor=operation.created_by)
            transitions.note(old.pk, "move", f"Instance {new.pk} takes over.", actor=operation.created_by)
            events.publish_instance_on_commit(new.pk, routes=True)
            dispatch.send_on_commit(dispatch.PLACE, new.pk, queue=dispatch.CONTROL_QUEUE)
    step |= {"state": "starting", "new_id": new.pk, "message": "The successor starts."}
    return ""


def _starting(operation: Operation, step: dict[str, Any], old: Instance | None, new: Instance) -> str:
    if new.state in TERMINAL:
        _discard(new, operation.created_by)
        return f"The successor did not come up, the old one serves on. {new.reason}"
    if new.state != S.READY:
        step["message"] = f"The successor: {new.stage if new.state == S.STARTING else new.state}."
        return ""
    if step["asleep"]:
        instance_sleep(new, actor=operation.created_by)
        step |= {"state": "falling asleep", "message": "The successor is ready and goes to sleep as the old one was."}
        return ""
    return _end_old(operation, step, old, new)


def _falling_asleep(operation: Operation, step: dict[str, Any], old: Instance | None, new: Instance) -> str:
    if new.state == S.SLEEPING:
        return _end_old(operation, step, old, new)
    if new.state in TERMINAL:
        _discard(new, operation.created_by)
        return f"The successor ended while it was put to sleep; the old one stays. {new.reason}"
    if new.state == S.READY and new.desired_state == DesiredState.RUNNING:
        return _end_old(operation, step, old, new)  # it would not sleep: better awake than not there
    return ""


def _end_old(operation: Operation, step: dict[str, Any], old: Instance | None, new: Instance) -> str:
    if old is not None and old.is_live:
        with transaction.atomic():
            transitions.report(old.pk, desired_state=DesiredState.STOPPED, next_restart_at=None)
            instance_stop_begin(old, reason=f"Instance {new.pk} has taken over.", actor=operation.created_by)
    step |= {"state": "draining", "message": "The successor serves; the old one finishes its requests."}
    return ""


def _draining(step: dict[str, Any], old: Instance | None, new: Instance) -> str:
    if old is not None and old.is_live:
        step["message"] = f"The old one: {old.reason}"
        return ""
    with transaction.atomic():
        Instance.objects.filter(pk=new.pk).update(replaces=None)
        transitions.note(new.pk, "move", f"Has taken over from instance {step['instance_id']}.")
        events.publish_instance_on_commit(new.pk, routes=True)
    step |= {"state": "done", "message": "The successor serves alone."}
    return ""


def _discard(new: Instance, actor: str) -> None:
    """A successor that came to nothing is not wanted again."""
    try:
        with transaction.atomic():
            transitions.report(new.pk, desired_state=DesiredState.STOPPED, next_restart_at=None)
            if new.is_live or new.state == S.FAILED:
                instance_stop_begin(new, reason="The take-over was given up.", actor=actor)
    except SardeenzError:
        return


def _cancel(operation: Operation, step: dict[str, Any]) -> Progress:
    """Before the old one is stopping, it serves on and the successor goes; after that, the change is finished."""
    old = Instance.objects.select_related("model", "host").filter(pk=step["instance_id"]).first()
    new = Instance.objects.select_related("model", "host").filter(pk=step.get("new_id") or 0).first()
    if step["state"] == "draining" and (old is None or old.state not in (S.READY, S.DRAINING, S.SLEEPING)):
        failed = _draining(step, old, new) if new is not None else "The successor is gone."
        done = step["state"] == "done"
        message = "Too late to cancel: the old one is stopping, the successor serves."
        return Progress(
            done=done or bool(failed), failed=bool(failed), message=failed or message, steps=operation.steps
        )
    if old is not None and old.state == S.DRAINING:
        transitions.report(old.pk, desired_state=DesiredState.RUNNING)
        transitions.move(
            old.pk, S.READY, expected=S.DRAINING, reason="The take-over was cancelled.", actor=operation.created_by
        )
    if new is not None:
        instance_stop(new, actor=operation.created_by) if new.is_live else _discard(new, operation.created_by)
    step["state"] = "undone"
    return Progress(done=True, cancelled=True, message="Cancelled: the old one serves on.", steps=operation.steps)
