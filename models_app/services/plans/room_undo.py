"""Putting back what a plan has done: the newcomer ends or sleeps again, limits rise, sleepers wake, stopped ones start.

In the opposite order of the plan, over several looks: nobody can come back into bytes that the newcomer still holds.
"""

from __future__ import annotations

import time
from typing import Any

from django.conf import settings

from gpus_app.policies.base import StepKind, gib
from models_app import transitions
from models_app.errors import BrokerAway, SardeenzError
from models_app.models import Instance, Operation
from models_app.services.lifecycle.launch import model_launch
from models_app.services.lifecycle.sleep import instance_sleep, instance_wake
from models_app.services.lifecycle.stop import instance_stop
from models_app.services.memory.kvcache import limit_write
from models_app.services.memory.placement import claim_waive
from models_app.services.plans.operations import Progress
from models_app.states import TERMINAL, DesiredState, InstanceState

S = InstanceState

#: Seconds that putting back one step may take, beside the time that the newcomer's requests may take to drain.
UNDO_LIMIT_S = 120.0


def undo_begin(operation: Operation, why: str, *, cancelled: bool = False) -> Progress:
    """Nothing more is done; from the next look on it is undone. The promise to the newcomer ends here."""
    for step in operation.steps:
        if step["state"] == "waiting":
            step["state"] = "skipped"
    facts = {"undoing": why, "cancelled": cancelled, "said": []}
    return Progress(phase="undo", message=f"{why} It is undone.", steps=operation.steps, facts=facts)


def undo_step(operation: Operation) -> Progress:
    """Put back the last step that is not put back yet; done when there is none left."""
    steps: list[dict[str, Any]] = operation.steps
    why, said = str(operation.facts["undoing"]), list(operation.facts.get("said") or ())
    step = next((one for one in reversed(steps) if one["state"] not in ("skipped", "undone", "stays")), None)
    if step is None:
        cancelled = bool(operation.facts.get("cancelled"))
        message = " ".join([why, *said])
        return Progress(done=True, failed=not cancelled, cancelled=cancelled, message=message, steps=steps)
    now = time.time()
    limit = UNDO_LIMIT_S + (settings.DRAIN_LIMIT_S if step["kind"] in ("launch", "wake") else 0.0)
    late = now - step.setdefault("undo_at", now) > limit
    sentence: str | None
    _claims_nothing(steps[-1])
    try:
        sentence = _put_back(step, operation.created_by)
        outcome = "undone" if sentence else "stays"
    except BrokerAway:
        raise
    except SardeenzError as exc:
        # A card whose memory comes back late refuses at first.
        sentence, outcome = (f"{step['name']}: {exc.message}", "stays") if late else (None, "")
    if sentence is None and late:
        sentence, outcome = f"{step['name']} could not be put back within {limit:.0f} s.", "stays"
    if sentence is not None:
        step["state"] = outcome
        said += [sentence] if sentence else []
    return Progress(phase="undo", message=" ".join([why, *said]), steps=steps, facts={"said": said})


def _put_back(step: dict[str, Any], actor: str) -> str | None:
    """What was done, as a sentence; empty when there is nothing to put back; None: look again."""
    row = Instance.objects.select_related("model", "host").filter(pk=step.get("instance_id") or 0).first()
    if row is None:
        return ""
    kind = step["kind"]
    if kind == "launch":
        return _end(row, actor)
    if kind == "wake":
        return _sleep_again(row, actor)
    if kind == StepKind.LOWER and row.limit_bytes == step["to_bytes"] and row.is_live:
        limit_write(row, step["from_bytes"], actor=actor, reclaim="wait", reason="Put back.", automatic=None)
        return f"The limit of {row.model} is {gib(step['from_bytes'])} again."
    if kind == StepKind.SLEEP:
        return _wake(row, step, actor)
    if kind == StepKind.STOP:
        if row.state not in TERMINAL:
            return "" if row.desired_state == DesiredState.RUNNING else None
        model_launch(row.model, actor=actor)
        return f"{row.model} is started again."
    return ""


def _end(row: Instance, actor: str) -> str | None:
    """The newcomer ends, and is not tried again by its restart policy."""
    if row.state not in TERMINAL:
        if row.desired_state != DesiredState.STOPPED:
            instance_stop(row, actor=actor)
        row.refresh_from_db()
        return None if row.is_live else f"{row.model} is stopped."
    if row.desired_state != DesiredState.STOPPED:
        transitions.report(row.pk, desired_state=DesiredState.STOPPED, next_restart_at=None)
    return f"{row.model} is {row.state}."


def _sleep_again(row: Instance, actor: str) -> str | None:
    """One that the plan woke goes back to sleep; one that died on the way does so after its next start."""
    if row.state == S.READY:
        instance_sleep(row, actor=actor)
        return None
    waking = row.state == S.SLEEPING and row.desired_state == DesiredState.RUNNING
    if waking or row.state in (S.SCHEDULED, S.STARTING, S.DRAINING):
        return None
    if row.state == S.SLEEPING:
        return f"{row.model} sleeps again."
    if row.desired_state == DesiredState.RUNNING:
        transitions.report(row.pk, expected=S(row.state), desired_state=DesiredState.SLEEPING)
    return ""


def _claims_nothing(newcomer: dict[str, Any]) -> None:
    """A sleeper that goes on sleeping gives up its claim to wake, or its neighbour would find no room to come back."""
    if newcomer["kind"] != "wake":
        return
    row = Instance.objects.filter(pk=newcomer["instance_id"], state=S.SLEEPING).select_related("attempt").first()
    if row is not None:
        claim_waive(row)


def _wake(row: Instance, step: dict[str, Any], actor: str) -> str | None:
    if row.state == S.DRAINING and row.desired_state == DesiredState.SLEEPING:
        return None  # on its way to sleep: it cannot be called back before it is there
    if row.state == S.SLEEPING:
        if row.desired_state != DesiredState.RUNNING:
            instance_wake(row, actor=actor)
            step["undo_asked"] = True
            return None
        return None
    if step.get("undo_asked") and row.is_live:
        return f"{row.model} is awake." if row.state == S.READY else f"{row.model} wakes."
    return ""
