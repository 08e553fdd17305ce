"""Readings come from the broker, and from the database when the broker is away or does not reach back far enough."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gpus_app import broker
from gpus_app.models import Gpu, GpuSample
from gpus_app.sampler.publisher import Publisher
from gpus_app.selectors import history, hosts_with_gpus, latest, latest_all
from tests.builders import make_gpu, make_host
from tests.gpus_app.sampler.records import GIB, gpu_part, record


def sample(gpu: Gpu, ago_s: float, *, resolution_s: int = 10, **values: Any) -> GpuSample:
    at = datetime.now(UTC) - timedelta(seconds=ago_s)
    share = {"id": 1, "name": "qwen", "replica": 0, "baseline": GIB, "used": GIB, "prealloc": 0, "limit": 8 * GIB}
    defaults: dict[str, Any] = {"used_bytes": 5 * GIB, "instances": [share]}
    return GpuSample.objects.create(gpu=gpu, at=at, resolution_s=resolution_s, **(defaults | values))


@pytest.fixture
def away(settings: Any) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"


@pytest.fixture
def gpu(db: None) -> Gpu:
    return make_gpu(host=make_host(name="host-a"), uuid="GPU-a", total_bytes=80 * GIB)


def publish(url: str, *records: Any) -> None:
    publisher = Publisher(url)
    try:
        for one in records:
            assert publisher.publish(one)
    finally:
        publisher.close()


def test_the_newest_record_has_its_age_and_source(gpu: Gpu, valkey: str) -> None:
    publish(valkey, record(time.time() - 3))
    found = latest("host-a")
    assert found is not None and found["source"] == "broker" and 2 < found["age_s"] < 60
    assert found["gpus"][0]["used"] == 5 * GIB


def test_a_host_without_readings_has_none(gpu: Gpu, valkey: str) -> None:
    assert latest("host-a") is None and latest_all() == {}


def test_each_host_has_its_own_record(valkey: str, db: None) -> None:
    """SZ-128: two hosts, each with real data."""
    for name in ("host-a", "host-b"):
        make_host(name=name)
        publish(valkey, record(time.time(), gpu_part(uuid=f"GPU-{name}"), host=name))
    found = latest_all()
    assert {name: one["gpus"][0]["uuid"] for name, one in found.items()} == {
        "host-a": "GPU-host-a",
        "host-b": "GPU-host-b",
    }


def test_with_the_broker_away_the_newest_means_are_shown_as_such(gpu: Gpu, away: None) -> None:
    sample(gpu, 40, used_bytes=GIB)
    sample(gpu, 20)
    found = latest("host-a")
    assert found is not None and found["source"] == "database" and 9 < found["age_s"] < 60
    (part,) = found["gpus"]
    assert (part["uuid"], part["used"], part["free"]) == ("GPU-a", 5 * GIB, 75 * GIB)
    assert part["other"] == 3 * GIB and part["instances"][0]["limit"] == 8 * GIB


def test_old_means_are_not_the_present(gpu: Gpu, away: None) -> None:
    sample(gpu, 600)
    assert latest("host-a") is None


def test_many_cards_cost_two_queries_with_the_broker_away(away: None, db: None, django_assert_num_queries: Any) -> None:
    host = make_host(name="host-a")
    for index in range(8):
        sample(make_gpu(host=host, uuid=f"GPU-{index}", index=index), 20)
    with django_assert_num_queries(2):
        found = latest_all(["host-a"])
    assert len(found["host-a"]["gpus"]) == 8


def test_the_last_minutes_are_single_seconds(gpu: Gpu, valkey: str) -> None:
    now = time.time()
    publish(valkey, *(record(now - n) for n in (3, 2, 1)))
    points = history("GPU-a", 10)
    assert [round(now - point["t"]) for point in points] == [3, 2, 1]
    assert {point["resolution_s"] for point in points} == {1}
    assert points[-1]["instances"][0]["limit"] == 8 * GIB


def test_what_the_broker_does_not_reach_back_to_comes_from_the_database(gpu: Gpu, valkey: str) -> None:
    """It was restarted a moment ago: the chart has no hole."""
    for ago in (200, 100, 50):
        sample(gpu, ago)
    publish(valkey, record(time.time()))
    points = history("GPU-a", 300)
    assert [point["resolution_s"] for point in points] == [10, 10, 10, 1]
    assert [point["t"] for point in points] == sorted(point["t"] for point in points)


def test_with_the_broker_away_history_comes_from_the_database(gpu: Gpu, away: None) -> None:
    sample(gpu, 100)
    (point,) = history("GPU-a", 300)
    assert point["resolution_s"] == 10 and point["used"] == 5 * GIB and point["total"] == 80 * GIB


def test_long_windows_are_tens_for_a_day_and_minutes_beyond(gpu: Gpu, valkey: str) -> None:
    sample(gpu, 7200)
    sample(gpu, 7200, resolution_s=60)
    assert {point["resolution_s"] for point in history("GPU-a", 86400)} == {10}
    assert {point["resolution_s"] for point in history("GPU-a", 7 * 86400)} == {60}


def test_a_chart_gets_no_more_points_than_it_can_draw(gpu: Gpu, valkey: str) -> None:
    now = time.time()
    publish(valkey, *(record(now - n) for n in range(50, 0, -1)))
    points = history("GPU-a", 60, max_points=20)
    assert len(points) <= 20 and round(now - points[-1]["t"]) == 1


def test_an_unknown_card_has_no_history(valkey: str, db: None) -> None:
    assert history("GPU-none", 300) == []


def test_the_client_gives_up_quickly_and_does_not_try_again(away: None) -> None:
    began = time.monotonic()
    with pytest.raises(broker.BrokerErrors):
        broker.client().ping()
    assert time.monotonic() - began < 10


def test_hosts_come_with_cards_and_policies_in_three_queries(db: None, django_assert_num_queries: Any) -> None:
    for name in ("a", "b", "c"):
        host = make_host(name=name)
        for index in range(4):
            make_gpu(host=host, uuid=f"{name}{index}", index=index)
    with django_assert_num_queries(3):
        for host in hosts_with_gpus():
            for gpu in host.gpus.all():
                assert gpu.host_id == host.pk
                getattr(gpu, "policy", None)
