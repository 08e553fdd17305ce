"""Keeping time, and going on whatever happens."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from gpus_app.sampler.loop import SamplerLoop
from gpus_app.sampler.observer import Look
from tests.gpus_app.sampler.records import record


class Parts:
    """Observer, publisher and recorder in one, on a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.took = 0.0
        self.lags: list[float] = []
        self.at: list[float] = []
        self.published = 0
        self.closed: list[str] = []
        self.fail = ""
        self.rows: list[Any] = []

    def look(self, *, lag_s: float) -> Look:
        self.at.append(self.now)
        self.lags.append(lag_s)
        self.now += self.took
        if self.fail == "look":
            raise RuntimeError("a reading nobody thought of")
        return Look(record(1_800_000_000.0 + len(self.at)), [], [])

    def publish(self, one: Any) -> bool:
        self.published += 1
        if self.fail == "publish":
            raise RuntimeError("a broker nobody thought of")
        return True

    def take(self, readings: Any, rows: Any, hints: Any) -> None:
        self.rows += rows

    def start(self) -> None:
        pass

    def close(self) -> None:
        self.closed.append("closed")


class Waits(threading.Event):
    """Instead of waiting, moves the clock."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts = parts

    def wait(self, timeout: float | None = None) -> bool:
        self.parts.now += timeout or 0.0
        return self.is_set()


@pytest.fixture
def parts() -> Parts:
    return Parts()


def make(parts: Parts) -> SamplerLoop:
    loop = SamplerLoop(parts, parts, parts, clock=lambda: parts.now)  # type: ignore[arg-type]
    loop._end = Waits(parts)
    return loop


def test_looks_are_a_second_apart_however_long_they_take(parts: Parts) -> None:
    parts.took = 0.3
    make(parts).run(looks=50)
    assert parts.at == [pytest.approx(100.0 + n) for n in range(50)]
    assert max(parts.lags) == pytest.approx(0.0, abs=1e-6)


def test_a_look_that_takes_too_long_does_not_bunch_the_next_ones(parts: Parts) -> None:
    loop = make(parts)
    parts.took = 3.7
    loop.run(looks=1)
    parts.took = 0.0
    loop = make(parts)
    parts.now = 200.0
    loop.run(looks=3)
    assert [round(b - a, 3) for a, b in zip(parts.at[1:], parts.at[2:], strict=False)] == [1.0, 1.0]


def test_lost_seconds_are_left_out_and_the_beat_is_kept(parts: Parts) -> None:
    loop = make(parts)
    slow = iter([0.1, 5.25, 0.1, 0.1])
    original = parts.look

    def look(*, lag_s: float) -> Look:
        parts.took = next(slow)
        return original(lag_s=lag_s)

    parts.look = look  # type: ignore[method-assign]
    loop.run(looks=4)
    assert parts.at == [pytest.approx(t) for t in (100.0, 101.0, 106.25, 107.0)]
    assert parts.lags[2] == pytest.approx(0.25)


@pytest.mark.parametrize("fail", ["look", "publish"])
def test_a_failure_is_logged_and_the_next_look_made(parts: Parts, fail: str, caplog: pytest.LogCaptureFixture) -> None:
    parts.fail = fail
    with caplog.at_level(logging.ERROR):
        make(parts).run(looks=3)
    assert len(parts.at) == 3 and len(caplog.records) == 3


def test_stopping_closes_everything_and_writes_what_there_is(parts: Parts) -> None:
    loop = make(parts)
    original = parts.look

    def look(*, lag_s: float) -> Look:
        if len(parts.at) == 2:
            loop.stop()
        return original(lag_s=lag_s)

    parts.look = look  # type: ignore[method-assign]
    loop.run()
    assert len(parts.at) == 3 and len(parts.closed) == 3
    assert sorted(row.resolution_s for row in parts.rows) == [10, 60]
