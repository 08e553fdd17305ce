"""A request asks for a model that is asleep or not there: wake it or start it, if its model allows that."""

from __future__ import annotations

import logging

from models_app import selectors
from models_app.errors import SardeenzError
from models_app.models import Model
from models_app.services.launch import model_launch
from models_app.services.sleep import instance_wake
from models_app.states import InstanceState

log = logging.getLogger(__name__)

ACTOR = "policy:on-demand"


def model_demand(served_model_name: str) -> None:
    """Wake a sleeping replica, else launch one, when the model is ``on_demand``; otherwise do nothing. Idempotent.

    ``served_model_name`` may be an alias. A replica that comes up already is waited for, not doubled.
    """
    models = Model.objects.select_related("host")
    model = (
        models.filter(served_model_name=served_model_name).first()
        or models.filter(aliases__name=served_model_name).first()
    )
    if model is None or not model.on_demand:
        return
    rows = list(selectors.replicas_of(model).values())
    states = {row.state for row in rows}
    if states & {InstanceState.READY, InstanceState.STARTING, InstanceState.SCHEDULED, InstanceState.PENDING}:
        return
    try:
        sleeper = next((row for row in rows if row.state == InstanceState.SLEEPING), None)
        if sleeper is not None:
            instance_wake(sleeper, actor=ACTOR)
        else:
            model_launch(model, actor=ACTOR)
    except SardeenzError as exc:
        log.warning("%s is asked for, but cannot be brought up: %s", model, exc.message)
