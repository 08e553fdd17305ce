"""Stages and memory figures from the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from models_app.engines.guardian import Log
from models_app.engines.memory_log import read_memory
from models_app.engines.progress import LogFollower, head, parse_progress, progress_of, read_line, tail
from models_app.states import Stage
from tests.models_app.engines import samples


@pytest.mark.parametrize(
    ("raw", "who", "pid", "level", "text"),
    [
        ("(EngineCore pid=178) ERROR 11-30 15:53:39 [a.py:1] KeyError: x", "EngineCore", 178, "ERROR", "KeyError: x"),
        ("(EngineCore_DP0 pid=9) INFO 11-30 15:53:39 [core.py:6] a", "EngineCore", 9, "INFO", "a"),
        ("(EngineCore_0 pid=9) INFO 11-30 15:53:39 [core.py:6] a", "EngineCore", 9, "INFO", "a"),
        ("(Worker_TP1_EP1 pid=12) WARNING 11-30 15:53:39 [a.py:1] b", "Worker", 12, "WARNING", "b"),
        ("(APIServer pid=6923)     raise RuntimeError(", "APIServer", 6923, "", "    raise RuntimeError("),
        ("(APIServer pid=1) INFO:     Application shutdown.", "APIServer", 1, "INFO", "Application shutdown."),
        ("\x1b[1;36m(EngineCore pid=3)\x1b[0;0m INFO 11-30 15:53:56 [m.py:4] go", "EngineCore", 3, "INFO", "go"),
        ("ValueError: (a pid=3)", "", None, "", "ValueError: (a pid=3)"),
    ],
)  # fmt: skip
def test_prefix_level_and_logger_are_taken_off_and_kept(
    raw: str, who: str, pid: int | None, level: str, text: str
) -> None:
    line = read_line(raw)
    assert (line.who, line.pid, line.level, line.text) == (who, pid, level, text)


def test_stages_of_a_start_come_in_order() -> None:
    seen: list[Stage] = []
    for raw in samples.GPU_START.splitlines():
        found = parse_progress(raw)
        if found and (not seen or seen[-1] is not found.stage):
            seen.append(found.stage)
    assert seen == [
        Stage.STARTING, Stage.LOADING_WEIGHTS, Stage.DOWNLOADING, Stage.LOADING_WEIGHTS, Stage.COMPILING,
        Stage.WARMING_UP, Stage.CAPTURING_GRAPHS, Stage.WARMING_UP, Stage.READY,
    ]  # fmt: skip


def test_a_download_is_told_apart_from_the_load_that_announced_it() -> None:
    before, _, after = samples.GPU_START.partition("(EngineCore pid=12) INFO 11-30 15:54:04")
    assert progress_of(before).stage is Stage.DOWNLOADING
    assert progress_of(before).progress == 0.5  # two of four files; one file's own bar says nothing of the whole
    assert progress_of(before + "INFO 11-30 15:54:04" + after.splitlines()[0]).stage is Stage.LOADING_WEIGHTS


def test_a_second_bar_of_a_stage_begins_anew() -> None:
    bar = "(EngineCore pid=1) Capturing CUDA graphs ({}):  {}%|#"
    text = "\n".join(bar.format(kind, share) for kind, share in (("PIECEWISE", 100), ("FULL", 3), ("FULL", 2)))
    assert progress_of(text).progress == 0.03


def test_share_of_a_stage_is_read_from_its_bar() -> None:
    found = parse_progress(
        "(EngineCore pid=1) Loading safetensors checkpoint shards:  50% Completed | 1/2 [00:01<00:01]"
    )
    assert found and (found.stage, found.progress) == (Stage.LOADING_WEIGHTS, 0.5)


def test_a_stage_never_goes_back() -> None:
    text = samples.GPU_START.split("INFO 11-30 15:54:41")[0]
    assert progress_of(text).stage is Stage.CAPTURING_GRAPHS
    assert progress_of(text + "(Worker pid=2) INFO 11-30 15:54:50 [x.py:1] Starting to load model y").stage is (
        Stage.CAPTURING_GRAPHS
    )


def test_an_eager_start_reaches_ready_without_graphs() -> None:
    assert progress_of(samples.CPU_EAGER_START).stage is Stage.READY
    assert read_memory(samples.CPU_EAGER_START).graphs_bytes == 0


def test_the_port_that_is_announced_is_not_ready_yet() -> None:
    assert progress_of(samples.GPU_START.rsplit("(APIServer pid=11) INFO:", 1)[0]).stage is not Stage.READY


def test_follower_sees_each_line_once_and_waits_for_whole_lines(tmp_path: Path) -> None:
    follower = LogFollower(tmp_path)
    assert follower.poll() == []
    log = tmp_path / "engine.log"
    with log.open("a") as file:
        file.write("(EngineCore pid=1) INFO 11-30 15:54:03 [g.py:5] Starting to load")
        file.flush()
        assert follower.poll() == []
        file.write(" model x...\nnext\n")
        file.flush()
        assert [line[-4:] for line in follower.poll()] == ["x...", "next"]
    assert follower.poll() == []
    assert follower.now.stage is Stage.LOADING_WEIGHTS


def test_follower_goes_through_a_rotation_without_losing_a_line(tmp_path: Path) -> None:
    log, follower = Log(tmp_path / "engine.log", limit=200), LogFollower(tmp_path)
    seen: list[str] = []
    for number in range(100):
        log.feed(f"line {number:04} {'x' * 20}\n".encode())
        if number % 3 == 0:
            seen += follower.poll()
    seen += follower.poll()
    assert [int(line.split()[1]) for line in seen] == list(range(100))
    assert (tmp_path / "engine.log.1").exists()


def test_log_is_rotated_at_its_limit_and_keeps_one_older_half(tmp_path: Path) -> None:
    log = Log(tmp_path / "engine.log", limit=1000)
    for number in range(500):
        log.feed(f"line {number}\n".encode())
    assert (tmp_path / "engine.log").stat().st_size <= 1000
    assert (tmp_path / "engine.log.1").stat().st_size <= 1000
    assert sorted(p.name for p in tmp_path.iterdir()) == ["engine.log", "engine.log.1"]
    assert tail(tmp_path, 10) == [f"line {n}" for n in range(490, 500)]
    assert len(tail(tmp_path, 120)) == 120
    assert tail(tmp_path, 0) == []
    assert head(tmp_path).startswith("line ")


def test_progress_bars_become_lines(tmp_path: Path) -> None:
    log = Log(tmp_path / "engine.log")
    log.feed(b"\rCapturing:  10%|#\rCapturing:  20%|##\r")
    log.feed(b"\nnext\r")
    log.feed(b"\nlast")
    assert (tmp_path / "engine.log").read_text() == "\nCapturing:  10%|#\nCapturing:  20%|##\nnext\n"
    log.flush()
    assert (tmp_path / "engine.log").read_text().endswith("next\nlast")


def test_a_full_disk_drops_output_and_says_so_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    log, write = Log(tmp_path / "engine.log"), os.write

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("models_app.engines.guardian.os.write", full)
    log.feed(b"lost line\n")
    monkeypatch.setattr("models_app.engines.guardian.os.write", write)
    log.feed(b"kept line\n")
    assert (
        tmp_path / "engine.log"
    ).read_text() == "sardeenz: 10 bytes of output were lost, the disk was full\nkept line\n"


def test_log_whose_turn_fails_goes_on_when_there_is_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    log, open_file = Log(tmp_path / "engine.log", limit=20), os.open
    log.feed(b"a line of the first\n")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("models_app.engines.guardian.os.open", full)
    log.feed(b"lost\n")
    monkeypatch.setattr("models_app.engines.guardian.os.open", open_file)
    log.feed(b"kept line\n")
    said = "sardeenz: 5 bytes of output were lost, the disk was full\nkept line\n"
    assert (tmp_path / "engine.log").read_text() == said
    assert (tmp_path / "engine.log.1").read_text() == "a line of the first\n"


def test_what_a_nearly_full_disk_takes_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    log, write = Log(tmp_path / "engine.log"), os.write
    monkeypatch.setattr("models_app.engines.guardian.os.write", lambda fd, data: write(fd, data[:3]))
    log.feed(b"a whole line\n")
    assert (tmp_path / "engine.log").read_text() == "a whole line\n"
    assert log.dropped == 0


def test_secret_that_comes_in_two_halves_is_masked(tmp_path: Path) -> None:
    log = Log(tmp_path / "engine.log", secrets=(b"hf_0123456789",))
    log.feed(b"token hf_0123")
    log.flush()  # the engine is silent for a while
    log.feed(b"456789 was given, ph")
    log.flush()
    log.feed(b"ew\n")
    assert (tmp_path / "engine.log").read_text() == "token *** was given, phew\n"


def test_memory_of_a_start_is_read_with_kvcached_s_own_geometry() -> None:
    memory = read_memory(samples.GPU_START)
    assert memory.weights_bytes == 16396369920  # kvcached's exact figure, not vLLM's rounded one
    assert memory.graphs_bytes == round(0.53 * 1024**3)
    assert memory.capacity_bytes == 121000000000
    assert (memory.num_layers, memory.num_kv_buffers, memory.page_bytes) == (36, 2, 2 << 20)
    assert memory.bundle_bytes == 150994944  # as measured on a GPU for this shape
    assert memory.kv_tokens == 820576
    assert memory.kvcached_active is True
    assert memory.engine_core_pids == (12,)
    assert "worker_pids" not in memory.to_json()


def test_kvcached_that_was_asked_for_and_is_not_there_is_noticed() -> None:
    assert read_memory(samples.CPU_EAGER_START).kvcached_active is False
    assert read_memory("").kvcached_active is None


def test_engine_core_is_found_in_all_its_spellings() -> None:
    memory = read_memory(samples.CPU_EAGER_START)
    assert (memory.engine_core_pids, memory.worker_pids) == ((7101,), (7112,))
