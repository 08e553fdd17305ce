"""Simulated cards show what their ledger holds, and the faults that are switched on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpus_app.probes.base import GpuProcess
from gpus_app.probes.grades import Grade
from gpus_app.probes.sim_ledger import Ledger
from gpus_app.probes.simulated import FOREIGN_NAME, SimulatedProbe
from tests.gpus_app.fake_host import GIB, FakeHost


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FakeHost]:
    host = FakeHost(tmp_path, gpus=2)
    yield host
    host.close()


def test_memory_and_processes_are_those_of_the_ledger(host: FakeHost) -> None:
    pid = host.process(None).pid
    host.hold(pid, {host.uuids[1]: 5 * GIB}, utilization=40)
    empty, used = SimulatedProbe(host.sim).read()
    assert (empty.used_bytes, empty.free_bytes, empty.processes) == (0, 80 * GIB, ())
    assert (used.used_bytes, used.free_bytes) == (5 * GIB, 75 * GIB)
    assert used.processes == (GpuProcess(pid, "VLLM::EngineCore", 5 * GIB),)
    assert used.utilization_percent == 40 and used.power_w is not None and used.power_limit_w is not None
    assert "Simulated" in used.name


def test_foreign_bytes_are_a_process_that_is_none_of_ours(host: FakeHost) -> None:
    Ledger(host.sim).change_gpu(host.uuids[0], foreign_bytes=7 * GIB)
    reading = SimulatedProbe(host.sim).read()[0]
    assert reading.used_bytes == 7 * GIB
    assert reading.processes == (GpuProcess(1, FOREIGN_NAME, 7 * GIB),)


@pytest.mark.parametrize(
    ("fault", "missing", "words"),
    [("missing", True, "left the bus"), ("nvml_error", False, "Unknown Error"), ("xid:79", False, "XID 79")],
)
def test_a_fault_is_a_reading_and_passes(host: FakeHost, fault: str, missing: bool, words: str) -> None:
    probe = SimulatedProbe(host.sim)
    probe.read()
    Ledger(host.sim).change_gpu(host.uuids[0], fault=fault)
    broken, sound = probe.read()
    assert broken.missing is missing and words in (broken.error or "")
    assert broken.used_bytes == 0 and sound.error is None
    Ledger(host.sim).change_gpu(host.uuids[0], fault="")
    assert probe.read()[0].error is None


def test_a_card_taken_out_of_the_file_is_missed(host: FakeHost) -> None:
    probe = SimulatedProbe(host.sim)
    probe.read()
    (host.sim / "gpus.json").write_text("[]")
    readings = probe.read()
    assert [reading.missing for reading in readings] == [True, True]


def test_memory_of_a_process_that_died_is_back(host: FakeHost) -> None:
    process = host.process(None)
    host.hold(process.pid, {host.uuids[0]: GIB})
    probe = SimulatedProbe(host.sim)
    assert probe.read()[0].used_bytes == GIB
    process.kill()
    process.wait()
    assert probe.read()[0].used_bytes == 0


def test_fault_may_be_scripted_for_later(host: FakeHost) -> None:
    Ledger(host.sim).change_gpu(host.uuids[0], fault="xid:79", fault_at=time.time() + 3600)
    assert SimulatedProbe(host.sim).read()[0].error is None
    Ledger(host.sim).change_gpu(host.uuids[0], fault_at=time.time() - 1)
    assert SimulatedProbe(host.sim).read()[0].grade is Grade.FATAL


@pytest.mark.parametrize(
    ("fault", "grade"),
    [("xid:79", Grade.FATAL), ("xid:94", Grade.PASSING), ("xid:31", Grade.NONE), ("nvml_error", Grade.BLIND)],
)
def test_simulated_faults_are_graded_as_those_of_a_real_driver(host: FakeHost, fault: str, grade: Grade) -> None:
    Ledger(host.sim).change_gpu(host.uuids[0], fault=fault)
    reading = SimulatedProbe(host.sim).read()[0]
    assert (reading.grade, reading.error is None) == (grade, grade is Grade.NONE)
