"""A card whose pages are gone: named are who waits and who holds them."""

from __future__ import annotations

from typing import Any

import pytest

from models_app.models import Instance
from models_app.presentation.attention import attention
from models_app.presentation.board import build_board
from models_app.presentation.item import Item
from tests.builders import GIB, make_gpu, make_instance, make_model
from tests.models_app.readings import Readings

pytestmark = pytest.mark.django_db


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, readings: Readings) -> tuple[Instance, Instance]:
    monkeypatch.setattr("models_app.presentation.board.latest_all", readings.latest_all)
    gpu = make_gpu()
    names = ("hungry", "holder")
    hungry, holder = (make_instance(model=make_model(served_model_name=name), gpus=[gpu]) for name in names)
    readings.part(hungry, baseline=4 * GIB, used=2 * GIB, limit=30 * GIB, running=1, waiting=5, preemptions=17)
    readings.part(holder, baseline=4 * GIB, used=63 * GIB, limit=63 * GIB)
    readings.other[gpu.uuid] = 3 * GIB
    return hungry, holder


def _pressure() -> list[Item]:
    return [item for item in attention(build_board("operator"), may_operate=True) if "no page left" in item.title]


def test_pool_that_a_neighbour_has_emptied_names_who_holds_the_memory(pair: Any) -> None:
    """Preemptions rise and nothing crashes: an operator must hear why."""
    (item,) = _pressure()
    assert "hungry" in item.title
    assert "5 requests wait (17 preempted" in item.text and "28.0 GiB more" in item.text
    assert "holder 67.0, hungry 6.0, other processes 3.0" in item.text


@pytest.mark.parametrize(
    ("hungry", "why"),
    [
        ({"waiting": 0}, "nobody waits"),
        ({"limit": 2 * GIB}, "its own limit is what holds it"),
    ],
)
def test_no_alarm_without_need(pair: Any, readings: Readings, hungry: dict[str, Any], why: str) -> None:
    readings.part(pair[0], **hungry)
    assert _pressure() == [], why


def test_no_alarm_while_the_card_has_pages(pair: Any, readings: Readings) -> None:
    readings.part(pair[1], used=50 * GIB)
    assert _pressure() == []
