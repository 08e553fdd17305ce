"""How an engine ends, and what it leaves: every row of the table that was measured on vLLM 0.30 and 0.32."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from gpus_app.probes.sim_ledger import Ledger
from models_app.simulator.elastic import sockets_folder
from tests.models_app.simulator.engine import Engine, alive, eventually, running

SLOW = 1.0  # tokens come at the speed of a real card, so a stream is open for as long as a test needs it
LONG = {"max_tokens": 4000, "ignore_eos": True}


@pytest.fixture
def engine(tmp_path: Path):
    with running(tmp_path) as engine:
        yield engine


@pytest.fixture
def busy(tmp_path: Path):
    """An engine with one open stream that has begun."""
    with running(tmp_path, "--enforce-eager", speed=2.0) as engine:
        stream = engine.stream(**LONG)
        eventually(lambda: stream.events > 2)
        yield engine, stream
        stream.hang_up()


def test_sigterm_when_idle_ends_the_tree_with_0_and_leaves_nothing(engine: Engine) -> None:
    core = engine.core_pid
    engine.signal(signal.SIGTERM)
    assert engine.ended() == 0
    assert not alive(core)
    assert not engine.segment.exists()
    assert Ledger(engine.sim_dir).used_bytes(engine.cards[0].uuid) == 0
    assert "[shutdown] API server: shutdown triggered" in engine.log()
    assert "Traceback" not in engine.log()


def test_folder_of_kvcacheds_sockets_stays_even_after_an_orderly_end(engine: Engine) -> None:
    folder = sockets_folder(engine.ipc_name)
    assert (folder / "w0.sock").is_socket()
    engine.signal(signal.SIGTERM)
    assert engine.ended() == 0
    assert folder.is_dir()


def test_sigterm_with_an_open_stream_ends_the_engine_but_not_the_server(busy) -> None:
    engine, stream = busy
    core = engine.core_pid
    engine.signal(signal.SIGTERM)
    eventually(lambda: not alive(core))
    engine.wait_log("Waiting for connections to close")
    assert engine.returncode is None
    assert Ledger(engine.sim_dir).used_bytes(engine.cards[0].uuid) == 0
    time.sleep(0.5)
    assert engine.returncode is None
    assert stream.is_alive()
    assert not stream.done


def test_server_ends_when_the_client_of_the_open_stream_hangs_up(tmp_path: Path) -> None:
    with running(tmp_path, "--enforce-eager", speed=2.0) as engine:
        url = f"http://127.0.0.1:{engine.port}/v1/completions"
        body = {"model": "tiny", "prompt": "hello", "stream": True, **LONG}
        with httpx.stream("POST", url, json=body, headers={"Authorization": "Bearer test-token"}) as answer:
            lines = answer.iter_lines()
            next(lines)
            engine.signal(signal.SIGTERM)
            engine.wait_log("Waiting for connections to close")
            assert engine.returncode is None
            del lines
        assert engine.ended() == 0


def test_shutdown_timeout_lets_a_stream_finish(tmp_path: Path) -> None:
    with running(tmp_path, "--shutdown-timeout", "30", speed=2.0) as engine:
        stream = engine.stream(max_tokens=150, ignore_eos=True)
        eventually(lambda: stream.events > 2)
        engine.signal(signal.SIGTERM)
        engine.wait_log("start timeout=30s")
        assert engine.health() == 200
        late = engine.http.post("/v1/completions", json={"model": "tiny", "prompt": "late"})
        assert late.status_code == 500
        assert "cannot schedule new futures after shutdown" in late.text
        assert stream.finished().done
        assert stream.reasons == ["length"]
        assert engine.ended() == 0


@pytest.mark.slow
def test_shutdown_timeout_that_runs_out_kills_the_engine_and_hangs_the_same(tmp_path: Path) -> None:
    with running(tmp_path, "--shutdown-timeout", "1", "--enforce-eager", speed=1.0) as engine:
        stream = engine.stream(**LONG)
        eventually(lambda: stream.events > 2)
        core = engine.core_pid
        engine.signal(signal.SIGTERM)
        eventually(lambda: not alive(core))
        engine.wait_log("Waiting for connections to close")
        assert engine.returncode is None
        stream.hang_up()


def test_sigkill_of_the_server_orphans_the_core_with_its_memory(engine: Engine) -> None:
    core, resident = engine.core_pid, engine.resident()
    engine.signal(signal.SIGKILL)
    assert engine.ended() == -signal.SIGKILL
    assert engine.health() is None
    time.sleep(1.0)
    assert alive(core)
    assert engine.segment.exists()
    assert Ledger(engine.sim_dir).used_bytes(engine.cards[0].uuid) == resident
    os.kill(core, signal.SIGTERM)
    eventually(lambda: not alive(core))
    assert not engine.segment.exists()


def test_orphan_ends_by_itself_after_a_while(tmp_path: Path) -> None:
    with running(tmp_path, env={"SARDEENZ_SIM_ORPHAN_S": "0.5"}) as engine:
        core = engine.core_pid
        engine.signal(signal.SIGKILL)
        eventually(lambda: not alive(core))


@pytest.mark.slow
def test_orphan_uses_no_processor_time(engine: Engine) -> None:
    core = engine.core_pid
    stream = engine.stream(**LONG)
    eventually(lambda: stream.events > 2)
    engine.signal(signal.SIGKILL)
    engine.ended()

    def ticks() -> int:
        fields = Path(f"/proc/{core}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    eventually(lambda: "EngineCor" in Path(f"/proc/{core}/comm").read_text())
    time.sleep(1.0)
    before = ticks()
    time.sleep(1.0)
    assert ticks() - before < 20


def test_sigkill_of_the_core_makes_health_503_and_then_exit_0(engine: Engine) -> None:
    os.kill(engine.core_pid, signal.SIGKILL)
    eventually(lambda: engine.health() == 503)
    assert engine.ended() == 0
    assert not engine.segment.exists()
    log = engine.log()
    assert "engine core exited unexpectedly" in log
    assert "EngineDeadError: EngineCore encountered an issue." in log
    assert Ledger(engine.sim_dir).used_bytes(engine.cards[0].uuid) == 0


@pytest.mark.slow
def test_dead_engine_is_503_for_some_seconds_at_real_speed(tmp_path: Path) -> None:
    with running(tmp_path, "--enforce-eager", speed=1.0) as engine:
        started = time.monotonic()
        os.kill(engine.core_pid, signal.SIGKILL)
        eventually(lambda: engine.health() == 503)
        assert engine.ended() == 0
        assert time.monotonic() - started > 4.0


@pytest.mark.slow
def test_open_stream_gets_an_error_event_when_the_core_dies(busy) -> None:
    engine, stream = busy
    os.kill(engine.core_pid, signal.SIGKILL)
    stream.finished()
    assert stream.done
    assert not stream.reasons


@pytest.mark.slow
def test_request_to_a_dead_engine_is_500(tmp_path: Path) -> None:
    with running(tmp_path, "--enforce-eager", speed=1.0) as engine:
        os.kill(engine.core_pid, signal.SIGKILL)
        eventually(lambda: engine.health() == 503)
        answer = engine.http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert answer.status_code == 500
        assert "EngineCore encountered an issue" in answer.json()["error"]["message"]
        assert engine.http.post("/kvcache/limit", json={"size": "1g"}).status_code == 503


def test_killing_the_whole_group_leaves_the_segment_and_frees_the_memory(engine: Engine) -> None:
    numbers = engine.numbers()
    os.killpg(engine.pid, signal.SIGKILL)
    engine.ended()
    eventually(lambda: not engine.pids())
    assert engine.numbers() == numbers
    assert Ledger(engine.sim_dir).used_bytes(engine.cards[0].uuid) == 0


def test_start_over_a_stale_segment_writes_fresh_numbers(tmp_path: Path) -> None:
    with running(tmp_path) as first:
        os.killpg(first.pid, signal.SIGKILL)
        first.ended()
        first.write_limit(12345)
        with running(tmp_path, ipc_name=first.ipc_name) as second:
            total, used, _ = second.numbers()
            assert total > 10**9
            assert used > 0


@pytest.mark.slow
def test_same_name_twice_overwrites_and_the_first_to_end_takes_the_file_along(tmp_path: Path) -> None:
    with running(tmp_path) as first, running(tmp_path, ipc_name=first.ipc_name) as second:
        assert second.segment.exists()
        first.signal(signal.SIGTERM)
        first.ended()
        assert not second.segment.exists()


# -- faults ------------------------------------------------------------------------------------------------------


def test_engine_that_ignores_sigterm_has_to_be_killed(tmp_path: Path) -> None:
    with running(tmp_path, faults="ignore_sigterm") as engine:
        engine.signal(signal.SIGTERM)
        time.sleep(0.7)
        assert engine.health() == 200
        engine.set_faults([])


def test_orphaning_engine_ends_without_its_core(tmp_path: Path) -> None:
    with running(tmp_path, faults="orphan") as engine:
        core = engine.core_pid
        engine.signal(signal.SIGTERM)
        assert engine.ended() == 0
        assert alive(core)
        assert Ledger(engine.sim_dir).used_bytes(engine.cards[0].uuid) > 0
        os.kill(core, signal.SIGKILL)


def test_leaking_engine_leaves_its_segment(tmp_path: Path) -> None:
    with running(tmp_path, faults="leak_segment") as engine:
        engine.signal(signal.SIGTERM)
        assert engine.ended() == 0
        assert engine.segment.exists()


def test_engine_dies_by_itself_after_the_time_ordered(tmp_path: Path) -> None:
    with Engine(tmp_path, faults="die_after:0.3") as engine:
        assert engine.start().ended() == 0
        assert "Application startup complete" in engine.log()
        assert "engine core exited unexpectedly" in engine.log()


def test_hang_is_healthy_and_moves_nothing_until_it_is_lifted(engine: Engine) -> None:
    engine.set_faults("hang")
    eventually(lambda: "hang" in engine.run_dir.joinpath("faults.json").read_text())
    time.sleep(0.3)
    stream = engine.stream(max_tokens=5)
    time.sleep(0.5)
    assert engine.health() == 200
    assert engine.http.get("/v1/models").status_code == 200
    assert stream.events == 0
    status = engine.kv("status")
    assert status["provider"] == "shm"
    assert status["segments"][0]["state"] == "unknown"
    engine.set_faults([])
    assert stream.finished().reasons == ["length"]
    assert engine.kv("status")["provider"] == "addon"


def test_half_written_fault_file_changes_nothing(engine: Engine) -> None:
    (engine.run_dir / "faults.json").write_text('["han')
    time.sleep(0.3)
    assert engine.complete(max_tokens=2)["choices"][0]["finish_reason"] == "length"
