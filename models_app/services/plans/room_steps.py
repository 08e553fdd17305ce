"""Making room, carried out: one short look at a time, from what stands in the operation's row.

Each step is verified by bytes that NVML shows; what does not come back is asked for once more by a new plan; when that
is not enough either, ``room_undo`` puts back what was done. The newcomer starts only when the bytes are really free:
drivers give them back late, so they are polled for. A worker that dies in the middle leaves its step as it was
written; beginning it again does the same once more, which is harmless.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.utils import timezone

from gpus_app.policies.base import StepKind, gib
from gpus_app.policies.make_room import make_room
from models_app import selectors, transitions
from models_app.errors import BrokerAway, SardeenzError
from models_app.models import Instance, MemoryPolicy, Model, Operation
from models_app.services.lifecycle.launch import instance_place, model_launch
from models_app.services.lifecycle.sleep import instance_sleep
from models_app.services.lifecycle.stop import instance_stop
from models_app.services.memory import placement
from models_app.services.memory.cards import cards
from models_app.services.memory.kvcache import kvcache_trim, limit_write
from models_app.services.memory.placement import Wish, claim_waive
from models_app.services.plans.operations import OPEN, Progress, handles
from models_app.services.plans.plan_steps import plan_steps
from models_app.services.plans.room_terms import Terms
from models_app.services.plans.room_undo import undo_begin, undo_step
from models_app.services.plans.room_wake import came_up, is_lost, wake_step
from models_app.states import LIMIT_NOW, TERMINAL, DesiredState, InstanceState, LimitStatus

S = InstanceState
MAKE_ROOM = "make_room"
TIDY = "tidy"

#: Seconds that one step may take before the plan goes on without what it promised; draining may add to them.
STEP_LIMIT_S = {StepKind.LOWER: 45.0, StepKind.TRIM: 20.0, StepKind.SLEEP: 120.0, StepKind.STOP: 120.0}
#: Seconds that freed bytes may take to show up in NVML.
BYTES_LIMIT_S = 20.0
#: Seconds until the newcomer starts; then the plan is undone. Its start and wake have limits of their own.
MAKE_ROOM_LIMIT_S = 1800.0
#: A step counts as verified from this part of its expected bytes on; the sum is checked exactly.
VERIFIED = 0.9
ROUNDS = 2


def cards_in_use() -> frozenset[str]:
    """UUIDs of the cards whose memory is being rearranged: the controller leaves them alone meanwhile."""
    rows = Operation.objects.filter(kind__in=(MAKE_ROOM, TIDY), state__in=OPEN).values_list("facts", flat=True)
    return frozenset(uuid for facts in rows for uuid in facts.get("gpu_uuids", ()))


def steps_waiting(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A plan's steps for the operation's row: none is begun."""
    return [step | {"state": "waiting"} for step in steps]


@handles(TIDY)
def tidy_step(operation: Operation) -> Progress:
    """Steps without a newcomer: what fails is said, nothing is undone."""
    steps: list[dict[str, Any]] = operation.steps
    if operation.cancel_requested:
        return Progress(done=True, cancelled=True, message="Cancelled; what was done stays.", steps=steps)
    step = next((one for one in steps if one["state"] in ("waiting", "running")), None)
    if step is None:
        freed = sum(max(one.get("measured_bytes") or 0, 0) * len(one["gpu_uuids"]) for one in steps)
        failed = [one for one in steps if one["state"] == "failed"]
        message = f"{gib(freed)} came back." + "".join(f" {one['name']}: {one['message']}" for one in failed)
        return Progress(done=True, failed=len(failed) == len(steps), message=message, progress=1.0, steps=steps)
    _advance(step, operation)
    return Progress(phase=step["kind"], message=step["reason"], progress=_share(steps), steps=steps)


@handles(MAKE_ROOM)
def make_room_step(operation: Operation) -> Progress:
    """One look: start the next step, or see whether the one under way has given its bytes back."""
    steps: list[dict[str, Any]] = operation.steps
    try:
        if operation.facts.get("undoing"):
            return undo_step(operation)
        if operation.cancel_requested and not _is_up(operation):
            while_starting = steps[-1]["state"] == "running"
            why = "Cancelled while the newcomer was starting." if while_starting else "Cancelled."
            return undo_begin(operation, why, cancelled=True)
        late = timezone.now() - operation.created_at > timedelta(seconds=MAKE_ROOM_LIMIT_S)
        if late and steps[-1]["state"] == "waiting":
            return undo_begin(operation, f"Not finished within {MAKE_ROOM_LIMIT_S:.0f} s. {operation.message}")
        return _step(operation)
    except BrokerAway as exc:
        return Progress(phase=operation.phase, message=exc.message, progress=operation.progress, steps=steps)
    except SardeenzError as exc:
        if operation.facts.get("undoing"):
            raise
        return undo_begin(operation, exc.message)


