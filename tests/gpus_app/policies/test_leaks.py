"""Growth without load is told from caches, first batches and noise."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpus_app.policies.base import GIB, MIB
from gpus_app.policies.leaks import LEAST_BYTES, Point, leak

MINUTE = 60.0


def hours(count: float, *, baseline: int = 4 * GIB, footprint: int = GIB, grows: int = 0, pool: int = 0) -> list[Point]:
    """Idle minutes in which baseline and pool grow by so many bytes an hour."""
    return [
        Point(minute * MINUTE, baseline + round(grows * minute / 60), footprint + round(pool * minute / 60), idle=True)
        for minute in range(round(count * 60))
    ]


@pytest.mark.parametrize("rates", [{"grows": 300 * MIB}, {"pool": 300 * MIB}])
def test_growth_without_load_is_told_with_its_rate(rates: dict[str, int]) -> None:
    """Beside the pool (pages mapped and forgotten) and in it (pages never given back)."""
    found = leak(hours(4, **rates))
    assert found is not None
    assert found.bytes_per_hour == pytest.approx(300 * MIB, rel=0.1)
    assert found.since <= 15 * MINUTE


def test_growth_that_began_late_is_dated() -> None:
    """In a time that begins with twenty level minutes, as a window over a day of them would be cut."""
    later = hours(1 / 3) + [
        Point(point.t + 1200, point.baseline_bytes, point.footprint_bytes, idle=True)
        for point in hours(6, grows=400 * MIB)
    ]
    found = leak(later)
    assert found is not None and found.since == pytest.approx(1200, abs=20 * MINUTE)


@pytest.mark.parametrize("minutes", [0, 1, 11, 90])
def test_less_than_two_idle_hours_tell_nothing(minutes: int) -> None:
    assert leak(hours(minutes / 60, grows=GIB)) is None


def test_small_growth_is_not_worth_a_word() -> None:
    assert leak(hours(4, grows=LEAST_BYTES // 5)) is None


def test_step_of_the_first_large_batch_is_no_leak() -> None:
    points = hours(2) + [
        Point(point.t + 7200, point.baseline_bytes + 2 * GIB, point.footprint_bytes, idle=True) for point in hours(2)
    ]
    assert leak(points) is None


def test_cache_that_fills_under_load_is_no_leak() -> None:
    """What the pool holds after a load is its prefix cache; only what comes without load counts."""
    points = []
    for minute in range(360):
        busy = minute % 20 < 5
        points.append(Point(minute * MINUTE, 4 * GIB, GIB + minute // 20 * 100 * MIB, idle=not busy))
    assert leak(points) is None


def test_leak_by_each_request_shows_beside_the_pool() -> None:
    """kvcached issue 364: pages stay mapped that neither count as used nor as reserved."""
    points = []
    for minute in range(360):
        busy = minute % 20 < 5
        points.append(Point(minute * MINUTE, 4 * GIB + minute // 20 * 100 * MIB, GIB, idle=not busy))
    found = leak(points)
    assert found is not None and found.bytes_per_hour == pytest.approx(300 * MIB, rel=0.15)


def test_time_under_load_tells_nothing_of_itself() -> None:
    points = [Point(point.t, point.baseline_bytes, point.footprint_bytes, idle=False) for point in hours(5, grows=GIB)]
    assert leak(points) is None


@settings(max_examples=40)
@given(st.lists(st.integers(-400 * MIB, 400 * MIB), min_size=70, max_size=120))
def test_what_goes_up_and_comes_down_again_is_none(noise: list[int]) -> None:
    there_and_back = [*noise, *reversed(noise)]
    points = [Point(i * MINUTE, 4 * GIB + wander, GIB, idle=True) for i, wander in enumerate(there_and_back)]
    assert leak(points) is None


@given(st.integers(260, 3000), st.integers(150, 500), st.randoms(use_true_random=False))
def test_steady_growth_is_found_through_noise(per_hour_mib: int, minutes: int, random) -> None:
    points = [
        Point(i * MINUTE, 4 * GIB + per_hour_mib * MIB * i // 60 + random.randrange(4 * MIB), GIB, idle=True)
        for i in range(minutes)
    ]
    found = leak(points)
    assert found is not None
    assert found.bytes_per_hour == pytest.approx(per_hour_mib * MIB, rel=0.25)
