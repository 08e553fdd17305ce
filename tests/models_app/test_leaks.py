"""Memory that grows without load: found in the means of the last hours, said once, shown until it ends."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from gpus_app.models import Gpu, GpuSample
from gpus_app.policies.base import MIB
from models_app import broker
from models_app.models import Instance
from models_app.presentation.attention import attention
from models_app.presentation.board import build_board
from models_app.services.memory.leaks import growth_of, growth_sentence, leaks_look
from tests.builders import GIB, make_attempt, make_gpu, make_instance

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def always_my_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "once_in", lambda *_: True)


@pytest.fixture
def row() -> Instance:
    return make_instance(gpus=[make_gpu()], ready_at=timezone.now() - timedelta(hours=10))


def _hours(row: Instance, *, grows: int, busy: bool = False, hours: float = 5, gpu: Gpu | None = None) -> None:
    """Minutes' means of the last hours in which its baseline grew by so many bytes an hour."""
    gpu = gpu or Gpu.objects.get(uuid=row.gpu_uuids[0])
    begin = timezone.now() - timedelta(hours=hours)
    GpuSample.objects.bulk_create(
        _sample(row, gpu, begin + timedelta(minutes=minute), 4 * GIB + grows * minute // 60, busy)
        for minute in range(round(hours * 60))
    )


def _sample(row: Instance, gpu: Gpu, at: datetime, baseline: int, busy: bool) -> GpuSample:
    part: dict[str, Any] = {"id": row.pk, "baseline": baseline, "used": GIB, "prealloc": 0, "limit": 8 * GIB}
    return GpuSample(gpu=gpu, at=at, resolution_s=60, used_bytes=baseline + GIB, instances=[part | {"busy": busy}])


def test_growth_names_the_instance_since_when_how_fast_and_what_next(row: Instance, valkey: str) -> None:
    _hours(row, grows=300 * MIB)
    assert leaks_look() == 1
    row.refresh_from_db()
    assert growth_of(row)["bytes_per_hour"] == pytest.approx(300 * MIB, rel=0.1)
    event = row.events.get(kind="leak")
    assert "300 MiB an hour" in event.reason or "0.3 GiB an hour" in event.reason
    assert "Trim it" in event.reason and "restart it" in event.reason
    (item,) = [one for one in attention(build_board("operator"), may_operate=True) if "grows" in one.title]
    assert row.model.served_model_name in item.title
    assert item.since is not None and timezone.now() - item.since > timedelta(hours=4)
    assert item.acts == (("Restart", f"/instances/{row.pk}/restart/", True),)


def test_it_is_said_once_and_ends_with_the_growth(row: Instance) -> None:
    _hours(row, grows=300 * MIB)
    for _ in range(2):
        leaks_look()
    assert row.events.filter(kind="leak").count() == 1
    GpuSample.objects.all().delete()
    _hours(row, grows=0)
    assert leaks_look() == 0
    row.refresh_from_db()
    assert row.memory_growth == {}
    assert row.events.filter(kind="leak").count() == 2


def test_growth_of_an_earlier_start_is_not_shown(row: Instance) -> None:
    _hours(row, grows=300 * MIB)
    leaks_look()
    Instance.objects.filter(pk=row.pk).update(attempt=make_attempt(instance=row, number=2))
    row.refresh_from_db()
    assert growth_of(row) == {}


@pytest.mark.parametrize("fields", [{"busy": True}, {"grows": 10 * MIB}, {"hours": 1.0}])
def test_load_small_growth_and_short_times_say_nothing(row: Instance, fields: dict[str, Any]) -> None:
    _hours(row, **({"grows": 300 * MIB} | fields))
    assert leaks_look() == 0
    assert not row.events.filter(kind="leak").exists()


def test_first_minutes_of_a_start_are_warm_up() -> None:
    row = make_instance(gpus=[make_gpu()], ready_at=timezone.now() - timedelta(hours=2))
    _hours(row, grows=600 * MIB, hours=2)
    assert leaks_look() == 0


def test_of_several_gpus_the_one_where_it_grows_is_named() -> None:
    cards = [make_gpu(), make_gpu(index=1)]
    row = make_instance(gpus=cards, ready_at=timezone.now() - timedelta(hours=10))
    _hours(row, grows=0, gpu=cards[0])
    _hours(row, grows=300 * MIB, gpu=cards[1])
    leaks_look()
    row.refresh_from_db()
    assert growth_of(row)["gpu_uuid"] == cards[1].uuid


def test_sentence_says_how_long_the_card_lasts(row: Instance) -> None:
    since = 1_800_000_000.0
    row.memory_growth = {
        "attempt": row.attempt_id, "since": since, "bytes_per_hour": GIB // 2, "grown_bytes": 2 * GIB
    }  # fmt: skip
    text = growth_sentence(row, free_bytes=10 * GIB, now=since + 4 * 3600)
    assert "2.0 GiB more than at 15 Jan 08:00 UTC, 0.5 GiB an hour" in text
    assert "10.0 GiB are free on its GPU, enough for 20 h (4 h so far)" in text
