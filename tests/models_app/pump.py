"""Workers in this process: what services enqueue is run here, in order of its time, until a condition holds.

The engines are real simulated processes under real guardians; only Celery is left out. ``Pump.run`` is bounded.
"""

from __future__ import annotations

import heapq
import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import current_app

from models_app import dispatch
from models_app.engines import procfs


def kill(pid: int) -> None:
    """SIGKILL, and until it is dead: on a busy machine the signal takes longer to arrive than the next look."""
    ticks = procfs.start_ticks(pid)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while procfs.is_alive(pid, ticks):
        assert time.monotonic() < deadline
        time.sleep(0.005)


class Pump:
    """Messages by due time. ``lose``: names of messages that get lost, as with a broker that was away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import models_app.tasks  # noqa: F401 - registers the tasks

        self.lose: set[str] = set()
        self.sent: list[tuple[str, tuple[Any, ...]]] = []
        self._queue: list[tuple[float, int, str, tuple[Any, ...]]] = []
        self._order = itertools.count()
        monkeypatch.setattr(dispatch, "send", self.send)

    def send(self, name: str, *args: Any, queue: str, countdown: float | None = None, **_: Any) -> None:
        self.sent.append((name, args))
        if name not in self.lose:
            heapq.heappush(self._queue, (time.monotonic() + (countdown or 0), next(self._order), name, args))

    def drop(self) -> None:
        """Every message on its way is lost."""
        self._queue.clear()

    def run(self, until: Callable[[], bool], *, limit_s: float = 30.0) -> None:
        """Work off messages until the condition holds; what takes longer than ``limit_s`` hangs."""
        deadline = time.monotonic() + limit_s
        while not until():
            assert time.monotonic() < deadline, f"still waiting; last messages: {self.sent[-5:]}"
            if self._queue and self._queue[0][0] <= time.monotonic():
                _, _, name, args = heapq.heappop(self._queue)
                current_app.tasks[name](*args)
            else:
                time.sleep(0.02)

    def settle(self, seconds: float = 0.5) -> None:
        """Work off what is due within the next moments."""
        end = time.monotonic() + seconds
        self.run(lambda: time.monotonic() > end, limit_s=seconds + 30)