def _is_up(operation: Operation) -> bool:
    """Whether it is too late to cancel: the newcomer serves, or did since."""
    last = operation.steps[-1]
    row = Instance.objects.filter(pk=last.get("instance_id") or 0).first()
    return last["state"] == "running" and row is not None and came_up(row, operation)


def _step(operation: Operation) -> Progress:
    steps: list[dict[str, Any]] = operation.steps
    step = next((one for one in steps if one["state"] in ("waiting", "running")), None)
    if step is None:
        return Progress(done=True, message="Done.", progress=1.0, steps=steps)
    if step["kind"] == "launch":
        return _launch_step(operation, step)
    if step["kind"] == "wake":
        _waive(operation)
        return wake_step(operation, step, share=_share(steps))
    _advance(step, operation)
    message = f"{step['name']}: {step['reason']}"
    return Progress(phase=step["kind"], message=message, progress=_share(steps), steps=steps)


def _share(steps: list[dict[str, Any]]) -> float:
    return sum(one["state"] not in ("waiting", "running") for one in steps) / max(len(steps), 1)


def _free(uuids: Iterable[str]) -> dict[str, int | None]:
    return {uuid: card.view.free_bytes if card.fresh else None for uuid, card in cards(uuids).items()}


def _measured(now: dict[str, int | None], before: dict[str, int | None]) -> int | None:
    """Bytes that came back on every GPU of the step, so on the one where it was least; None: not read."""
    gains = [free - had for uuid, had in before.items() if had is not None and (free := now.get(uuid)) is not None]
    return min(gains) if gains and len(gains) == len(before) else None


def _advance(step: dict[str, Any], operation: Operation) -> None:
    """Start the step, or look at it once. Writes into ``step``. Raises BrokerAway: it is begun at a later look."""
    now = time.time()
    row = Instance.objects.select_related("model", "host", "attempt").filter(pk=step["instance_id"]).first()
    if row is None:
        step |= {"state": "skipped", "message": "The instance is gone."}
        return
    if step["state"] == "waiting":
        before = _free(step["gpu_uuids"])
        try:
            _begin(step, row, operation.created_by)
        except BrokerAway:
            raise
        except SardeenzError as exc:
            step |= {"state": "failed", "message": exc.message}
            return
        step |= {"state": "running", "started_at": now, "free_before": before}
        return
    late = now - step["started_at"] > _step_limit_s(StepKind(step["kind"]))
    finished, message = _finished(step, row)
    measured = _measured(_free(step["gpu_uuids"]), step.get("free_before") or {})
    step["measured_bytes"] = measured
    if finished and "finished_at" not in step:
        step["finished_at"] = now
    there = step["expected_bytes"] <= 0 or (measured is not None and measured >= VERIFIED * step["expected_bytes"])
    if finished and (there or now - step["finished_at"] > BYTES_LIMIT_S):
        step |= {"state": "verified" if there else "short", "message": message}
    elif late and not finished:
        step |= {"state": "failed", "message": message or "It took too long."}


def _step_limit_s(kind: StepKind) -> float:
    """Seconds for a step: who sleeps or stops may take as long as the settings let requests drain and engines end."""
    limit = STEP_LIMIT_S[kind]
    drain: float = settings.ROUTE_GRACE_S + settings.DRAIN_LIMIT_S
    if kind is StepKind.SLEEP:
        return max(limit, drain + float(settings.WAKE_CALL_LIMIT_S))
    if kind is StepKind.STOP:
        return max(limit, drain + float(settings.STOP_LIMIT_S + settings.KILL_LIMIT_S))
    return limit


def _begin(step: dict[str, Any], row: Instance, actor: str) -> None:
    kind = StepKind(step["kind"])
    if kind is StepKind.LOWER:
        step["automatic"] = row.limit_automatic
        step["revision"] = limit_write(
            row, step["to_bytes"], actor=actor, reclaim=step["reclaim"], reason=step["reason"], automatic=None
        )
    elif kind is StepKind.TRIM:
        answer = kvcache_trim(row, actor=actor, wait_s=8.0)
        step["freed_bytes"] = answer.freed_bytes
    elif kind is StepKind.SLEEP:
        instance_sleep(row, actor=actor)
    elif kind is StepKind.STOP:
        instance_stop(row, actor=actor)


def _finished(step: dict[str, Any], row: Instance) -> tuple[bool, str]:
    """Whether the act itself is done (its bytes are looked for apart), and what to say of it."""
    kind = StepKind(step["kind"])
    if kind is StepKind.LOWER:
        if row.limit_revision > step["revision"] and row.limit_bytes != step["to_bytes"]:
            return True, f"{row.limit_set_by} set another limit meanwhile."
        if row.state not in LIMIT_NOW:
            return True, f"It is {row.state}: the limit waits for its engine."
        answered = row.limit_acked_revision >= step["revision"]
        return answered and row.limit_status == LimitStatus.APPLIED, row.limit_message
    if kind in (StepKind.SLEEP, StepKind.STOP) and row.desired_state == DesiredState.RUNNING:
        return True, f"It is wanted running again: {row.reason}"  # launched or woken meanwhile, or it would not sleep
    if kind is StepKind.SLEEP:
        return row.state == S.SLEEPING or row.state in TERMINAL, row.reason
    if kind is StepKind.STOP:
        return row.state in TERMINAL, row.reason
    return True, f"{gib(step.get('freed_bytes') or 0)} freed."


