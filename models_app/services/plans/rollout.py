"""Move and edit without downtime: one mechanism for both.

For each instance a new one starts beside it, with all options of the model as saved now and, for a move, on other GPUs.
When the new one is ready the old one drains and stops. Where the new one fails, or the operator cancels, the old one
serves on: there is no phase in which both can be lost. A sleeper's successor is put to sleep before the old one ends.
Progress stands in the operation's steps, so a killed worker's successor goes on from there: each look is written as if
it were the second one, and that the old one is to end is on record (*taking over*) before it is told to.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from django.db import transaction

from models_app import broker, dispatch, events, transitions
from models_app.errors import BrokerAway, Conflict, DoesNotFit, SardeenzError
from models_app.models import Instance, Model, Operation
from models_app.services import specs
from models_app.services.lifecycle.host_loss import require_thaw
from models_app.services.lifecycle.launch import wish_elsewhere
from models_app.services.lifecycle.sleep import instance_sleep
from models_app.services.lifecycle.stop import instance_stop_begin
from models_app.services.memory import placement
from models_app.services.memory.placement import Wish
from models_app.services.plans.operations import OPEN, Progress, handles, operation_create
from models_app.states import TERMINAL, DesiredState, InstanceState

log = logging.getLogger(__name__)
S = InstanceState
REPLACE = "replace"
#: States in which an instance can be replaced: it serves, or could.
REPLACEABLE = frozenset({S.READY, S.SLEEPING, S.UNREACHABLE})
_SIDE_BY_SIDE = "Both do not fit side by side: stop it and start it there instead (“stop first”; it is away meanwhile)."


def instance_move(
    instance: Instance, *, actor: str, host: str | None = None, gpu_uuids: Sequence[str] | None = None
) -> Operation:
    """Move an instance to other GPUs or another host. Raises Conflict, InvalidInput, DoesNotFit (with the way out)."""
    if not host and not gpu_uuids:
        raise Conflict("Say where to: a host, or GPUs.")
    wish = wish_elsewhere(instance.model, host=host, gpu_uuids=gpu_uuids)
    if gpu_uuids and set(gpu_uuids) == set(instance.gpu_uuids):
        raise Conflict("It is on those GPUs already.")
    if not gpu_uuids and instance.host is not None and instance.host.name == wish.host:
        raise Conflict(f"It is on host {wish.host} already: say which of its GPUs.")
    return _replace(instance.model, [instance], wish, title=f"Move {instance.model}", actor=actor)


def instance_leave(instance: Instance, *, actor: str, why: str) -> Operation:
    """Move an instance away from where nothing may be placed any more; where to, the placer says.

    What was bound to a host or to GPUs by hand stays bound. Raises Conflict, DoesNotFit, BrokerAway.
    """
    return _replace(instance.model, [instance], None, title=f"Move {instance.model} away: {why}", actor=actor)


def model_roll(model: Model, *, actor: str, awake: bool = False) -> Operation:
    """Bring every instance of the model to its saved options, one after another. ``awake``: sleepers wake with that.

    Raises Conflict when all run them already.
    """
    rows = [
        row
        for row in model.instances.filter(replaces=None).order_by("replica_index")
        if row.state in REPLACEABLE and row.spec_revision != model.spec_revision
    ]
    if not rows:
        raise Conflict(f"Every running instance of {model} has its saved options.")
    return _replace(model, rows, None, title=f"Apply the options of {model}", actor=actor, awake=awake)


def _replace(
    model: Model, rows: Iterable[Instance], wish: Wish | None, *, title: str, actor: str, awake: bool = False
) -> Operation:
    rows = list(rows)
    require_thaw()
    broker.require()
    for row in rows:
        if row.state not in REPLACEABLE:
            raise Conflict(f"{row} is {row.state}: only an instance that serves or sleeps can be moved or renewed.")
    with transaction.atomic():
        Model.objects.select_for_update().get(pk=model.pk)
        if Operation.objects.filter(kind=REPLACE, model=model, state__in=OPEN).exists():
            raise Conflict(f"An instance of {model} is being moved or renewed already; wait for it, or cancel it.")
        _check_fit(model, wish or Wish.of(model, _kept_wish(rows[0], model)))
        asked = None if wish is None else {"host": wish.host, "gpu_uuids": list(wish.gpu_uuids), "elsewhere": True}
        steps = [
            {
                "kind": REPLACE,
                "instance_id": row.pk,
                "name": str(row),
                "state": "waiting",
                "asleep": not awake and row.desired_state == DesiredState.SLEEPING,
                "awake": awake,
                "reason": "Starts beside the old one; that one drains when the new one is ready.",
            }
            for row in rows
        ]
        return operation_create(REPLACE, title=title, actor=actor, steps=steps, facts={"wish": asked}, model=model)


def _kept_wish(row: Instance, model: Model) -> dict[str, Any]:
    """Where the launch wanted it, as long as the model's saved options still go there."""
    wish = dict(row.placement_wish)
    if len(wish.get("gpu_uuids") or ()) != model.tensor_parallel_size:
        wish.pop("gpu_uuids", None)
    return wish


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
    old = _instance(step["instance_id"])
    if step["state"] == "waiting":
        if old is None or old.state not in REPLACEABLE:
            return f"The old instance is {old.state if old else 'gone'}: nothing was started."
        return _begin(operation, step, old)
    new = _instance(step["new_id"])
    if new is None:
        return "The successor is gone; the old one serves on."
    if step["state"] in ("starting", "falling asleep") and (old is None or _stopped_by_hand(old)):
        _discard(new, operation.created_by)
        return "It was stopped meanwhile, so the successor is not wanted either."
    if step["state"] == "starting":
        return _starting(operation, step, old, new)
    if step["state"] == "falling asleep":
        return _falling_asleep(operation, step, new)
    if step["state"] == "taking over":
        return _end_old(operation, step, old, new)
    return _draining(operation, step, old, new)


