"""Room for the next model: the judgement before a launch, and the plan that an operator confirms.

The plan is drawn before anything happens; ``room_steps`` carries it out, one verified step at a time.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db import transaction

from gpus_app.policies import fit
from gpus_app.policies.base import GpuView, InstanceView, Plan
from gpus_app.policies.make_room import shrink_idle, trim_all
from gpus_app.policies.placement import Request
from models_app import broker, selectors
from models_app.errors import Conflict, DoesNotFit
from models_app.models import Instance, MemoryPolicy, Model, Operation
from models_app.services import specs
from models_app.services.locks import transaction_lock
from models_app.services.memory import placement
from models_app.services.memory.cards import Card, cards
from models_app.services.memory.placement import Wish
from models_app.services.plans.operations import OPEN, operation_create
from models_app.services.plans.plan_steps import plan_steps
from models_app.services.plans.room_steps import (
    MAKE_ROOM,
    MAKE_ROOM_LIMIT_S,
    ROUNDS,
    TIDY,
    cards_in_use,
    steps_waiting,
)
from models_app.services.plans.room_terms import CONFIRMED, Terms
from models_app.services.plans.room_wake import wake_steps
from models_app.states import InstanceState

__all__ = ["Room", "cards_in_use", "room_judge", "room_make", "room_wake_make", "tidy", "tidy_plan"]

#: Undoing goes on for a while after the time limit of the plan itself.
_UNDO_S = 600.0
_IN_USE = "The memory of that GPU is being rearranged already; wait for it, or cancel it."
_UNDER_WAY = "Room for it is being made already; wait for it, or cancel it."


@dataclass(frozen=True)
class Room:
    """Whether and where a launch fits, with the picture of every card concerned."""

    judgement: fit.Judgement
    need: fit.Need
    cards: dict[str, Card]

    def steps(self) -> list[dict[str, Any]]:
        """What making room does, in order; an instance over several GPUs has one step for all of them."""
        return plan_steps(self.judgement.plans, self.cards.values())

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
                }
                for plan in self.judgement.plans
            ],
            "steps": self.steps(),
        }


def room_judge(model: Model, *, wish: Wish | None = None, terms: Terms = CONFIRMED) -> Room:
    """Fits now, fits after making room (with the plans), or does not fit (with the largest that would).

    ``terms``: how far the plans may go.
    """
    wish = wish or Wish.of(model)
    found = cards(newcomer=model)
    unusable = specs.unusable_hosts(model)
    states = placement.states_for(model, unusable=unusable)
    placed = placement.place(model, wish, unusable=unusable)
    rules = getattr(model, "memory_policy", None) or MemoryPolicy(model=model)
    request = Request(
        need_bytes=placed.need.total_bytes,
        tensor_parallel_size=model.tensor_parallel_size,
        host=wish.host,
        gpu_uuids=wish.gpu_uuids,
    )
    views: Mapping[str, tuple[GpuView, Sequence[InstanceView]]] = {
        uuid: (card.view, terms.rows(card.rows)) for uuid, card in found.items() if card.fresh
    }
    judgement = fit.judge(
        placed.need,
        request,
        states,
        views,
        time.time(),
        facts=placement.launch_facts(model),
        priority=rules.priority,
        minimum_residence_s=settings.RESIDENCE_S,
        max_harm=terms.max_harm,
    )
    return Room(judgement, placed.need, found)


def room_make(
    model: Model,
    *,
    actor: str,
    host: str | None = None,
    gpu_uuids: Sequence[str] | None = None,
    terms: Terms = CONFIRMED,
) -> Operation:
    """Carry out the plan for one more instance of ``model``, or for one that waits to be placed; then it starts there.

    Raises DoesNotFit, BrokerAway, or Conflict when it fits already, when every replica runs already, or while room is
    being made on the same card or for the same replica.
    """
    broker.require()
    rows = selectors.replicas_of(model)
    missing = [index for index in range(model.replicas) if index not in rows or not _has_place(rows[index])]
    if not missing:
        raise Conflict(f"{model} is launched already; ask for more replicas to have another instance of it.")
    missing = [index for index in missing if index not in _under_way(model)]
    if not missing:
        raise Conflict(_UNDER_WAY)
    asked = _asked(rows.get(missing[0]), host, gpu_uuids)
    room = room_judge(model, wish=Wish.of(model, asked), terms=terms)
    if room.judgement.verdict is fit.Verdict.FITS:
        raise Conflict(f"{model} fits already: launch it.")
    if room.judgement.verdict is fit.Verdict.DOES_NOT_FIT:
        raise DoesNotFit(room.judgement.sentence, **room.json())
    uuids = [gpu.uuid for gpu in room.judgement.gpus]
    steps = steps_waiting(room.steps())
    steps.append(
        {
            "kind": "launch",
            "gpu_uuids": uuids,
            "name": str(model),
            "reason": room.judgement.sentence,
            "state": "waiting",
        }
    )
    return _create(
        MAKE_ROOM,
        title=f"Make room for {model}",
        actor=actor,
        steps=steps,
        facts={
            "gpu_uuids": uuids,
            "host": room.judgement.gpus[0].host,
            "replica_index": missing[0],
            "asked": asked,
            "need_bytes": room.need.total_bytes,
            "round": 1,
            "free_before": {uuid: room.cards[uuid].view.free_bytes for uuid in uuids},
            "terms": terms.json(),
        },
        model=model,
        deadline_s=MAKE_ROOM_LIMIT_S + settings.START_LIMIT_S + settings.DOWNLOAD_LIMIT_S + _UNDO_S,
    )


def _asked(row: Instance | None, host: str | None, gpu_uuids: Sequence[str] | None) -> dict[str, Any]:
    """The wish that the newcomer keeps: where room is made binds this start, not a later one on another host."""
    if row is not None and row.is_live and not (host or gpu_uuids):
        return dict(row.placement_wish)
    return {"host": host, "gpu_uuids": list(gpu_uuids or ())}


def _has_place(row: Instance) -> bool:
    return row.is_live and row.state != InstanceState.PENDING


def room_wake_make(row: Instance, *, actor: str, terms: Terms = CONFIRMED) -> Operation:
    """Carry out the plan on the GPUs of a sleeper, then wake it there.

    Raises DoesNotFit, BrokerAway, or Conflict while room is being made on the same card.
    """
    broker.require()
    return _create(
        MAKE_ROOM,
        title=f"Make room to wake {row.model}",
        actor=actor,
        steps=steps_waiting(wake_steps(row, terms)),
        facts={"gpu_uuids": list(row.gpu_uuids), "round": ROUNDS, "need_bytes": 0, "terms": terms.json()},
        model=row.model,
        instance=row,
        deadline_s=MAKE_ROOM_LIMIT_S + settings.WAKE_LIMIT_S + _UNDO_S,
    )


def _create(kind: str, *, facts: dict[str, Any], **fields: Any) -> Operation:
    """Under a lock: two operators at once must not rearrange one card. Raises Conflict."""
    with transaction.atomic():
        transaction_lock("room")
        if cards_in_use() & set(facts["gpu_uuids"]):
            raise Conflict(_IN_USE)
        if "replica_index" in facts and facts["replica_index"] in _under_way(fields["model"]):
            raise Conflict(_UNDER_WAY)
        return operation_create(kind, facts=facts, **fields)


def _under_way(model: Model) -> set[int]:
    """Replicas of the model for which room is being made: on another card their victims would be for nothing."""
    rows = Operation.objects.filter(kind=MAKE_ROOM, model=model, state__in=OPEN).values_list("facts", flat=True)
    return {int(facts["replica_index"]) for facts in rows if "replica_index" in facts}


def tidy_plan(uuid: str, *, how: str) -> tuple[Plan, Card]:
    """What *trim all* or *shrink idle* would do on one card. Raises Conflict without a fresh reading."""
    card = cards([uuid]).get(uuid)
    if card is None or not card.fresh:
        raise Conflict("This GPU has no fresh reading; nothing can be planned on it now.")
    plan = trim_all(card.view, card.rows) if how == "trim" else shrink_idle(card.view, card.rows, time.time())
    return plan, card


def tidy(uuid: str, *, how: str, actor: str) -> Operation:
    """Carry out *trim all* or *shrink idle*. Raises Conflict when there is nothing to do, or the card is in use."""
    plan, card = tidy_plan(uuid, how=how)
    if not plan.steps:
        raise Conflict(plan.sentence)
    verb = "Trim every instance" if how == "trim" else "Shrink idle instances"
    facts = {"gpu_uuids": [uuid], "round": ROUNDS, "need_bytes": 0}
    title = f"{verb} on GPU {card.gpu.index} of {card.gpu.host.name}"
    return _create(
        TIDY, title=title, actor=actor, steps=steps_waiting(plan_steps([plan], [card])), facts=facts, deadline_s=300.0
    )
