"""Room for one who sleeps: the plan on its own GPUs, and the last step, in which it wakes."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.utils import timezone

from gpus_app.policies.base import Plan
from gpus_app.policies.make_room import make_room
from models_app.errors import Conflict, DoesNotFit
from models_app.models import Instance, InstanceEvent, MemoryPolicy, Operation
from models_app.services.lifecycle.sleep import instance_wake, room_to_wake
from models_app.services.memory.cards import Card, cards
from models_app.services.plans.operations import Progress
from models_app.services.plans.plan_steps import plan_steps
from models_app.services.plans.room_terms import Terms
from models_app.services.plans.room_undo import undo_begin
from models_app.states import TERMINAL, DesiredState, InstanceState

S = InstanceState
#: Seconds that freed bytes may take to show up in NVML.
_BYTES_LIMIT_S = 20.0
#: Seconds that a newcomer may wait for its place in the room that was made for it.
PLACED_LIMIT_S = 20.0


def wake_plans(row: Instance, terms: Terms, found: dict[str, Card], now: float) -> list[Plan]:
    """One plan for each GPU of a sleeper after which it can wake there. Raises Conflict without fresh readings."""
    rules = getattr(row.model, "memory_policy", None) or MemoryPolicy(model=row.model)
    plans = []
    for uuid in row.gpu_uuids:
        card = found.get(uuid)
        if card is None or not card.fresh:
            raise Conflict("Its GPU has no fresh reading; nothing can be planned on it now.")
        own = sum(one.resident_bytes for one in card.rows if one.id == row.pk)
        view = replace(card.view, free_bytes=(card.view.free_bytes or 0) + own)  # what it holds asleep is its own
        others = [one for one in card.rows if one.id != row.pk]
        plans.append(
            make_room(
                view,
                terms.rows(others),
                row.reserved_bytes,
                now,
                priority=rules.priority,
                minimum_residence_s=settings.RESIDENCE_S,
                max_harm=terms.max_harm,
            )
        )
    return plans


def wake_steps(row: Instance, terms: Terms) -> list[dict[str, Any]]:
    """What has to be done before a sleeper can wake, and the waking itself. Raises DoesNotFit, Conflict."""
    found = cards(row.gpu_uuids)
    plans = wake_plans(row, terms, found, time.time())
    refused = [plan for plan in plans if not plan.feasible]
    if refused:
        raise DoesNotFit(refused[0].sentence)
    wake = {
        "kind": "wake",
        "gpu_uuids": list(row.gpu_uuids),
        "instance_id": row.pk,
        "name": str(row.model),
        "reason": "It wakes where it sleeps. " + " ".join(plan.sentence for plan in plans),
    }
    return [*plan_steps(plans, found.values()), wake]


def came_up(row: Instance, operation: Operation) -> bool:
    """Whether the newcomer serves, or has since the plan began: what became of it later is no fault of the plan."""
    if row.state == S.READY:
        return True
    ups = InstanceEvent.objects.filter(instance=row, kind="state", to_state=S.READY, at__gte=operation.created_at)
    return ups.exists()


def is_lost(row: Instance | None) -> bool:
    """Whether a newcomer that has not served will not in this room: it ended, or waits where there is none for it."""
    if row is None or row.state in TERMINAL:
        return True
    return row.state == S.PENDING and timezone.now() - row.state_since > timedelta(seconds=PLACED_LIMIT_S)


def wake_step(operation: Operation, step: dict[str, Any], *, share: float) -> Progress:
    """Verify the room, wake, then wait until it is ready. ``share``: of the plan, what is done already."""
    steps: list[dict[str, Any]] = operation.steps
    row = Instance.objects.select_related("model", "host", "attempt").filter(pk=step["instance_id"]).first()
    if row is not None and came_up(row, operation):
        step |= {"state": "verified", "message": row.reason}
        return Progress(done=True, message=f"{row.model} is awake.", progress=1.0, steps=steps)
    if row is None or is_lost(row):
        return undo_begin(operation, f"It did not wake: {row.reason if row else 'it is gone'}")
    if row.state != S.SLEEPING or row.desired_state == DesiredState.RUNNING:
        step |= {"state": "running"}
        return Progress(phase="wake", message=f"{row.model} wakes.", progress=share, steps=steps)
    if step["state"] == "running":
        return undo_begin(operation, f"It did not wake: {row.reason}")
    short = room_to_wake(row)
    if not short:
        instance_wake(row, actor=operation.created_by)
        step |= {"state": "running", "started_at": time.time()}
        return Progress(phase="wake", message=f"The room is there; {row.model} wakes.", progress=share, steps=steps)
    waiting_since = float(operation.facts.get("verify_since") or time.time())
    if time.time() - waiting_since >= _BYTES_LIMIT_S:
        return undo_begin(operation, f"The bytes did not come back: {short}")
    message = f"Waits for the driver to give the bytes back. {short}"
    return Progress(phase="verify", message=message, steps=steps, facts={"verify_since": waiting_since})