def _instance(pk: int | None) -> Instance | None:
    return Instance.objects.select_related("model", "host").filter(pk=pk or 0).first()


def _stopped_by_hand(old: Instance) -> bool:
    """Before it is our turn to end the old one, only somebody else can have wanted that."""
    return old.desired_state == DesiredState.STOPPED


def _begin(operation: Operation, step: dict[str, Any], old: Instance) -> str:
    """Make the successor. A look that was repeated after a crash finds the one that is there."""
    with transaction.atomic():
        new = _successor(old)
        if new is None:
            wish = operation.facts.get("wish")
            by_hand = not old.limit_automatic and bool(old.limit_bytes)
            new = Instance.objects.create(
                model=old.model,
                replica_index=old.replica_index,
                replaces=old,
                created_by=operation.created_by,
                placement_wish=_kept_wish(old, old.model) if wish is None else wish,
                limit_bytes=old.limit_bytes if by_hand else None,
                limit_automatic=old.limit_automatic,
                limit_revision=1 if by_hand else 0,
                limit_set_by=old.limit_set_by if by_hand else "",
                limit_reclaim=old.limit_reclaim,
                reason="Waits to be placed.",
            )
            transitions.note(new.pk, "move", f"Takes over from instance {old.pk}.", actor=operation.created_by)
            transitions.note(old.pk, "move", f"Instance {new.pk} takes over.", actor=operation.created_by)
            events.publish_instance_on_commit(new.pk, routes=True)
            dispatch.send_on_commit(dispatch.PLACE, new.pk, queue=dispatch.CONTROL_QUEUE)
    step |= {"state": "starting", "new_id": new.pk, "message": "The successor starts."}
    return ""


def _successor(old: Instance | None) -> Instance | None:
    """The live one that takes over, also when the worker that made it was killed before it could say so."""
    if old is None:
        return None
    rows = Instance.objects.select_related("model", "host").filter(replaces=old).exclude(state__in=TERMINAL)
    return rows.first()


def _starting(operation: Operation, step: dict[str, Any], old: Instance | None, new: Instance) -> str:
    if new.state in TERMINAL:
        _discard(new, operation.created_by)
        return f"The successor did not come up, the old one serves on. {new.reason}"
    if new.desired_state == DesiredState.SLEEPING:  # asked by a look that could not be written down
        step |= {"state": "falling asleep"}
        return ""
    if new.state != S.READY:
        step["message"] = f"The successor: {new.stage if new.state == S.STARTING else new.state}."
        return ""
    if old is not None and old.is_live and not step.get("awake"):  # it may have been woken, or put to sleep, since
        step["asleep"] = old.desired_state == DesiredState.SLEEPING
    if step["asleep"]:
        return _put_to_sleep(operation, step, new)
    _take_over(step)
    return ""


def _put_to_sleep(operation: Operation, step: dict[str, Any], new: Instance) -> str:
    try:
        instance_sleep(new, actor=operation.created_by)
    except BrokerAway:
        return ""  # asked again at the next look
    except SardeenzError as exc:
        _discard(new, operation.created_by)
        return f"The successor cannot sleep as the old one does; that one stays. {exc.message}"
    step |= {"state": "falling asleep", "message": "The successor is ready and goes to sleep as the old one was."}
    return ""


def _falling_asleep(operation: Operation, step: dict[str, Any], new: Instance) -> str:
    if new.state in TERMINAL:
        _discard(new, operation.created_by)
        return f"The successor ended while it was put to sleep; the old one stays. {new.reason}"
    would_not = new.state == S.READY and new.desired_state == DesiredState.RUNNING
    if new.state == S.SLEEPING or would_not:  # better awake than not there
        _take_over(step)
    return ""


def _take_over(step: dict[str, Any]) -> None:
    """On record before the old one is told, so that a repeated look knows by whom it was ended."""
    step |= {"state": "taking over", "message": "The successor is ready; the old one is told to finish."}


