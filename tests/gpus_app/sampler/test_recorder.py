"""What the sampler tells the database and the reconcilers, also when the database is away."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import pytest
from django.db import OperationalError

from gpus_app.models import Gpu, GpuSample, Host
from gpus_app.probes.base import GpuReading
from gpus_app.sampler import recorder as recorder_module
from gpus_app.sampler.observer import Hint
from gpus_app.sampler.recorder import GpuStates, HostFacts, Recorder
from gpus_app.services import RollUp

GIB = 1024**3
FACTS = HostFacts("host-a", "10.0.0.5", "simulated")


class Hints:
    def __init__(self) -> None:
        self.sent: list[tuple[str, str, int | None]] = []
        self.broken = False

    def __call__(self, kind: str, *, host: str, instance_id: int | None = None) -> None:
        if self.broken:
            raise OSError("no broker")
        self.sent.append((kind, host, instance_id))


@pytest.fixture
def hints() -> Hints:
    return Hints()


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def recorder(hints: Hints, now: list[float], monkeypatch: pytest.MonkeyPatch) -> Recorder:
    # The test's own transaction must live through a "lost" connection.
    monkeypatch.setattr(recorder_module.connection, "close", lambda: None)
    return Recorder(FACTS, driver_version=lambda: "580.1", send_hint=hints, clock=lambda: now[0])


def reading(uuid: str = "GPU-a", error: str | None = None, **values: Any) -> GpuReading:
    return GpuReading(uuid, 0, "H100", 80 * GIB, error=error, **values)


def row(second: int = 0) -> RollUp:
    return RollUp("GPU-a", datetime.fromtimestamp(1_800_000_000 + second, UTC), 10, 5 * GIB)


def break_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*args: Any, **kwargs: Any) -> None:
        raise OperationalError("server closed the connection unexpectedly")

    for name in ("host_register", "host_heartbeat", "gpus_sync", "samples_record"):
        monkeypatch.setattr(recorder_module, name, away)


@pytest.mark.django_db
def test_the_host_and_its_gpus_are_entered_at_once(recorder: Recorder) -> None:
    recorder.take([reading()], [], [])
    recorder.work()
    host = Host.objects.get()
    assert (host.name, host.address, host.engine_kind) == ("host-a", "10.0.0.5", "simulated")
    assert host.versions == {"driver": "580.1"} and host.total_ram_bytes > 0 and host.boot_id
    assert 0 < host.available_shm_bytes <= host.total_shm_bytes
    assert host.sampler_seen_at is not None and host.worker_seen_at is None and host.available_ram_bytes > 0
    assert Gpu.objects.get().uuid == "GPU-a"


@pytest.mark.django_db
def test_the_heart_beats_every_five_seconds(recorder: Recorder, now: list[float]) -> None:
    recorder.take([reading()], [], [])
    recorder.work()
    Host.objects.update(sampler_seen_at=None)
    now[0] += recorder_module.HEARTBEAT_S - 1
    recorder.work()
    assert Host.objects.get().sampler_seen_at is None
    now[0] += 1
    recorder.take([reading()], [], [])
    recorder.work()
    assert Host.objects.get().sampler_seen_at is not None


@pytest.mark.django_db
def test_a_loop_that_hangs_in_the_driver_looks_silent(recorder: Recorder, now: list[float]) -> None:
    recorder.take([reading()], [], [])
    recorder.work()
    Host.objects.update(sampler_seen_at=None)
    now[0] += recorder_module.HEARTBEAT_S + recorder_module.SILENT_S
    recorder.work()
    assert Host.objects.get().sampler_seen_at is None


@pytest.mark.django_db
def test_a_host_whose_row_was_deleted_is_entered_again(recorder: Recorder, now: list[float]) -> None:
    recorder.take([reading()], [], [])
    recorder.work()
    Host.objects.all().delete()
    now[0] += recorder_module.SYNC_S
    recorder.take([reading()], [], [])
    recorder.work()
    assert Host.objects.get().sampler_seen_at is not None and Gpu.objects.count() == 1


@pytest.mark.django_db
def test_rows_are_kept_while_the_database_is_away(
    recorder: Recorder, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder.take([reading()], [], [])
    recorder.work()
    with monkeypatch.context() as broken:
        break_writes(broken)
        for second in (0, 10, 20):
            recorder.take([reading()], [row(second)], [])
            now[0] += recorder_module.RETRY_S
            recorder.work()
        assert recorder.away and GpuSample.objects.count() == 0
    now[0] += recorder_module.RETRY_S
    recorder.work()
    assert not recorder.away and GpuSample.objects.count() == 3


def test_only_so_many_rows_are_kept(recorder: Recorder) -> None:
    recorder.take([], [row(second) for second in range(recorder_module.MOST_ROWS + 5)], [])
    assert len(recorder._rows) == recorder_module.MOST_ROWS


@pytest.mark.django_db
def test_a_fault_of_our_own_does_not_end_the_thread(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(recorder_module, "host_register", fail)
    recorder.take([reading()], [], [])
    recorder.work()


@pytest.mark.django_db
def test_a_gpu_that_vanishes_and_returns_is_missing_and_then_ok_again(
    recorder: Recorder, hints: Hints, now: list[float]
) -> None:
    def looks(count: int, **values: Any) -> Gpu:
        for _ in range(count):
            now[0] += 1
            recorder.take([reading(**values)], [], [])
            recorder.work()
        return Gpu.objects.get()

    assert looks(1).state == Gpu.State.OK
    gone = looks(2, error="The card has left the bus.", missing=True)
    assert gone.state == Gpu.State.MISSING and gone.state_reason == "The card has left the bus."
    assert looks(2).state == Gpu.State.MISSING, "one or two good answers are not yet a sound card"
    back = looks(2)
    assert back.state == Gpu.State.OK and back.state_reason == ""
    recorder.work()
    assert hints.sent.count(("gpu", "host-a", None)) == 3


def test_one_bad_answer_is_not_a_faulty_card() -> None:
    """H2: no flapping."""
    states = GpuStates()
    for error in (None, "x", None, "x", None):
        (settled,) = states.settle([reading(error=error)])
        assert settled.error is None


def test_a_card_that_is_broken_at_the_first_look_is_believed() -> None:
    assert GpuStates().settle([reading(error="x")])[0].error == "x"


@pytest.mark.django_db
def test_hints_are_given_once_each_and_lost_ones_are_no_matter(recorder: Recorder, hints: Hints) -> None:
    recorder.take([], [], [Hint("ended", 3), Hint("ended", 3), Hint("drift", 4)])
    recorder.work()
    assert hints.sent[:2] == [("ended", "host-a", 3), ("drift", "host-a", 4)]
    hints.broken = True
    recorder.take([], [], [Hint("ended", 5)])
    recorder.work()


@pytest.mark.django_db
def test_without_anyone_to_tell_hints_are_dropped(now: list[float]) -> None:
    recorder = Recorder(FACTS, driver_version=lambda: "", send_hint=None, clock=lambda: now[0])
    recorder.take([], [], [Hint("ended", 3)])
    recorder._give_hints()


@pytest.mark.django_db(transaction=True)
def test_the_thread_writes_what_it_is_given_and_ends_when_told(hints: Hints) -> None:
    recorder = Recorder(FACTS, driver_version=lambda: "", send_hint=hints)
    recorder.start()
    recorder.take([reading()], [], [Hint("ended", 3)])
    deadline = time.monotonic() + 20
    while not Gpu.objects.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    recorder.take([], [row()], [])
    recorder.close(20)
    assert GpuSample.objects.count() == 1 and hints.sent[0] == ("ended", "host-a", 3)
