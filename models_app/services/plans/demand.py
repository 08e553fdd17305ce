"""A request asks for a model that is asleep or not there: wake it or start it, if its model allows that.

What is missing to it is taken from those who are idle and come back by a request themselves, by the rules of memory
policies. The router repeats the wish while somebody waits, so everything here may run at any time and twice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from django.db import transaction

from models_app import events, selectors, transitions
from models_app.errors import BrokerAway, Conflict, DoesNotFit, SardeenzError
from models_app.models import Instance, Model, Operation
from models_app.services.lifecycle.launch import instance_place, model_launch
from models_app.services.lifecycle.sleep import instance_wake
from models_app.services.memory import placement
from models_app.services.memory.placement import Wish
from models_app.services.plans import demand_room
from models_app.services.plans.operations import OPEN
from models_app.services.plans.room_steps import MAKE_ROOM
from models_app.services.plans.thrash import ON_DEMAND
from models_app.states import DesiredState, InstanceState

log = logging.getLogger(__name__)
S = InstanceState
_UP_SOON = frozenset({S.PENDING, S.SCHEDULED, S.STARTING})

ACTOR = ON_DEMAND
#: What serves, or is about to: a request waits for it.
_COMING = frozenset({S.READY, S.STARTING, S.SCHEDULED})


def model_demand(served_model_name: str) -> None:
    """Wake a sleeping replica, else launch one, when the model is ``on_demand``; otherwise do nothing. Idempotent.

    ``served_model_name`` may be an alias. A replica that comes up already is waited for, not doubled, and so is room
    that is being made. Where there is no room, for one that waits to be placed too, it is made from idle models that a
    request brings back; where it cannot be made now but later, those who ask go on waiting; where it never can, they
    are told why.
    """
    models = Model.objects.select_related("host", "memory_policy")
    model = (
        models.filter(served_model_name=served_model_name).first()
        or models.filter(aliases__name=served_model_name).first()
    )
    if model is None or not model.on_demand:
        return
    rows = list(selectors.replicas_of(model).values())
    _keep_awake(rows)
    if any(row.state in _COMING for row in rows) or _is_under_way(model):
        _note(model, "", "")
        return
    if any(row.state == S.DRAINING and row.desired_state == DesiredState.SLEEPING for row in rows):
        # Calling it back now could leave an engine asleep that counts as ready; awake again is soon enough.
        _note(model, "waits", "It is going to sleep at this moment and wakes when it is there.")
        return
    try:
        _bring_up(model, rows)
    except BrokerAway as exc:
        log.warning("%s is asked for: %s", model, exc.message)
    except demand_room.Later as exc:
        _note(model, "waits", exc.message)
    except SardeenzError as exc:
        log.warning("%s is asked for, but cannot be brought up: %s", model, exc.message)
        _note(model, "refused", exc.message)
    else:
        _note(model, "", "")


def _keep_awake(rows: Sequence[Instance]) -> None:
    """One that starts anew, to go back to sleep as it did before it was lost, stays awake for those who ask."""
    for row in rows:
        if row.state in _UP_SOON and row.desired_state == DesiredState.SLEEPING:
            transitions.report(row.pk, expected=S(row.state), desired_state=DesiredState.RUNNING)


def _is_under_way(model: Model) -> bool:
    return Operation.objects.filter(kind=MAKE_ROOM, model=model, state__in=OPEN).exists()


def _bring_up(model: Model, rows: Sequence[Instance]) -> None:
    """Raises Later while waiting is of use, and the named error of what stands in the way otherwise."""
    sleeper = next((row for row in rows if row.state == S.SLEEPING), None)
    pending = next((row for row in rows if row.state == S.PENDING), None)
    failed = _lately_undone(model)
    if failed is not None and pending is None:
        raise Conflict(failed.message)
    try:
        if sleeper is not None:
            instance_wake(sleeper, actor=ACTOR)
        elif pending is not None:
            _place(model, pending, may_make_room=failed is None)
        else:
            model_launch(model, actor=ACTOR)
    except DoesNotFit:
        demand_room.make(model, sleeper, actor=ACTOR)


def _place(model: Model, row: Instance, *, may_make_room: bool) -> None:
    """One that waits, after a restart perhaps, while its bytes went to somebody else. Raises DoesNotFit."""
    if instance_place(row.pk) or not may_make_room:
        return
    found = placement.place(model, Wish.of(model, row.placement_wish), without=row.pk)
    if not found.decision.gpus:
        raise DoesNotFit(placement.refusal(found), **found.facts)


def _lately_undone(model: Model) -> Operation | None:
    """Room was made and it did not come up: not again at once, or its neighbours would pay for every request."""
    rows = Operation.objects.filter(kind=MAKE_ROOM, model=model, created_by=ACTOR, state=Operation.State.FAILED)
    row = rows.order_by("-ended_at").first()
    if row is None or row.ended_at is None or time.time() - row.ended_at.timestamp() > selectors.DEMAND_REFUSED_S:
        return None
    return row


def _note(model: Model, code: str, reason: str) -> None:
    """What routers and pages are told of the wish: ``waits``, ``refused``, or nothing, with when that began."""
    before = model.demand_facts
    if not code and not before:
        return
    now = time.time()
    since = before["since"] if before.get("code") == code and now - before.get("at", 0) < 300 else now
    facts = {"code": code, "reason": reason[:1000], "since": since, "at": now} if code else {}
    with transaction.atomic():
        Model.objects.filter(pk=model.pk).update(demand_facts=facts)
        events.publish_models_on_commit()
