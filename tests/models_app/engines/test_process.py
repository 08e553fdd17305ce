"""Launch, stop and tidy up, with real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from models_app.engines import procfs
from models_app.engines.identity import MARKER, tmp_dir
from models_app.engines.process import (
    AlreadyLaunched,
    LaunchFailed,
    cleanup,
    end_processes,
    find_marked,
    free_port,
    is_alive,
    is_free,
    launch,
    members,
    port_is_ours,
    read_status,
    read_token,
    stop_step,
    terminate,
)
from tests.models_app.engines.fakes import INSTALLATION, attempt, command, start, wait_for

SLEEPER = "import time\nprint('up', flush=True)\ntime.sleep(120)"
DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(120)"
PARENT = "c = child()\nprint('child', c.pid, flush=True)\nimport time; time.sleep(120)"


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A folder for run directories; whatever still runs in it at the end is killed."""
    yield tmp_path
    for folder in tmp_path.iterdir():
        if folder.name.isdecimal():
            assert terminate(folder, limit_s=0).done
            cleanup(folder)


def log(run_dir: Path) -> str:
    return (run_dir / "engine.log").read_text() if (run_dir / "engine.log").exists() else ""


def child_pid(run_dir: Path) -> int:
    text = wait_for(lambda: log(run_dir) if "child " in log(run_dir) and log(run_dir).endswith("\n") else "")
    return int(text.split("child ")[1].split()[0])


def test_launch_reports_the_engine_by_pid_and_start_ticks(root: Path) -> None:
    record = start(root, SLEEPER)
    assert is_alive(record.engine_pid, record.engine_start_ticks)
    assert is_alive(record.guardian_pid, record.guardian_start_ticks)
    assert not is_alive(record.engine_pid, (record.engine_start_ticks or 0) + 1)
    assert read_status(record.run_dir).engine_alive  # type: ignore[union-attr]


def test_the_worker_has_no_child_after_a_launch(root: Path) -> None:
    start(root, SLEEPER)
    assert not [p for p in procfs.processes() if p.parent == os.getpid() and "guardian" in procfs.command_line(p.pid)]


def test_run_directory_and_token_are_private(root: Path) -> None:
    record = start(root, SLEEPER, token="s3cret-token")
    assert stat.S_IMODE(record.run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((record.run_dir / "token").stat().st_mode) == 0o600
    assert read_token(record.run_dir) == "s3cret-token"


def test_engine_and_guardian_are_in_sessions_of_their_own(root: Path) -> None:
    record = start(root, SLEEPER)
    engine, guardian = procfs.read_stat(record.engine_pid or 0), procfs.read_stat(record.guardian_pid)
    assert engine and guardian
    assert engine.session == engine.pid
    assert len({engine.session, guardian.session, os.getsid(0)}) == 3


def test_exit_code_is_recorded(root: Path) -> None:
    record = start(root, "import sys; print('bye'); sys.exit(7)")
    status = wait_for(lambda: (s := read_status(record.run_dir)) and s.cleaned_at and s)
    assert (status.exit_code, status.signal, status.failed) == (7, None, True)
    assert "bye" in log(record.run_dir)


def test_exit_0_that_nobody_asked_for_is_a_failure(root: Path) -> None:
    record = start(root, "pass")
    status = wait_for(lambda: (s := read_status(record.run_dir)) and s.ended and s)
    assert status.exit_code == 0
    assert status.failed


def test_a_program_that_does_not_exist_is_recorded_with_a_sentence(root: Path) -> None:
    order = command(SLEEPER)
    order = type(order)(argv=("/no/such/vllm", "serve"), env=order.env, masked_argv=())
    launch(order, root / "1", attempt())
    status = read_status(root / "1")
    assert status and status.exit_code == 127
    assert "cannot start /no/such/vllm: No such file or directory" in log(root / "1")


def test_two_guardians_for_one_attempt_start_one_engine(root: Path) -> None:
    def go(_: int) -> object:
        try:
            return start(root, SLEEPER)
        except AlreadyLaunched as exc:
            return exc

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(go, range(4)))
    assert sum(not isinstance(r, AlreadyLaunched) for r in results) == 1
    assert len(members(root / "1")) == 1


def test_an_attempt_that_ended_is_never_started_again(root: Path) -> None:
    record = start(root, "pass")
    wait_for(lambda: (s := read_status(record.run_dir)) and s.cleaned_at)
    with pytest.raises(AlreadyLaunched):
        start(root, SLEEPER)


