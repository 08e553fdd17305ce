"""Room for the next model: the judgement before a launch, and the operation that makes the room and then launches.

The plan is drawn before anything happens. Carried out, each step is verified by bytes that NVML shows; what does not
come back is asked for once more by a new plan; when that is not enough either, limits are put back and sleepers woken.
The newcomer starts only when the bytes are really free: drivers give them back late, so they are polled for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpus_app.policies import fit
from gpus_app.policies.base import GpuView, InstanceView, Plan, StepKind, gib
from gpus_app.policies.make_room import make_room, shrink_idle, trim_all
from gpus_app.policies.placement import Request
from models_app.errors import Conflict, DoesNotFit, SardeenzError
from models_app.models import Instance, MemoryPolicy, Model, Operation
from models_app.services import placement
from models_app.services.cards import Card, cards
from models_app.services.kvcache import kvcache_trim, limit_write
from models_app.services.launch import model_launch
from models_app.services.operations import OPEN, Progress, handles, operation_create
from models_app.services.placement import Wish
from models_app.services.sleep import instance_sleep, instance_wake
from models_app.services.stop import instance_stop
from models_app.states import TERMINAL, InstanceState, LimitStatus

S = InstanceState
MAKE_ROOM = "make_room"
TIDY = "tidy"

#: Seconds that one step may take before the plan goes on without what it promised.
STEP_LIMIT_S = {StepKind.LOWER: 45.0, StepKind.TRIM: 20.0, StepKind.SLEEP: 120.0, StepKind.STOP: 120.0}
#: Seconds that freed bytes may take to show up in NVML.
BYTES_LIMIT_S = 20.0
#: A step counts as verified from this part of its expected bytes on; the sum is checked exactly.
VERIFIED = 0.9
ROUNDS = 2


@dataclass(frozen=True)
class Room:
    """Whether and where a launch fits, with the picture of every card concerned."""

    judgement: fit.Judgement
    need: fit.Need
    cards: dict[str, Card]

    def json(self) -> dict[str, Any]:
        """For pages and scripts; bytes per GPU."""
        return {
            "verdict": str(self.judgement.verdict),
            "sentence": self.judgement.sentence,
            "need_bytes": self.need.total_bytes,
            "measured": self.need.measured,
            "lines": [{"label": line.label, "bytes": line.bytes, "why": line.why} for line in self.need.lines],
            "gpus": [gpu.uuid for gpu in self.judgement.gpus],
            "largest_bytes": self.judgement.largest_bytes,
            "suggested_tensor_parallel_size": self.judgement.suggested_tensor_parallel_size,
            "plans": [
                {
                    "gpu_uuid": plan.gpu_uuid,
                    "sentence": plan.sentence,
                    "room_bytes": plan.room_bytes,
                    "steps": _steps_json(plan, self.cards[plan.gpu_uuid]),
                }
                for plan in self.judgement.plans
            ],
        }


def _steps_json(plan: Plan, card: Card) -> list[dict[str, Any]]:
    return [
        {
            "kind": str(step.kind),
            "gpu_uuid": plan.gpu_uuid,
            "instance_id": step.instance_id,
            "name": str(card.instances[step.instance_id].model),
            "from_bytes": step.from_bytes,
            "to_bytes": step.to_bytes,
            "expected_bytes": step.expected_bytes,
            "reason": step.reason,
            "harm": step.harm.name.lower(),
            "reclaim": step.reclaim,
            "state": "waiting",
        }
        for step in plan.steps
    ]


def room_judge(model: Model, *, wish: Wish | None = None) -> Room:
    """Fits now, fits after making room (with the plans), or does not fit (with the largest that would)."""
    wish = wish or Wish.of(model)
    found = cards()
    states = placement.gpu_states()
    placed = placement.place(model, wish)
    rules = getattr(model, "memory_policy", None) or MemoryPolicy(model=model)
    request = Request(
        need_bytes=placed.need.total_bytes,
        tensor_parallel_size=model.tensor_parallel_size,
        host=wish.host,
        gpu_uuids=wish.gpu_uuids,
    )
    views: Mapping[str, tuple[GpuView, Sequence[InstanceView]]] = {
        uuid: (card.view, card.rows) for uuid, card in found.items() if card.fresh
    }
    judgement = fit.judge(
        placed.need,
        request,
        states,
        views,
        time.time(),
        facts=placement.launch_facts(model),
        priority=rules.priority,
    )
    return Room(judgement, placed.need, found)


def cards_in_use() -> frozenset[str]:
    """UUIDs of the cards on which room is being made: the controller leaves them alone meanwhile."""
    rows = Operation.objects.filter(kind=MAKE_ROOM, state__in=OPEN).values_list("facts", flat=True)
    return frozenset(uuid for facts in rows for uuid in facts.get("gpu_uuids", ()))


def room_make(
    model: Model, *, actor: str, host: str | None = None, gpu_uuids: Sequence[str] | None = None
) -> Operation:
    """Carry out the plan for one more instance of ``model``, then launch it.

    Raises DoesNotFit, or Conflict when it fits already or room is being made on the same card.
    """
    wish = Wish.of(model, {"host": host, "gpu_uuids": list(gpu_uuids or ())})
    room = room_judge(model, wish=wish)
    if room.judgement.verdict is fit.Verdict.FITS:
        raise Conflict(f"{model} fits already: launch it.")
    if room.judgement.verdict is fit.Verdict.DOES_NOT_FIT:
        raise DoesNotFit(room.judgement.sentence, **room.json())
    uuids = [gpu.uuid for gpu in room.judgement.gpus]
    if cards_in_use() & set(uuids):
        raise Conflict("Room is being made on that GPU already; wait for it, or cancel it.")
    steps = [step for plan in room.judgement.plans for step in _steps_json(plan, room.cards[plan.gpu_uuid])]
    steps.append({"kind": "launch", "name": str(model), "reason": room.judgement.sentence, "state": "waiting"})
    return operation_create(
        MAKE_ROOM,
        title=f"Make room for {model}",
        actor=actor,
        steps=steps,
        facts={
            "gpu_uuids": uuids,
            "host": room.judgement.gpus[0].host,
            "need_bytes": room.need.total_bytes,
            "round": 1,
            "free_before": {uuid: room.cards[uuid].view.free_bytes for uuid in uuids},
        },
        model=model,
        deadline_s=1800.0,
    )


def tidy_plan(uuid: str, *, how: str) -> tuple[Plan, Card]:
    """What *trim all* or *shrink idle* would do on one card. Raises Conflict without a fresh reading."""
    card = cards([uuid]).get(uuid)
    if card is None or not card.fresh:
        raise Conflict("This GPU has no fresh reading; nothing can be planned on it now.")
    plan = trim_all(card.view, card.rows) if how == "trim" else shrink_idle(card.view, card.rows, time.time())
    return plan, card


def tidy(uuid: str, *, how: str, actor: str) -> Operation:
    """Carry out *trim all* or *shrink idle*. Raises Conflict when there is nothing to do."""
    plan, card = tidy_plan(uuid, how=how)
    if not plan.steps:
        raise Conflict(plan.sentence)
    verb = "Trim every instance" if how == "trim" else "Shrink idle instances"
    facts = {"gpu_uuids": [uuid], "round": ROUNDS, "need_bytes": 0}
    title = f"{verb} on GPU {card.gpu.index} of {card.gpu.host.name}"
    return operation_create(
        TIDY, title=title, actor=actor, steps=_steps_json(plan, card), facts=facts, deadline_s=300.0
    )


# --- carrying it out, one short look at a time ----------------------------------------------------------


@handles(TIDY)
def tidy_step(operation: Operation) -> Progress:
    """Steps without a newcomer: what fails is said, nothing is undone."""
    steps: list[dict[str, Any]] = operation.steps
    if operation.cancel_requested:
        return Progress(done=True, cancelled=True, message="Cancelled; what was done stays.", steps=steps)
    step = next((one for one in steps if one["state"] in ("waiting", "running")), None)
    if step is None:
        freed = sum(one.get("measured_bytes") or 0 for one in steps)
        failed = [one for one in steps if one["state"] == "failed"]
        message = f"{gib(freed)} came back." + "".join(f" {one['name']}: {one['message']}" for one in failed)
        return Progress(done=True, failed=len(failed) == len(steps), message=message, progress=1.0, steps=steps)
    _advance(step, operation)
    return Progress(phase=step["kind"], message=step["reason"], progress=_share(steps), steps=steps)


@handles(MAKE_ROOM)
def make_room_step(operation: Operation) -> Progress:
    """One look: start the next step, or see whether the one under way has given its bytes back."""
    steps: list[dict[str, Any]] = operation.steps
    if operation.cancel_requested and not operation.facts.get("undoing"):
        if steps[-1]["state"] == "running":
            return _undo(operation, "Cancelled while the newcomer was starting.", cancelled=True)
        return _undo(operation, "Cancelled.", cancelled=True)
    if operation.facts.get("undoing"):
        return _undo(operation, str(operation.facts["undoing"]), cancelled=bool(operation.facts.get("cancelled")))
    step = next((one for one in steps if one["state"] in ("waiting", "running")), None)
    if step is None:
        return Progress(done=True, message="Done.", progress=1.0, steps=steps)
    if step["kind"] == "launch":
        return _launch_step(operation, step)
    _advance(step, operation)
    return Progress(
        phase=step["kind"], message=f"{step['name']}: {step['reason']}", progress=_share(steps), steps=steps
    )


def _share(steps: list[dict[str, Any]]) -> float:
    return sum(one["state"] not in ("waiting", "running") for one in steps) / max(len(steps), 1)


def _free(operation: Operation) -> dict[str, int | None]:
    found = cards(operation.facts["gpu_uuids"])
    return {uuid: card.view.free_bytes if card.fresh else None for uuid, card in found.items()}


def _advance(step: dict[str, Any], operation: Operation) -> None:
    """Start the step, or look at it once. Writes into ``step``."""
    now = time.time()
    row = Instance.objects.select_related("model", "host").filter(pk=step["instance_id"]).first()
    if row is None:
        step |= {"state": "skipped", "message": "The instance is gone."}
        return
    if step["state"] == "waiting":
        step |= {"state": "running", "started_at": now, "free_before": _free(operation).get(step["gpu_uuid"])}
        try:
            _begin(step, row, operation.created_by)
        except SardeenzError as exc:
            step |= {"state": "failed", "message": exc.message}
        return
    late = now - step["started_at"] > STEP_LIMIT_S[StepKind(step["kind"])]
    finished, message = _finished(step, row)
    free, before = _free(operation).get(step["gpu_uuid"]), step.get("free_before")
    measured = None if free is None or before is None else free - before
    step["measured_bytes"] = measured
    if finished and "finished_at" not in step:
        step["finished_at"] = now
    there = step["expected_bytes"] <= 0 or (measured is not None and measured >= VERIFIED * step["expected_bytes"])
    if finished and (there or now - step["finished_at"] > BYTES_LIMIT_S):
        step |= {"state": "verified" if there else "short", "message": message}
    elif late:
        step |= {"state": "failed", "message": message or "It took too long."}


def _begin(step: dict[str, Any], row: Instance, actor: str) -> None:
    kind = StepKind(step["kind"])
    if kind is StepKind.LOWER:
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
        answered = row.limit_acked_revision >= step["revision"]
        return answered and row.limit_status == LimitStatus.APPLIED, row.limit_message
    if kind is StepKind.SLEEP:
        return row.state == S.SLEEPING, row.reason
    if kind is StepKind.STOP:
        return row.state in TERMINAL, row.reason
    return True, f"{gib(step.get('freed_bytes') or 0)} freed."


def _launch_step(operation: Operation, step: dict[str, Any]) -> Progress:
    """Verify the sum, then launch, then wait until the newcomer is ready."""
    model = operation.model
    if model is None:
        return _undo(operation, "The model was deleted meanwhile.")
    if step["state"] == "waiting":
        return _verify(operation, step, model)
    row = Instance.objects.filter(pk=step["instance_id"]).first()
    if row is None or row.state in TERMINAL:
        return _undo(operation, f"The newcomer did not come up: {row.reason if row else 'it is gone'}")
    if row.state == S.READY:
        step |= {"state": "verified", "message": row.reason}
        return Progress(done=True, message=f"{model} is ready.", progress=1.0, steps=operation.steps)
    return Progress(
        phase="launch", message=f"{model}: {row.stage}", progress=_share(operation.steps), steps=operation.steps
    )


def _verify(operation: Operation, step: dict[str, Any], model: Model) -> Progress:
    facts = operation.facts
    wish = Wish.of(model, {"host": facts["host"], "gpu_uuids": facts["gpu_uuids"]})
    placed = placement.place(model, wish)
    steps = operation.steps
    if placed.decision.gpus:
        started = model_launch(model, actor=operation.created_by, host=facts["host"], gpu_uuids=facts["gpu_uuids"])
        newest = max(started, key=lambda one: one.pk)
        step |= {"state": "running", "instance_id": newest.pk, "started_at": time.time()}
        return Progress(
            phase="launch", message=f"The room is there; {model} starts.", progress=_share(steps), steps=steps
        )
    waiting_since = float(facts.get("verify_since") or time.time())
    if time.time() - waiting_since < BYTES_LIMIT_S:
        message = f"Waits for the driver to give the bytes back. {placed.decision.reason}"
        return Progress(phase="verify", message=message, steps=steps, facts={"verify_since": waiting_since})
    if int(facts["round"]) >= ROUNDS:
        return _undo(operation, f"The bytes did not come back: {placement.refusal(placed)}")
    more = _more(operation, placed.need.total_bytes)
    if not more:
        return _undo(
            operation, f"The bytes did not come back and there is nothing more to free: {placed.decision.reason}"
        )
    return Progress(
        phase="verify",
        message="Not all of it came back: a second round.",
        steps=[*steps[:-1], *more, steps[-1]],
        facts={"round": int(facts["round"]) + 1, "verify_since": None},
    )


def _more(operation: Operation, need_bytes: int) -> list[dict[str, Any]]:
    """A second plan, from what is now."""
    found = cards(operation.facts["gpu_uuids"])
    more: list[dict[str, Any]] = []
    for card in found.values():
        plan = make_room(card.view, card.rows, need_bytes, time.time())
        if not plan.feasible:
            return []
        more += _steps_json(plan, card)
    return more


def _undo(operation: Operation, why: str, *, cancelled: bool = False) -> Progress:
    """Put limits back, wake sleepers, start what was stopped."""
    said = []
    for step in operation.steps:
        if step["state"] in ("waiting", "skipped"):
            step["state"] = "skipped"
            continue
        row = Instance.objects.select_related("model", "host").filter(pk=step.get("instance_id") or 0).first()
        if row is None:
            continue
        try:
            said += _undo_step(step, row, operation.created_by)
        except SardeenzError as exc:
            said.append(f"{row.model}: {exc.message}")
    message = " ".join([why, *said])
    return Progress(done=True, failed=not cancelled, cancelled=cancelled, message=message, steps=operation.steps)


def _undo_step(step: dict[str, Any], row: Instance, actor: str) -> list[str]:
    kind = step["kind"]
    if kind == "launch":
        if row.is_live:
            instance_stop(row, actor=actor)
        step["state"] = "undone"
        return [f"{row.model} is stopped."]
    if kind == StepKind.LOWER and row.limit_bytes == step["to_bytes"] and row.is_live:
        limit_write(row, step["from_bytes"], actor=actor, reclaim="wait", reason="Put back.", automatic=None)
        step["state"] = "undone"
        return [f"The limit of {row.model} is {gib(step['from_bytes'])} again."]
    if kind == StepKind.SLEEP and row.state == S.SLEEPING:
        instance_wake(row, actor=actor)
        step["state"] = "undone"
        return [f"{row.model} wakes."]
    if kind == StepKind.STOP:
        model_launch(row.model, actor=actor)
        step["state"] = "undone"
        return [f"{row.model} is started again."]
    return []