# --- the newcomer ---------------------------------------------------------------------------------------


def _launch_step(operation: Operation, step: dict[str, Any]) -> Progress:
    """Verify the sum, then launch, then wait until the newcomer is ready."""
    model = operation.model
    if model is None:
        return undo_begin(operation, "The model was deleted meanwhile.")
    if step["state"] == "waiting":
        return _verify(operation, step, model)
    row = Instance.objects.filter(pk=step["instance_id"]).first()
    if row is not None and came_up(row, operation):
        transitions.report(row.pk, placement_wish=operation.facts.get("asked") or {})
        step |= {"state": "verified", "message": row.reason}
        return Progress(done=True, message=f"{model} is ready.", progress=1.0, steps=operation.steps)
    if row is None or is_lost(row):
        return undo_begin(operation, f"The newcomer did not come up: {row.reason if row else 'it is gone'}")
    message = f"{model}: {row.stage if row.state != S.PENDING else row.reason}"
    return Progress(phase="launch", message=message, progress=_share(operation.steps), steps=operation.steps)


def _verify(operation: Operation, step: dict[str, Any], model: Model) -> Progress:
    facts, steps = operation.facts, operation.steps
    known = selectors.replicas_of(model).get(int(facts.get("replica_index") or 0))
    waits = known is not None and known.state == S.PENDING
    if known is not None and known.is_live and not waits:  # launched by a worker that died before it could say so
        return _started(operation, step, known)
    _waive(operation)
    asked = {"host": facts["host"], "gpu_uuids": facts["gpu_uuids"]}
    placed = placement.place(model, Wish.of(model, asked), without=known.pk if known is not None else None)
    if placed.decision.gpus and known is not None and waits:
        transitions.report(known.pk, expected=S.PENDING, placement_wish=asked)
        instance_place(known.pk)
        return _started(operation, step, known)
    if placed.decision.gpus:
        started = model_launch(model, actor=operation.created_by, host=facts["host"], gpu_uuids=facts["gpu_uuids"])
        ours = [row for row in started if row.replica_index == int(facts.get("replica_index") or 0)]
        return _started(operation, step, (ours or started)[0])
    waiting_since = float(facts.get("verify_since") or time.time())
    if time.time() - waiting_since < BYTES_LIMIT_S:
        message = f"Waits for the driver to give the bytes back. {placed.decision.reason}"
        return Progress(phase="verify", message=message, steps=steps, facts={"verify_since": waiting_since})
    if int(facts["round"]) >= ROUNDS:
        return undo_begin(operation, f"The bytes did not come back: {placement.refusal(placed)}")
    more = _more(operation, model, placed.need.total_bytes)
    if not more:
        return undo_begin(
            operation, f"The bytes did not come back and there is nothing more to free: {placed.decision.reason}"
        )
    return Progress(
        phase="verify",
        message="Not all of it came back: a second round.",
        steps=[*steps[:-1], *more, steps[-1]],
        facts={"round": int(facts["round"]) + 1, "verify_since": None},
    )


def _started(operation: Operation, step: dict[str, Any], row: Instance) -> Progress:
    step |= {"state": "running", "instance_id": row.pk, "started_at": time.time()}
    message = f"The room is there; {row.model} starts."
    return Progress(phase="launch", message=message, progress=_share(operation.steps), steps=operation.steps)


def _waive(operation: Operation) -> None:
    """Those put to sleep for the newcomer claim nothing while they sleep, or their bytes could not be given to it."""
    asleep = [step["instance_id"] for step in operation.steps if step["kind"] == StepKind.SLEEP]
    for row in Instance.objects.filter(pk__in=asleep, state=S.SLEEPING).select_related("attempt"):
        claim_waive(row)


def _more(operation: Operation, model: Model, need_bytes: int) -> list[dict[str, Any]]:
    """A second plan, from what is now; empty when there is none."""
    rules = getattr(model, "memory_policy", None) or MemoryPolicy(model=model)
    terms = Terms.of(operation.facts.get("terms"))
    found = cards(operation.facts["gpu_uuids"], newcomer=model)
    plans = []
    for card in found.values():
        plan = make_room(
            card.view,
            terms.rows(card.rows),
            need_bytes,
            time.time(),
            priority=rules.priority,
            minimum_residence_s=settings.RESIDENCE_S,
            max_harm=terms.max_harm,
        )
        if not card.fresh or not plan.feasible:
            return []
        plans.append(plan)
    return steps_waiting(plan_steps(plans, found.values()))