def _end_old(operation: Operation, step: dict[str, Any], old: Instance | None, new: Instance) -> str:
    """Also an old one that has failed: its restart policy must not bring it back beside the successor."""
    if new.state in TERMINAL and old is not None and old.state in REPLACEABLE:
        _discard(new, operation.created_by)
        return f"The successor ended before it took over, the old one serves on. {new.reason}"
    if old is not None and old.state != S.STOPPED:
        with transaction.atomic():
            transitions.report(old.pk, desired_state=DesiredState.STOPPED, next_restart_at=None)
            instance_stop_begin(old, reason=f"Instance {new.pk} has taken over.", actor=operation.created_by)
    step |= {"state": "draining", "message": "The successor serves; the old one finishes its requests."}
    return ""


def _draining(operation: Operation, step: dict[str, Any], old: Instance | None, new: Instance) -> str:
    if new.state in TERMINAL and old is not None:
        by_hand = new.desired_state == DesiredState.STOPPED
        serves = old.state in REPLACEABLE and old.desired_state != DesiredState.STOPPED
        if serves or (not by_hand and _serves_again(old, operation.created_by)):
            _discard(new, operation.created_by)
            return f"The successor ended while the old one was draining; that one serves again. {new.reason}"
    if old is not None and old.state != S.STOPPED and (old.is_live or old.next_restart_at is not None):
        step["message"] = f"The old one: {old.reason}"
        return ""
    _stands_alone(new, step["instance_id"])
    step |= {"state": "done", "message": "The successor serves alone."}
    return ""


def _serves_again(old: Instance, actor: str) -> bool:
    """draining → ready, unless its end has gone too far. It keeps serving the requests that it had."""
    return old.state == S.DRAINING and transitions.move(
        old.pk,
        S.READY,
        expected=S.DRAINING,
        reason="The take-over was given up: it serves on.",
        actor=actor,
        desired_state=DesiredState.RUNNING,
    )


def _stands_alone(new: Instance, old_id: int | None) -> None:
    """From now on it is the replica, no longer somebody's successor."""
    with transaction.atomic():
        if Instance.objects.filter(pk=new.pk).exclude(replaces=None).update(replaces=None):
            transitions.note(new.pk, "move", f"Has taken over from instance {old_id}.")
            events.publish_instance_on_commit(new.pk, routes=True)


def _discard(new: Instance, actor: str) -> None:
    """A successor that came to nothing is not wanted again. Needs no broker: a lost message is repeated."""
    with transaction.atomic():
        transitions.report(new.pk, desired_state=DesiredState.STOPPED, next_restart_at=None)
        instance_stop_begin(new, reason="The take-over was given up.", actor=actor)


def _cancel(operation: Operation, step: dict[str, Any]) -> Progress:
    """While the old one can serve, it serves on and the successor goes; after that, the change is finished."""
    steps = operation.steps
    old = _instance(step["instance_id"])
    new = _instance(step.get("new_id")) or _successor(old)
    if new is not None and new.is_live and not _can_stay(old):
        step.setdefault("new_id", new.pk)
        if step["state"] == "waiting":
            step["state"] = "starting"
        failed = _advance(operation, step)
        message = failed or f"Too late to cancel, the old one has ended: {step.get('message', '')}"
        return Progress(done=bool(failed) or step["state"] == "done", failed=bool(failed), message=message, steps=steps)
    ending = old is not None and old.state == S.DRAINING and step["state"] in ("taking over", "draining")
    if ending and old is not None and not _serves_again(old, operation.created_by):
        return Progress(message="The old one was about to end; looking again.", steps=steps)
    if new is not None and new.state != S.STOPPED:
        _discard(new, operation.created_by)
    step["state"] = "undone"
    return Progress(done=True, cancelled=True, message="Cancelled: the old one serves on.", steps=steps)


def _can_stay(old: Instance | None) -> bool:
    return old is not None and old.state in (REPLACEABLE | {S.STARTING, S.DRAINING})


# --- what an operation left behind -----------------------------------------------------------------


def successors_check() -> None:
    """Successors whose operation ended without them (its time limit, a lost row): one owner per replica, never none.

    Control worker, every round. Where the old one is gone the successor stands alone; where it serves, the successor
    goes; where it is on its way out, it is waited for.
    """
    rows = Instance.objects.live().exclude(replaces=None).select_related("model", "host", "replaces")
    if not rows:
        return
    busy = set(Operation.objects.filter(kind=REPLACE, state__in=OPEN).values_list("model_id", flat=True))
    for row in rows:
        old = row.replaces
        if row.model_id in busy or old is None or row.desired_state == DesiredState.STOPPED:
            continue
        if not old.is_live:
            log.warning("%s outlived its operation and stands alone now", row)
            transitions.report(old.pk, desired_state=DesiredState.STOPPED, next_restart_at=None)
            _stands_alone(row, old.pk)
        elif old.desired_state != DesiredState.STOPPED:
            _discard(row, "reconciler")
