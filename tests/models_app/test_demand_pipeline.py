"""Requests that ask in turn for two models of which one card holds one: over real simulated engines."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gpus_app.models import Host
from models_app import dispatch
from models_app.models import Instance, Operation
from models_app.services.plans import demand_room
from models_app.services.plans.demand import ACTOR
from models_app.services.plans.thrash import thrash_pairs
from models_app.states import InstanceState
from tests.builders import GIB
from tests.models_app.pump import Pump
from tests.models_app.test_memory_pipeline import Watch, _model, watch

__all__ = ["watch"]

S = InstanceState
pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.slow,
    pytest.mark.parametrize("fleet", [8 * GIB], indirect=True),
]


def _asked_for(pump: Pump, name: str) -> Instance:
    """As the router does: the wish, again and again, until the model serves."""
    pump.send(dispatch.DEMAND, name, queue=dispatch.CONTROL_QUEUE)
    looks = [0]

    def ready() -> bool:
        looks[0] += 1
        if looks[0] % 50 == 0:
            pump.send(dispatch.DEMAND, name, queue=dispatch.CONTROL_QUEUE)
        return Instance.objects.filter(model__served_model_name=name, state=S.READY).exists()

    pump.run(ready, limit_s=90)
    row = Instance.objects.select_related("model", "host").get(model__served_model_name=name, state=S.READY)
    answer = httpx.post(
        f"{row.base_url}/v1/completions",
        headers={"Authorization": f"Bearer {row.engine_token}"},
        json={"model": name, "prompt": "hello", "max_tokens": 4},
        timeout=30,
    )
    assert answer.status_code == 200
    return row


def test_two_models_take_turns_on_a_card_that_holds_one(
    fleet: Host, pump: Pump, watch: Watch, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.RESIDENCE_S = 0.0
    monkeypatch.setattr(demand_room, "IDLE_FOR_S", 0.0)
    for name in ("first", "second"):
        _model(name, fleet, on_demand=True, enable_sleep_mode=True)
    first = _asked_for(pump, "first")
    second = _asked_for(pump, "second")
    first.refresh_from_db()
    assert first.state == S.SLEEPING
    again = _asked_for(pump, "first")
    assert again.pk == first.pk  # woken, not started anew
    second.refresh_from_db()
    assert second.state in (S.SLEEPING, S.STOPPED)
    plans = Operation.objects.filter(created_by=ACTOR).order_by("pk")
    pump.run(lambda: all(not one.is_open for one in plans.all()))
    assert [one.state for one in plans] == ["succeeded", "succeeded"], [one.message for one in plans]
    assert [one.steps[-1]["kind"] for one in plans] == ["launch", "wake"]
    (pair,) = thrash_pairs()
    assert {model.served_model_name for model in pair.models} == {"first", "second"}
