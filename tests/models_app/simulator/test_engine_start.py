"""How a start looks from outside: stages, log lines, processes, memory, and the ways in which it fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpus_app.probes.sim_ledger import GIB, Ledger
from tests.models_app.simulator.engine import ROOT, Engine, alive, eventually, running
from tests.models_app.simulator.test_facts import write_model

#: In vLLM's order. What is no GPU's business (banner, routes) is left out.
STAGES = (
    r"non-default args",
    r"Resolved architecture: Qwen3ForCausalLM",
    r"Applying \d+ patches for vllm",
    r"Successfully patched vllm: ",
    r"Initializing a V1 LLM engine \(v0\.30\.0\)",
    r"Starting to load model ",
    r"Loading safetensors checkpoint shards:   0% Completed \| 0/1 \[",
    r"Loading safetensors checkpoint shards: 100% Completed \| 1/1 \[",
    r"Loading weights took [\d.]+ seconds",
    r"Model loading took [\d.]+ GiB memory and [\d.]+ seconds",
    r"Dynamo bytecode transform time: [\d.]+ s",
    r"torch\.compile took [\d.]+ s in total",
    r"Using kvcached process-local KV capacity: budget=\d+",
    r"GPU KV cache size: [\d,]+ tokens",
    r"Capturing CUDA graphs \(mixed prefill-decode, PIECEWISE\):   0%\|",
    r"Capturing CUDA graphs \(decode, FULL\): 100%\|",
    r"Graph capturing finished in \d+ secs, took [\d.]+ GiB",
    r"init engine \(profile, create kv cache, warmup model\) took [\d.]+ s",
    r"Init C\+\+ PageAllocator: num_layers=28, mem_size_per_layer=\d+MB, total_mem_size=\d+MB, page_size=2MB",
    r"sardeenz: add-on in pid \d+, vLLM 0\.30\.0, kvcached 0\.1\.6",
    r"Starting vLLM server on http://127\.0\.0\.1:\d+",
    r"Application startup complete\.",
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory):
    with running(tmp_path_factory.mktemp("start")) as engine:
        yield engine


def test_stages_are_logged_in_vllms_order(engine: Engine) -> None:
    log, position = engine.log(), 0
    for pattern in STAGES:
        match = re.compile(pattern).search(log, position)
        assert match, f"{pattern} is missing after\n{log[max(0, position - 300) : position]}"
        position = match.end()


def test_lines_carry_vllms_prefixes(engine: Engine) -> None:
    lines = engine.log().splitlines()
    line = next(line for line in lines if "Model loading took" in line)
    assert re.fullmatch(
        rf"\(EngineCore pid={engine.core_pid}\) INFO \d\d-\d\d \d\d:\d\d:\d\d \[\w+\.py:\d+\] Model loading took .*",
        line,
    )
    assert any(
        line.startswith(f"(APIServer pid={engine.pid}) INFO:     Application startup complete.") for line in lines
    )


def test_progress_bar_rewrites_its_line(engine: Engine) -> None:
    assert "\rCapturing CUDA graphs" in engine.log_path.read_bytes().decode()


def test_processes_look_like_vllms(engine: Engine) -> None:
    assert len(engine.pids()) == 2
    core = engine.core_pid
    assert Path(f"/proc/{core}/comm").read_text().strip() == "VLLM::EngineCor"
    assert Path(f"/proc/{core}/cmdline").read_bytes().replace(b"\0", b" ").strip() == b"VLLM::EngineCore"
    assert engine.ipc_name.encode() in Path(f"/proc/{core}/environ").read_bytes()
    assert os.getpgid(core) == os.getsid(core) == engine.pid
    status = Path(f"/proc/{core}/status").read_text()
    assert f"PPid:\t{engine.pid}\n" in status


def test_core_holds_memory_and_segment_and_the_api_server_only_reads(engine: Engine) -> None:
    holders = Ledger(engine.sim_dir).read()[engine.cards[0].uuid]
    assert [(row.pid, row.name) for row in holders] == [(engine.core_pid, "VLLM::EngineCore")]

    def modes(pid: int) -> list[str]:
        found = []
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if entry.readlink() == engine.segment:
                flags = int(re.search(r"flags:\s+(\d+)", (entry.parents[1] / "fdinfo" / entry.name).read_text())[1], 8)  # type: ignore[index]
                found.append(("r", "w", "rw")[flags & 3])
        return found

    assert modes(engine.core_pid) == ["rw"]
    assert modes(engine.pid) == ["r"]


def test_idle_segment_is_one_bundle_and_five_in_reserve(engine: Engine) -> None:
    bundle = 28 * 2 * 1024**2
    total, used, prealloc = engine.numbers()
    assert (used, prealloc) == (bundle, 5 * bundle)
    assert total == engine.kv("status")["segments"][0]["total_size"]
    baseline = engine.resident() - used - prealloc
    # Weights, context and workspace of the measured card came to 4.5 GB for a model of 1.5 GB.
    assert 3.5e9 < baseline < 5.5e9


def test_memory_of_the_whole_engine_stays_small(engine: Engine) -> None:
    total = 0
    for pid in engine.pids():
        found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        assert found
        total += int(found[1])
    assert total < 70 * 1024


def test_nothing_listens_before_the_engine_is_ready(tmp_path: Path) -> None:
    with Engine(tmp_path, speed=1.0) as engine:
        engine.start().wait_log("Starting to load model")
        assert engine.health() is None


def test_tensor_parallel_engine_takes_the_same_on_each_card(tmp_path: Path) -> None:
    with running(tmp_path, "--tensor-parallel-size", "2", gpus=2) as engine:
        ledger = Ledger(engine.sim_dir)
        first, second = (ledger.used_bytes(card.uuid) for card in engine.cards)
        assert first == second > 0
        assert engine.kv("status")["segments"][0]["tp_multiplier"] == 2


@pytest.mark.slow
def test_loading_takes_longer_with_larger_weights_and_with_the_fault(tmp_path: Path) -> None:
    def loading(**options: object) -> float:
        with running(tmp_path, "--enforce-eager", speed=20.0, **options) as engine:
            return float(re.search(r"Model loading took .* memory and ([\d.]+) seconds", engine.log())[1])  # type: ignore[index]

    small = loading()
    assert loading(model="Qwen/Qwen3-32B", facts=None) > small
    assert loading(faults="slow_load:20") > 5 * small


@pytest.mark.slow
def test_two_engines_share_a_card(tmp_path: Path) -> None:
    with running(tmp_path) as one, running(tmp_path) as other:
        holders = Ledger(one.sim_dir).read()[one.cards[0].uuid]
        assert {row.pid for row in holders} == {one.core_pid, other.core_pid}


# -- failures ----------------------------------------------------------------------------------------------------


def failing(folder: Path, *arguments: str, **options: object) -> tuple[int, str]:
    with Engine(folder, *arguments, **options) as engine:  # type: ignore[arg-type]
        code = engine.start().ended()
        assert not engine.pids()
        assert not engine.segment.exists()
        return code, engine.log()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--no-such-flag", "3"), 2, "vllm: error: unrecognized arguments: --no-such-flag 3"),
        (("--max-num-seqs", "banana"), 2, "argument --max-num-seqs: invalid int value: 'banana'"),
        (("--max-model-len", "99999"), 1, "User-specified max_model_len (99999) is greater than the derived"),
        (("--kv-cache-memory-bytes", "100M"), 1, "To serve at least one request with the models's max seq len (40960)"),
    ],
)
def test_start_fails_as_vllm_does(tmp_path: Path, arguments: tuple[str, ...], code: int, words: str) -> None:
    found, log = failing(tmp_path, *arguments)
    assert found == code
    assert words in log


def test_wrong_path_and_missing_weights_fail_as_in_vllm(tmp_path: Path) -> None:
    code, log = failing(tmp_path, model="/models/does-not-exist", facts=None)
    assert code == 1
    assert "HFValidationError: Repo id must be in the form" in log
    code, log = failing(tmp_path, model=write_model(tmp_path / "m"), facts=None)
    assert code == 1
    assert "RuntimeError: Cannot find any model weights with" in log
    assert log.rstrip().endswith("Failed core proc(s): {'EngineCore': 1}")


def test_port_in_use_is_a_bare_traceback_before_any_load(tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        code, log = failing(tmp_path, port=engine.port)
    assert code == 1
    assert "OSError: [Errno 98] Address already in use" in log
    assert "Initializing a V1 LLM engine" not in log


@pytest.mark.slow
def test_old_vllm_shares_its_port_silently(tmp_path: Path) -> None:
    with running(tmp_path, vllm="0.24.0") as one, Engine(tmp_path, vllm="0.24.0", port=one.port) as two:
        two.start().wait_log("Application startup complete")
        assert two.returncode is None


def test_full_card_fails_with_torchs_words_and_leaves_the_neighbour_alone(tmp_path: Path) -> None:
    with running(tmp_path, gpu_bytes=16 * GIB) as engine:
        before = engine.resident()
        code, log = failing(tmp_path, model="Qwen/Qwen3-14B", facts=None, sim_dir=engine.sim_dir)
        assert code == 1
        assert "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization" in log
        pattern = (
            r"torch\.OutOfMemoryError: CUDA out of memory\. Tried to allocate [\d.]+ [MG]iB\. GPU 0 has a total "
            r"capacity of 16\.00 GiB of which [\d.]+ [MG]iB is free\. Process \d+ has [\d.]+ GiB memory in use\."
        )
        assert re.search(pattern, log)
        assert log.rstrip().endswith("Failed core proc(s): {'EngineCore': 1}")
        assert engine.resident() == before
        assert engine.complete(max_tokens=3)["usage"]["completion_tokens"] == 3


def test_past_95_percent_of_the_card_a_start_waits_for_its_first_bundle_without_end(tmp_path: Path) -> None:
    with running(tmp_path, gpu_bytes=40 * GIB) as first:
        ledger = Ledger(first.sim_dir)
        uuid = first.cards[0].uuid
        with Engine(tmp_path, sim_dir=first.sim_dir) as second:
            room = 4 * GIB + 512 * 1024**2
            ledger.change_gpu(uuid, foreign_bytes=ledger.free_bytes(uuid) - room)
            second.start().wait_log("Waiting for physical KV capacity to reserve null block")
            assert second.health() is None
            ledger.change_gpu(uuid, foreign_bytes=0)
            eventually(lambda: second.health() == 200)


def test_without_kvcached_the_cache_is_reserved_and_a_second_engine_is_refused(tmp_path: Path) -> None:
    with running(tmp_path, kvcached=False) as engine:
        assert engine.resident() > 0.85 * 80 * GIB
        assert not engine.segment.exists()
        assert "patched vllm" not in engine.log()
        assert re.search(r"Available KV cache memory: [\d.]+ GiB", engine.log())
        assert engine.http.post("/kvcache/limit", json={"size": "1g"}).status_code == 409
        code, log = failing(tmp_path, kvcached=False)
    assert code == 1
    assert re.search(
        r"ValueError: Free memory on device cuda:0 \([\d.]+/80\.00 GiB\) on startup is less than desired GPU memory "
        r"utilization \(0\.92, 73\.60 GiB\)\.",
        log,
    )


def test_kvcached_that_is_not_there_although_asked_for_is_a_static_reservation(tmp_path: Path) -> None:
    with running(tmp_path, faults="kvcached_inactive") as engine:
        assert not engine.segment.exists()
        status = engine.kv("status")
        assert status["kvcached_active"] is False
        assert any("ENABLE_KVCACHED is set but kvcached has not taken over" in text for text in status["warnings"])
        assert engine.resident() > 0.85 * 80 * GIB


@pytest.mark.parametrize(
    ("vllm", "env", "words"),
    [
        ("0.33.0", {}, "kvcached has no runner adapter for vLLM 0.33.0"),
        (
            "0.24.0",
            {"VLLM_USE_V2_MODEL_RUNNER": "1"},
            "kvcached does not support the vLLM 0.24.0 Model Runner V2 yet; set VLLM_USE_V2_MODEL_RUNNER=0",
        ),
    ],
)
def test_pairs_that_kvcached_refuses_do_not_start(tmp_path: Path, vllm: str, env: dict[str, str], words: str) -> None:
    code, log = failing(tmp_path, vllm=vllm, env=env)
    assert code == 1
    assert f"KVCachedConfigError: {words}" in log


def test_bad_middleware_is_noticed_only_after_the_engine_is_up(tmp_path: Path) -> None:
    code, log = failing(tmp_path, "--middleware", "no_such_module.Door")
    assert code == 1
    assert "init engine (profile" in log
    assert "ModuleNotFoundError: No module named 'no_such_module'" in log


@pytest.mark.parametrize("stage", ["loading_weights", "compiling", "capturing_graphs", "warming_up", "serving"])
def test_crash_at_a_stage_ends_with_code_1(tmp_path: Path, stage: str) -> None:
    code, log = failing(tmp_path, faults=f"crash_at:{stage}")
    assert code == 1
    assert "EngineCore failed to start." in log
    assert f"RuntimeError: simulated fault: crash while {stage.replace('_', ' ')}" in log


def test_out_of_memory_can_be_ordered_on_an_empty_card(tmp_path: Path) -> None:
    code, log = failing(tmp_path, faults="oom_at_load")
    assert code == 1
    assert "torch.OutOfMemoryError: CUDA out of memory." in log


def test_unknown_fault_does_not_pass_for_a_working_one(tmp_path: Path) -> None:
    code, log = failing(tmp_path, faults="hnag")
    assert code == 2
    assert "unknown fault hnag" in log


def test_broken_card_cannot_be_started_on(tmp_path: Path) -> None:
    with Engine(tmp_path) as engine:
        Ledger(engine.sim_dir).change_gpu(engine.cards[0].uuid, fault="xid:79")
        assert engine.start().ended() == 1


# -- signals while starting --------------------------------------------------------------------------------------


def test_sigterm_in_the_first_moments_ends_the_process_at_once(tmp_path: Path) -> None:
    with Engine(tmp_path, speed=0.2) as engine:
        engine.start()
        eventually(lambda: b"models_app.simulator" in Path(f"/proc/{engine.pid}/cmdline").read_bytes())
        engine.signal(signal.SIGTERM)
        assert engine.ended() == -signal.SIGTERM


def test_sigterm_while_the_engine_starts_is_ignored_and_a_second_one_ends_it(tmp_path: Path) -> None:
    with Engine(tmp_path, speed=3.0) as engine:
        engine.start().wait_log("Starting to load model")
        engine.signal(signal.SIGTERM)
        eventually(lambda: engine.health() == 200)
        engine.signal(signal.SIGTERM)
        assert engine.ended() == 0
        eventually(lambda: not engine.pids())


@pytest.mark.slow
def test_sigterm_while_starting_can_hang_the_start_until_sigkill(tmp_path: Path) -> None:
    with Engine(tmp_path, speed=3.0, faults="sigterm_hang") as engine:
        engine.start().wait_log("Starting to load model")
        engine.signal(signal.SIGTERM)
        engine.wait_log("Init C")
        engine.signal(signal.SIGTERM)
        assert engine.health() is None
        engine.signal(signal.SIGINT)
        assert engine.ended() == -signal.SIGINT
        assert not engine.pids()
        assert not engine.segment.exists()


def test_help_of_the_module_and_version(tmp_path: Path) -> None:
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "models_app.simulator", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert call("--version").stdout.strip() == "0.30.0"
    assert call("chat").returncode == 2
    assert alive(os.getpid())