def test_asked_to_end_before_it_began_starts_nothing(root: Path) -> None:
    (root / "1").mkdir()
    (root / "1" / "stop").touch()
    record = start(root, "open('ran', 'w')")
    status = wait_for(lambda: (s := read_status(record.run_dir)) and s.cleaned_at and s)
    assert status.engine_pid is None
    assert status.stop_requested and not status.failed
    assert not (root / "1" / "ran").exists()


def test_a_stop_that_meets_the_start_is_not_done_before_the_guardian_is(root: Path) -> None:
    (root / "1").mkdir()
    (root / "1" / "attempt.json").write_text(json.dumps({**attempt(), "created_at": time.time()}))
    assert not stop_step(root / "1", limit_s=60).done  # a guardian may be on its way
    (root / "1" / "attempt.json").write_text(json.dumps({**attempt(), "created_at": time.time() - 60}))
    assert stop_step(root / "1", limit_s=60).done


def test_guardian_survives_sigkill_of_the_worker_and_of_its_process_group(root: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from tests.models_app.engines.fakes import start;"
        f"start(Path({str(root)!r}), {SLEEPER!r}); print('launched', flush=True); time.sleep(60)"
    )
    worker = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=Path.cwd(), start_new_session=True
    )
    assert worker.stdout and worker.stdout.readline().strip() == b"launched"
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    status = read_status(root / "1")
    assert status and status.engine_alive and status.guardian_alive
    os.kill(status.engine_pid or 0, signal.SIGKILL)
    ended = wait_for(lambda: (s := read_status(root / "1")) and s.cleaned_at and s)
    assert ended.signal == signal.SIGKILL
    assert ended.failed


def test_signals_meant_for_the_worker_do_not_end_the_guardian(root: Path) -> None:
    record = start(root, SLEEPER)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(record.guardian_pid, number)
    time.sleep(0.1)
    assert is_alive(record.guardian_pid, record.guardian_start_ticks)
    os.kill(record.engine_pid or 0, signal.SIGTERM)  # and the engine got its default handlers back
    status = wait_for(lambda: (s := read_status(record.run_dir)) and s.cleaned_at and s)
    assert status.signal == signal.SIGTERM


def test_stop_is_sigterm_and_recorded_as_asked_for(root: Path) -> None:
    record = start(root, SLEEPER)
    assert terminate(record.run_dir, limit_s=20).done
    status = read_status(record.run_dir)
    assert status and status.cleaned_at
    assert (status.signal, status.stop_requested, status.failed) == (signal.SIGTERM, True, False)


def test_stop_of_an_engine_deaf_to_sigterm_is_sigkill_after_the_limit(root: Path) -> None:
    record = start(root, DEAF)
    wait_for(lambda: "up" in log(record.run_dir))
    progress = terminate(record.run_dir, limit_s=0.3)
    assert progress.done
    status = read_status(record.run_dir)
    assert status and status.signal == signal.SIGKILL and not status.failed


