"""Processes on a GPU belong to the instance whose marker, session or parent they have."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpus_app.probes import procfs, segments
from gpus_app.probes.owners import ASK_AGAIN_S, Owners
from gpus_app.probes.rundirs import Attempt, RunDirs
from tests.gpus_app.fake_host import FakeHost


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FakeHost]:
    host = FakeHost(tmp_path)
    yield host
    host.close()


def attempts(host: FakeHost) -> list[Attempt]:
    return RunDirs(host.runs).scan()


def test_the_marker_in_the_environment_tells(host: FakeHost) -> None:
    """SZ-079: NVML names the engine core, whose pid stands in no record."""
    core = host.process(7, 3)
    host.attempt(7, instance_id=3)
    assert Owners().attempt_of(core.pid, attempts(host)) == 7


def test_a_marker_of_another_installation_is_a_stranger(host: FakeHost) -> None:
    core = host.process(7)
    host.attempt(7)
    (attempt,) = attempts(host)
    attempt.installation = "ffffffff"
    assert Owners().attempt_of(core.pid, [attempt]) is None


def test_a_process_without_marker_is_a_stranger(host: FakeHost) -> None:
    other = host.process(None)
    host.attempt(7, pid=host.process(7).pid)
    owners = Owners()
    assert owners.attempt_of(other.pid, attempts(host)) is None
    assert owners.name_of(other.pid) == "sleep"


def test_without_a_readable_environment_the_session_tells(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = subprocess.Popen(["/bin/sh", "-c", "sleep 60 & wait"], start_new_session=True)
    try:
        host.attempt(7, pid=leader.pid)
        monkeypatch.setattr(procfs, "marker", lambda pid: None)
        children: list[bytes] = []
        while not children:
            children = (procfs.read_bytes(f"/proc/{leader.pid}/task/{leader.pid}/children") or b"").split()
        assert Owners().attempt_of(int(children[0]), attempts(host)) == 7
    finally:
        os.killpg(leader.pid, 9)
        leader.wait()


def orphan(host: FakeHost, folder: Path) -> int:
    """A process whose session's leader has died, standing in ``folder``; its pid is written by the leader."""
    leader = subprocess.Popen(
        ["/bin/sh", "-c", "sleep 60 & echo $!"], start_new_session=True, cwd=folder, stdout=subprocess.PIPE
    )
    assert leader.stdout is not None
    child = int(leader.stdout.readline())
    host.attempt(7, pid=leader.pid) if not (host.runs / "7").exists() else host.status(7, pid=leader.pid)
    leader.wait()
    leader.stdout.close()
    return child


def test_an_orphan_of_a_dead_engine_is_known_by_where_it_stands(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL of the API server leaves the engine core with all of its memory."""
    monkeypatch.setattr(procfs, "marker", lambda pid: None)
    folder = host.attempt(7)
    child = orphan(host, folder)
    try:
        assert Owners().attempt_of(child, attempts(host)) == 7
    finally:
        os.kill(child, 9)


def test_a_session_number_that_was_given_out_again_is_a_strangers(
    host: FakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procfs, "marker", lambda pid: None)
    host.attempt(7)
    child = orphan(host, host.sim)
    try:
        assert Owners().attempt_of(child, attempts(host)) is None
    finally:
        os.kill(child, 9)


def test_without_marker_and_session_the_parents_tell(host: FakeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host.attempt(7, pid=os.getpid())
    child = host.process(None)
    monkeypatch.setattr(procfs, "marker", lambda pid: None)
    assert Owners().attempt_of(child.pid, attempts(host)) == 7


def test_a_process_that_is_gone_is_nobodys(host: FakeHost) -> None:
    core = host.process(7)
    host.attempt(7)
    owners = Owners()
    assert owners.attempt_of(core.pid, attempts(host)) == 7
    core.kill()
    core.wait()
    assert owners.attempt_of(core.pid, attempts(host)) is None
    assert owners.name_of(core.pid) == f"pid {core.pid}"


def test_a_stranger_is_looked_at_again_after_a_while(host: FakeHost) -> None:
    """Between fork and exec a process shows its parent's environment."""
    now = [0.0]
    owners = Owners(clock=lambda: now[0])
    core = host.process(7)
    assert owners.attempt_of(core.pid, []) is None
    host.attempt(7)
    assert owners.attempt_of(core.pid, attempts(host)) is None
    now[0] = ASK_AGAIN_S + 1
    assert owners.attempt_of(core.pid, attempts(host)) == 7


def test_what_no_gpu_lists_is_forgotten(host: FakeHost) -> None:
    owners = Owners()
    pid = host.process(None).pid
    owners.attempt_of(pid, [])
    owners.name_of(pid)
    owners.forget_all_but([])
    assert not owners._known and not owners._names


def test_zombies_hold_no_memory() -> None:
    child = subprocess.Popen(["/bin/true"])
    while (found := procfs.read_bytes(f"/proc/{child.pid}/stat")) and b") Z " not in found:
        pass
    assert procfs.stat(child.pid) is None
    child.wait()


def test_the_machine_tells_its_memory_and_boot() -> None:
    total, available = procfs.memory_info()
    assert 0 < available <= total
    assert len(procfs.boot_id()) == 36
    total, free = procfs.shared_memory_room(segments.SHM)
    assert 0 < free <= total
    assert procfs.shared_memory_room("/nowhere") == (0, 0)
