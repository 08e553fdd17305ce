"""Where old and new do not fit side by side: the old one stops first and starts there. It is away meanwhile.

What is wanted stays wanted, so the start follows from the end like that of a restart, whatever is killed in between.
"""

from __future__ import annotations

from collections.abc import Sequence

from django.db import transaction

from models_app import broker, transitions
from models_app.errors import Conflict, DoesNotFit
from models_app.models import Instance, Model, Operation
from models_app.services import specs
from models_app.services.audit import audited
from models_app.services.lifecycle.host_loss import require_thaw
from models_app.services.lifecycle.launch import wish_elsewhere
from models_app.services.lifecycle.stop import instance_stop_begin
from models_app.services.locks import instance_locked
from models_app.services.memory import placement
from models_app.services.plans.operations import OPEN
from models_app.services.plans.rollout import REPLACE, REPLACEABLE
from models_app.states import DesiredState


def instance_move_stopped(
    instance: Instance, *, actor: str, host: str | None = None, gpu_uuids: Sequence[str] | None = None
) -> Instance:
    """Drain, stop, and start again on the GPUs or the host that are named, with the saved options.

    Raises before anything is ended: DoesNotFit (its own bytes count as free), Conflict, InvalidInput, BrokerAway.
    """
    if not host and not gpu_uuids:
        raise Conflict("Say where to: a host, or GPUs.")
    with audited(actor, "instance.move", str(instance), "stopped first"):
        wish = wish_elsewhere(instance.model, host=host, gpu_uuids=gpu_uuids)
        require_thaw()
        broker.require()
        with transaction.atomic():
            model = Model.objects.select_for_update().get(pk=instance.model_id)
            row = instance_locked(instance.pk)
            if row.state not in REPLACEABLE:
                raise Conflict(f"It is {row.state}: only an instance that serves or sleeps can be moved.")
            if Operation.objects.filter(kind=REPLACE, model=model, state__in=OPEN).exists():
                raise Conflict(f"An instance of {model} is being moved or renewed already; wait for it, or cancel it.")
            found = placement.place(model, wish, without=row.pk, unusable=specs.unusable_hosts(model))
            if not found.decision.gpus:
                raise DoesNotFit(placement.refusal(found), **found.facts)
            asked = {"host": wish.host, "gpu_uuids": list(wish.gpu_uuids), "elsewhere": True}
            wanted = DesiredState.RUNNING if row.desired_state == DesiredState.STOPPED else row.desired_state
            transitions.report(row.pk, desired_state=wanted, restart_count=0, placement_wish=asked)
            instance_stop_begin(row, reason="Move: it stops first, then starts there.", actor=actor)
        instance.refresh_from_db()
    return instance