def test_sigterm_is_repeated_because_the_first_is_lost_during_start(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models_app.engines.process._AGAIN_S", 0.2)
    record = start(
        root,
        """
        import signal, sys, time
        seen = []
        signal.signal(signal.SIGTERM, lambda *a: seen.append(1) if not seen else sys.exit(0))
        print('up', flush=True)
        while True: time.sleep(0.05)
        """,
    )
    wait_for(lambda: "up" in log(record.run_dir))
    assert terminate(record.run_dir, limit_s=20).done
    status = read_status(record.run_dir)
    assert status and status.exit_code == 0


def test_stop_step_returns_at_once_and_goes_on_where_another_worker_left_off(root: Path) -> None:
    record = start(root, DEAF)
    wait_for(lambda: "up" in log(record.run_dir))
    first = stop_step(record.run_dir, limit_s=60)
    assert (first.done, first.sent, first.alive) == (False, "SIGTERM", (record.engine_pid,))
    assert stop_step(record.run_dir, limit_s=60).sent == ""  # just told
    assert stop_step(record.run_dir, limit_s=0).sent == "SIGKILL"  # forced now
    wait_for(lambda: stop_step(record.run_dir, limit_s=0).done)


def test_server_kept_only_by_open_connections_is_not_waited_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models_app.engines.process._AGAIN_S", 0.2)
    record = start(root, DEAF + "\n", attempt_id=1)
    wait_for(lambda: "up" in log(record.run_dir))
    with (record.run_dir / "engine.log").open("a") as file:
        file.write("INFO:     Waiting for connections to close. (CTRL+C to force quit)\n")
    assert terminate(record.run_dir, limit_s=600, patience_s=-590).done


def test_children_are_ended_when_the_server_is_killed(root: Path) -> None:
    record = start(root, PARENT)
    child = child_pid(record.run_dir)
    os.kill(record.engine_pid or 0, signal.SIGKILL)
    status = wait_for(lambda: (s := read_status(record.run_dir)) and s.cleaned_at and s)
    assert procfs.start_ticks(child) is None
    assert status.signal == signal.SIGKILL and status.failed


def test_children_without_guardian_are_found_and_ended(root: Path) -> None:
    record = start(root, PARENT)
    child = child_pid(record.run_dir)
    os.kill(record.guardian_pid, signal.SIGKILL)
    os.kill(record.engine_pid or 0, signal.SIGKILL)
    wait_for(lambda: procfs.start_ticks(record.engine_pid or 0) is None)
    assert [p.pid for p in members(record.run_dir)] == [child]
    assert terminate(record.run_dir, limit_s=5).done
    assert procfs.start_ticks(child) is None


def test_a_child_in_another_session_is_ended_by_its_marker(root: Path) -> None:
    record = start(
        root,
        """
        import os
        c = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(120)"], start_new_session=True)
        print('child', c.pid, flush=True); c.wait()
        """,
    )
    child = child_pid(record.run_dir)
    assert terminate(record.run_dir, limit_s=1).done
    assert procfs.start_ticks(child) is None


def test_a_child_whose_environment_was_wiped_is_ended_by_its_session(root: Path) -> None:
    record = start(root, "c = child(env={})\nprint('child', c.pid, flush=True)\nimport time; time.sleep(120)")
    child = child_pid(record.run_dir)
    found = {p.pid: p for p in find_marked(INSTALLATION)}
    assert found[child].marker.attempt_id == 1
    assert terminate(record.run_dir, limit_s=5).done
    assert procfs.start_ticks(child) is None


def test_a_shell_standing_in_the_run_directory_is_never_ours(root: Path) -> None:
    record = start(root, SLEEPER)
    operator = subprocess.Popen(["tail", "-f", "engine.log"], cwd=record.run_dir, stdout=subprocess.DEVNULL)
    try:
        assert operator.pid not in {p.pid for p in find_marked(INSTALLATION)}
        assert terminate(record.run_dir, limit_s=5).done
        assert operator.poll() is None
    finally:
        operator.kill()
        operator.wait()


def test_another_installation_is_never_found(root: Path) -> None:
    record = start(root, SLEEPER)
    foreign = start(root, SLEEPER, attempt_id=2, env={MARKER: "ffffffff:1:2"})
    found = find_marked(INSTALLATION)
    assert {record.engine_pid} <= {p.pid for p in found}
    assert foreign.engine_pid not in {p.pid for p in found}
    assert record.guardian_pid not in {p.pid for p in found}
    assert end_processes([p for p in found if p.pid == record.engine_pid]) == []
    assert is_alive(foreign.engine_pid, foreign.engine_start_ticks)


def test_cleanup_touches_nothing_while_the_engine_lives(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    shm = tmp_path_factory.mktemp("shm")
    record = start(root, SLEEPER, tmp=True)
    (shm / str(attempt()["ipc_name"])).write_bytes(bytes(24))
    assert cleanup(record.run_dir, shm=shm) == []
    assert tmp_dir(INSTALLATION, 1).is_dir()


def test_cleanup_removes_segment_sockets_and_temporary_folder(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shm, tmp = tmp_path_factory.mktemp("shm"), tmp_path_factory.mktemp("tmp")
    record = start(root, SLEEPER, tmp=True)
    name = attempt()["ipc_name"]
    (shm / str(name)).write_bytes(bytes(24))
    (shm / "sz-stranger").write_bytes(bytes(24))
    (tmp / f"kvcached-tp-{name}-0a1b2c3d").mkdir()
    (tmp / "kvcached-tp-other-0a1b2c3d").mkdir()
    assert terminate(record.run_dir, limit_s=5).done
    cleanup(record.run_dir, shm=shm, tmp=tmp)
    assert [p.name for p in shm.iterdir()] == ["sz-stranger"]
    assert [p.name for p in tmp.iterdir()] == ["kvcached-tp-other-0a1b2c3d"]
    assert not tmp_dir(INSTALLATION, 1).exists()
    assert (record.run_dir / "status.json").exists()  # log and record stay


def test_cleanup_keeps_a_segment_that_somebody_has_open(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    shm = tmp_path_factory.mktemp("shm")
    record = start(root, "pass")
    wait_for(lambda: (s := read_status(record.run_dir)) and s.cleaned_at)
    segment = shm / str(attempt()["ipc_name"])
    segment.write_bytes(bytes(24))
    reader = subprocess.Popen([sys.executable, "-S", "-c", f"f=open({str(segment)!r}); print(1, flush=True); input()"],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert reader.stdout and reader.stdout.readline()
    assert cleanup(record.run_dir, shm=shm) == []
    reader.communicate(b"\n")
    assert cleanup(record.run_dir, shm=shm) == [str(segment)]


def test_shared_memory_left_by_sigkill_of_the_whole_family_is_removed(root: Path) -> None:
    record = start(
        root,
        """
        import mmap, os, time
        name = f"/dev/shm/psm_sztest{os.getpid()}"
        f = open(name, "w+b"); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096)
        print("child", os.getpid(), name, flush=True); time.sleep(120)
        """,
    )
    name = Path(f"/dev/shm/psm_sztest{child_pid(record.run_dir)}")
    assert name.exists()
    assert terminate(record.run_dir, limit_s=0).done
    cleanup(record.run_dir)
    assert not name.exists()


def test_temporary_folder_is_private_short_and_gone_after_the_end(root: Path) -> None:
    record = start(root, "import os, time\nprint(os.environ['TMPDIR'], flush=True)\ntime.sleep(120)", tmp=True)
    folder = tmp_dir(INSTALLATION, 1)
    wait_for(lambda: str(folder) in log(record.run_dir))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(str(folder / ("x" * 36))) < 107
    terminate(record.run_dir, limit_s=5)
    assert not folder.exists()


def test_temporary_folder_that_is_a_link_is_refused(root: Path) -> None:
    folder = tmp_dir(INSTALLATION, 3)
    folder.symlink_to("/var/tmp")
    try:
        with pytest.raises(LaunchFailed, match="belongs to somebody else"):
            start(root, SLEEPER, attempt_id=3, tmp=True)
    finally:
        folder.unlink()
    shutil.rmtree(root / "3")  # nothing was started: its end need not wait for a guardian on its way


def test_secrets_do_not_reach_the_log(root: Path) -> None:
    record = start(
        root,
        """
        from os import environ as e
        print('hub', e['HF_TOKEN'], 'engine', open(e['SARDEENZ_ENGINE_TOKEN_FILE']).read())
        """,
        token="engine-token-1234",
        env={"HF_TOKEN": "hf_abcdefgh1234", "SARDEENZ_ENGINE_TOKEN_FILE": str(root / "1" / "token")},
    )
    wait_for(lambda: (s := read_status(record.run_dir)) and s.cleaned_at)
    assert log(record.run_dir).strip() == "hub *** engine ***"


def test_attempt_file_says_what_was_started_with_the_masked_command(root: Path) -> None:
    record = start(root, SLEEPER)
    value = json.loads((record.run_dir / "attempt.json").read_text())
    assert value["schema"] == 1
    assert value["argv"] == [sys.executable]
    assert value["instance_id"] == 7


def test_free_port_is_one_that_nobody_has_bound_even_with_reuseport() -> None:
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", 0))  # bound, not listening: as vLLM for the first minute
        assert not is_free("127.0.0.1", thief.getsockname()[1])
    port = free_port("127.0.0.1")
    assert free_port("127.0.0.1", taken={port}) != port


def test_a_second_listener_on_our_port_is_noticed(root: Path) -> None:
    port = free_port("127.0.0.1")
    record = start(
        root,
        f"""
        import socket, time
        s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        s.bind(("127.0.0.1", {port})); s.listen(); print("up", flush=True); time.sleep(120)
        """,
    )
    wait_for(lambda: port_is_ours(record.run_dir, port) is not None)
    assert port_is_ours(record.run_dir, port) is True
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        thief.bind(("127.0.0.1", port))
        thief.listen()
        assert port_is_ours(record.run_dir, port) is False
