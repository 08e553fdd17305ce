"""Everything that a sampler tells the database and the reconcilers, in a thread of its own.

A database that is away, or locked for seconds, must not hold up a reading. What could not be written is kept, up to a
bound, and written when the database is back; of heartbeats and lists of GPUs only the newest counts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from django.db import DatabaseError, InterfaceError, connection

from gpus_app.events import HintSender
from gpus_app.models import Host
from gpus_app.probes import procfs, segments
from gpus_app.probes.base import GpuReading
from gpus_app.sampler.observer import Hint
from gpus_app.services import RollUp, gpus_sync, host_heartbeat, host_register, samples_record

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
#: No heartbeat when the loop has brought no look for so long.
SILENT_S = 5.0
#: The list of GPUs is written when it changed, and so often besides.
SYNC_S = 30.0
#: Seconds until the database is tried again.
RETRY_S = 2.0
#: Rolled-up rows kept while the database is away: an hour of 8 GPUs.
MOST_ROWS = 8 * (360 + 60)
MOST_HINTS = 256
#: A card's state is believed after so many readings that agree: bad ones sooner than good ones.
BAD_LOOKS, GOOD_LOOKS = 2, 3


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What the sampler enters of its machine."""

    name: str
    address: str
    engine_kind: str


class GpuStates:
    """Which readings to believe: one bad answer of the driver is not a faulty card, nor one good one a sound card."""

    def __init__(self) -> None:
        self._believed: dict[str, GpuReading] = {}
        self._count: dict[str, tuple[bool, int]] = {}

    def settle(self, readings: list[GpuReading]) -> list[GpuReading]:
        """The readings with each card's state as it is believed; figures are those of the last believed reading."""
        settled = []
        for reading in readings:
            bad = reading.error is not None
            was_bad, count = self._count.get(reading.uuid, (bad, 0))
            count = count + 1 if was_bad == bad else 1
            self._count[reading.uuid] = (bad, count)
            believed = self._believed.get(reading.uuid)
            same = believed is not None and (believed.error is not None) == bad
            if believed is None or same or count >= (BAD_LOOKS if bad else GOOD_LOOKS):
                self._believed[reading.uuid] = reading
            settled.append(self._believed[reading.uuid])
        return settled


def signature(readings: list[GpuReading]) -> tuple[tuple[object, ...], ...]:
    """What makes a list of GPUs worth writing again."""
    return tuple((r.uuid, r.index, r.name, r.total_bytes, r.error, r.missing, r.grade) for r in readings)


class Recorder:
    """Takes rows, readings and hints from the loop, and writes them from its own thread."""

    def __init__(
        self,
        host: HostFacts,
        *,
        driver_version: Callable[[], str],
        send_hint: HintSender | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._host = host
        self._driver_version = driver_version
        self._send_hint = send_hint
        self._clock = clock
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._ending = False
        self._rows: deque[RollUp] = deque(maxlen=MOST_ROWS)
        self._hints: deque[Hint] = deque(maxlen=MOST_HINTS)
        self._readings: list[GpuReading] | None = None
        self._states = GpuStates()
        self._signature: tuple[tuple[object, ...], ...] | None = None
        self._registered = False
        self._beat_at = self._sync_at = self._retry_at = self._taken_at = float("-inf")
        self._away = False
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, limit_s: float = 3.0) -> None:
        """Write what there is and end; gives up after ``limit_s``."""
        self._ending = True
        self._wake.set()
        self._thread.join(limit_s)

    # -- called by the loop: never waits for anything ------------------------------------------------------------------

    def take(self, readings: list[GpuReading], rows: list[RollUp], hints: list[Hint]) -> None:
        with self._lock:
            self._taken_at = self._clock()
            self._readings = self._states.settle(readings)
            self._rows.extend(rows)
            self._hints.extend(hints)
        self._wake.set()

    @property
    def away(self) -> bool:
        """Whether the last attempt to write failed."""
        return self._away

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._ending:
            self._wake.wait(1.0)
            self._wake.clear()
            self.work()
        self.work(last=True)
        connection.close()

    def work(self, *, last: bool = False) -> None:
        """One round: hints first, since they are about seconds; then what is due for the database."""
        self._give_hints()
        if self._clock() < self._retry_at and not last:
            return
        try:
            self._write(last)
        except (DatabaseError, InterfaceError, OSError) as exc:
            if not self._away:
                log.warning("the database is away, rows are kept until it is back: %s", exc)
            self._away = True
            self._retry_at = self._clock() + RETRY_S
            connection.close()
        except Exception:  # the thread must live: without it the host would look dead
            log.exception("writing failed")
            self._retry_at = self._clock() + RETRY_S
            connection.close()

    def _write(self, last: bool) -> None:
        now = self._clock()
        with self._lock:
            readings, rows = self._readings, list(self._rows)
        # A loop that hangs in a driver call must look silent, although this thread lives.
        looking = now - self._taken_at < SILENT_S
        due = looking and now - self._beat_at >= HEARTBEAT_S
        changed = readings is not None and signature(readings) != self._signature
        if not (due or changed or rows):
            return
        if not self._registered:
            self._register()
        if due:
            self._heartbeat(now)
        if readings and (changed or now - self._sync_at >= SYNC_S):
            self._sync(readings, now)
        if rows:
            samples_record(rows)
            with self._lock:
                for _ in rows:
                    self._rows.popleft()
        if self._away:
            log.info("the database is back")
        self._away = False

    def _register(self) -> None:
        total, _ = procfs.memory_info()
        driver = self._driver_version()
        host_register(
            self._host.name,
            address=self._host.address,
            engine_kind=self._host.engine_kind,
            versions={"driver": driver} if driver else {},
            total_ram_bytes=total,
            boot_id=procfs.boot_id(),
        )
        self._registered = True

    def _heartbeat(self, now: float) -> None:
        _, available = procfs.memory_info()
        shm = procfs.shared_memory_room(segments.SHM)
        if not host_heartbeat(self._host.name, source="sampler", available_ram_bytes=available, shm_bytes=shm):
            self._register()  # its row was deleted: it is here all the same
            host_heartbeat(self._host.name, source="sampler", available_ram_bytes=available, shm_bytes=shm)
        self._beat_at = now

    def _sync(self, readings: list[GpuReading], now: float) -> None:
        host = Host.objects.filter(name=self._host.name).first()
        if host is None:
            self._registered = False
            return
        for gpu in gpus_sync(host, readings=readings):
            log.log(
                logging.INFO if gpu.state == "ok" else logging.WARNING,
                "GPU %s (%s) is %s. %s",
                gpu.index,
                gpu.uuid,
                gpu.state,
                gpu.state_reason,
            )
            with self._lock:
                self._hints.append(Hint("gpu", None))
        self._signature, self._sync_at = signature(readings), now

    def _give_hints(self) -> None:
        with self._lock:
            hints = list(dict.fromkeys(self._hints))
            self._hints.clear()
        if self._send_hint is None:
            return
        for hint in hints:
            try:
                self._send_hint(hint.kind, host=self._host.name, instance_id=hint.instance_id)
            except Exception as exc:  # a lost hint costs seconds: the reconcilers look anyway
                log.info("hint %s not given: %s", hint, exc)
                return
