"""Idle rules: who goes to sleep, who stops, who stays."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from redis import Redis

from gpus_app.models import Gpu
from models_app.models import Instance
from models_app.services.lifecycle.idle import idle_check
from models_app.services.model_check import judge
from models_app.states import DesiredState, InstanceState
from tests.builders import make_gpu, make_instance, make_model
from tests.models_app.readings import Readings

S = InstanceState
pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("sent")]


@pytest.fixture
def gpu() -> Gpu:
    return make_gpu()


def _ready(gpu: Gpu, readings: Readings, *, since_s: float = 100, part: Any = None, **rules: Any) -> Instance:
    model = make_model(**({"idle_sleep_after_s": 60, "enable_sleep_mode": True} | rules))
    row = make_instance(model=model, gpus=[gpu], ready_at=timezone.now() - timedelta(seconds=since_s))
    readings.part(row, **(part or {}))
    return row


def _after(row: Instance) -> tuple[str, str]:
    row.refresh_from_db()
    return row.state, row.desired_state


STAYS = (S.READY, DesiredState.RUNNING)


def test_idle_for_long_enough_goes_to_sleep(gpu: Gpu, readings: Readings) -> None:
    row = _ready(gpu, readings)
    idle_check()
    assert _after(row) == (S.DRAINING, DesiredState.SLEEPING)


def test_model_without_sleep_mode_that_loads_on_demand_is_stopped(gpu: Gpu, readings: Readings) -> None:
    row = _ready(gpu, readings, enable_sleep_mode=False, on_demand=True)
    idle_check()
    assert _after(row) == (S.DRAINING, DesiredState.STOPPED)


def test_model_that_could_not_come_back_stays(gpu: Gpu, readings: Readings) -> None:
    row = _ready(gpu, readings, enable_sleep_mode=False)
    idle_check()
    assert _after(row) == STAYS


def test_pinned_model_stays(gpu: Gpu, readings: Readings) -> None:
    row = _ready(gpu, readings, pinned=True)
    idle_check()
    assert _after(row) == STAYS


def test_not_yet_long_enough(gpu: Gpu, readings: Readings) -> None:
    row = _ready(gpu, readings, since_s=50)
    idle_check()
    assert _after(row) == STAYS


@pytest.mark.parametrize("part", [{"running": 1}, {"waiting": 1}, {"running": None, "waiting": None}])
def test_at_work_or_too_busy_to_tell_stays(gpu: Gpu, readings: Readings, part: Any) -> None:
    row = _ready(gpu, readings, part=part)
    idle_check()
    assert _after(row) == STAYS


def test_without_a_reading_nobody_is_idle(gpu: Gpu, readings: Readings) -> None:
    row = _ready(gpu, readings)
    readings.age_s = 60.0
    idle_check()
    assert _after(row) == STAYS


def test_over_two_cards_both_must_say_so(gpu: Gpu, readings: Readings) -> None:
    second = make_gpu(index=1)
    model = make_model(idle_sleep_after_s=60, enable_sleep_mode=True, tensor_parallel_size=2)
    row = make_instance(model=model, gpus=[gpu, second], ready_at=timezone.now() - timedelta(seconds=100))
    readings.part(row)
    readings.error[second.uuid] = "GPU is lost"
    idle_check()
    assert _after(row) == STAYS
    readings.error.clear()
    idle_check()
    assert _after(row) == (S.DRAINING, DesiredState.SLEEPING)


def test_clock_begins_anew_with_each_request(gpu: Gpu, readings: Readings, valkey: str) -> None:
    row = _ready(gpu, readings, part={"gen_tokens": 5})
    with Redis.from_url(valkey) as client:
        client.hset("sardeenz:active:tokens", str(row.pk), 3)
    idle_check()
    assert _after(row) == STAYS


def test_idle_rule_needs_a_way_back() -> None:
    fields = {"served_model_name": "a", "source": "catalogue", "model": "Qwen/Qwen3-0.6B", "idle_sleep_after_s": 60}
    assert "idle_sleep_after_s" in judge(fields).errors
    assert not judge(fields | {"on_demand": True}).errors
    assert not judge(fields | {"enable_sleep_mode": True}).errors
