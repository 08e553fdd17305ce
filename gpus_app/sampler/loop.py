"""Keeps time: one look a second on the monotonic clock, without drift, until it is told to end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from gpus_app.sampler.observer import Observer
from gpus_app.sampler.publisher import Publisher
from gpus_app.sampler.recorder import Recorder
from gpus_app.sampler.rollups import RollUps

log = logging.getLogger(__name__)

PERIOD_S = 1.0


class SamplerLoop:
    """Observer, publisher, roll-ups and recorder in step. ``stop`` may be called from a signal handler."""

    def __init__(
        self,
        observer: Observer,
        publisher: Publisher,
        recorder: Recorder,
        *,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observer = observer
        self._publisher = publisher
        self._recorder = recorder
        self._rollups = RollUps()
        self._period_s = period_s
        self._clock = clock
        self._end = threading.Event()
        self.looks = 0

    def stop(self) -> None:
        self._end.set()

    def run(self, looks: int | None = None) -> None:
        """Until stopped, or for so many looks. A look that fails as a whole is logged, and the next one made."""
        self._recorder.start()
        due = self._clock()
        try:
            while not self._end.is_set() and (looks is None or self.looks < looks):
                self._look(max(0.0, self._clock() - due))
                self.looks += 1
                due += self._period_s
                late = self._clock() - due
                if late > self._period_s:
                    # The machine stood still: go on from now, do not run after lost seconds.
                    due += late // self._period_s * self._period_s
                self._end.wait(max(0.0, due - self._clock()))
        finally:
            self._recorder.take([], self._rollups.flush(), [])
            self._recorder.close()
            self._publisher.close()
            self._observer.close()

    def _look(self, lag_s: float) -> None:
        try:
            look = self._observer.look(lag_s=lag_s)
        except Exception:  # one bad reading must not end the sampler
            log.exception("this second was not read")
            return
        rows = self._rollups.add(look.record)
        self._recorder.take(look.readings, rows, look.hints)
        try:
            self._publisher.publish(look.record)
        except Exception:
            log.exception("this second was not published")
