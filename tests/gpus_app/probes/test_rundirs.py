"""Run directories: who runs, who has ended, and files that are half there."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpus_app.probes.rundirs import RunDirs
from tests.gpus_app.fake_host import FakeHost


@pytest.fixture
def host(tmp_path: Path) -> Iterator[FakeHost]:
    host = FakeHost(tmp_path)
    yield host
    host.close()


def test_a_running_attempt_is_read_with_its_token(host: FakeHost) -> None:
    host.attempt(3, instance_id=9, name="qwen", replica=1, port=4711, token="hush\n")
    (found,) = RunDirs(host.runs).scan()
    assert (found.attempt_id, found.instance_id, found.name, found.replica) == (3, 9, "qwen", 1)
    assert (found.port, found.token, found.alive, found.ended_at) == (4711, "hush", True, None)
    assert found.gpu_uuids == tuple(host.uuids)
    assert "hush" not in repr(found), "a token must not get into a log"


def test_an_end_is_reported_once(host: FakeHost) -> None:
    host.attempt(3)
    runs = RunDirs(host.runs)
    runs.scan()
    host.status(3, pid=1, ended_at=time.time())
    (found,) = runs.scan()
    assert found.ended_at is not None and not found.alive
    assert runs.scan() == []
    assert runs.get(3) is found


def test_a_dead_process_without_a_record_is_not_alive(host: FakeHost) -> None:
    engine = host.process(3)
    host.attempt(3, pid=engine.pid)
    runs = RunDirs(host.runs)
    assert runs.scan()[0].alive
    engine.kill()
    engine.wait()
    (found,) = runs.scan()
    assert not found.alive and found.ended_at is None


def test_a_pid_used_again_is_another_process(host: FakeHost) -> None:
    folder = host.attempt(3)
    status = json.loads((folder / "status.json").read_text())
    (folder / "status.json").write_text(json.dumps({**status, "engine_start_ticks": 1}))
    assert not RunDirs(host.runs).scan()[0].alive


def test_a_record_not_yet_written_is_waited_for(host: FakeHost) -> None:
    folder = host.runs / "3"
    folder.mkdir()
    runs = RunDirs(host.runs)
    assert runs.scan() == []
    (folder / "attempt.json").write_text('{"instance_id": 1, "inst')
    assert runs.scan() == []
    (folder / "attempt.json").unlink()
    folder.rmdir()
    host.attempt(3)
    (host.runs / "3" / "status.json").rename(host.runs / "3" / "later")
    (found,) = runs.scan()
    assert not found.alive and found.engine_pid is None
    (host.runs / "3" / "later").rename(host.runs / "3" / "status.json")
    assert runs.scan()[0].alive


@pytest.mark.parametrize("content", ["[]", "null", '{"port": "x"}', "\0\1\2", ""])
def test_nonsense_is_not_an_attempt(host: FakeHost, content: str) -> None:
    folder = host.runs / "5"
    folder.mkdir()
    (folder / "attempt.json").write_text(content)
    (host.runs / "not-a-number").mkdir()
    (host.runs / "6").write_text("a file")
    assert RunDirs(host.runs).scan() == []


def test_a_directory_that_was_removed_is_forgotten(host: FakeHost, tmp_path: Path) -> None:
    host.attempt(3)
    runs = RunDirs(host.runs)
    runs.scan()
    (host.runs / "3").rename(tmp_path / "away")
    assert runs.scan() == [] and runs.get(3) is None


def test_no_run_directory_yet_means_no_engines(tmp_path: Path) -> None:
    assert RunDirs(tmp_path / "absent").scan() == []
