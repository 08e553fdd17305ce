"""Limits, trims and sleep on a simulated engine, through the add-on's own code in both of its processes."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from gpus_app.probes.sim_ledger import GIB
from tests.models_app.simulator.engine import Engine, eventually, running

#: vLLM 0.24's geometry, in which everything was measured: 28 layers, K and V apart, 64 blocks of 16 tokens to a page.
BUNDLE = 117_440_512
MEASURED = {"vllm": "0.24.0"}


@pytest.fixture
def engine(tmp_path: Path):
    """An engine without prefix cache, of a few dozen bundles' worth of traffic a second."""
    with running(tmp_path, "--no-enable-prefix-caching", "--enforce-eager", **MEASURED) as engine:
        yield engine


def busy(engine: Engine, count: int = 8, tokens: int = 20_000):
    """Streams that hold one bundle each at least, and do not end during a test."""
    streams = [
        engine.stream(f"{number} " + "word " * 1800, max_tokens=tokens, ignore_eos=True) for number in range(count)
    ]
    eventually(lambda: engine.metric("num_requests_running") == count)
    return streams


def release(streams) -> None:
    for stream in streams:
        stream.hang_up()


def segment(engine: Engine) -> dict:
    return engine.kv("status")["segments"][0]


# -- with the add-on ---------------------------------------------------------------------------------------------


def test_idle_engine_gives_its_reserve_back_when_the_limit_asks(engine: Engine) -> None:
    release(busy(engine))
    eventually(lambda: engine.numbers()[1] == BUNDLE)
    assert engine.numbers()[2] == 10 * BUNDLE
    answer = engine.kv("limit", {"size": 3 * BUNDLE, "force": True})
    assert answer["status"] == "applied"
    assert engine.numbers()[0] == 3 * BUNDLE
    assert engine.footprint <= 3 * BUNDLE


def test_bytes_come_back_to_the_card_and_the_answer_says_how_many(engine: Engine) -> None:
    release(busy(engine))
    eventually(lambda: engine.numbers()[1:] == (BUNDLE, 10 * BUNDLE))
    before = engine.resident()
    answer = engine.kv("limit", {"size": 4 * BUNDLE, "force": True})
    assert answer["freed_bytes"] == before - engine.resident() > 0


def test_starved_engine_serves_when_the_limit_is_raised(engine: Engine) -> None:
    engine.kv("limit", {"size": 2 * BUNDLE, "force": True})
    stream = engine.stream("word " * 3000, max_tokens=5)
    eventually(lambda: segment(engine)["state"] == "starved")
    assert engine.health() == 200
    assert engine.metric("num_requests_running") == 0
    assert engine.metric("num_requests_waiting") == 1
    (stuck,) = engine.kv("status")["requests"]["stuck"]
    assert stuck["needs_bytes"] > 2 * BUNDLE
    assert stream.events == 0
    engine.kv("limit", {"size": 100 * BUNDLE})
    assert stream.finished().reasons == ["length"]


def test_stuck_request_can_be_aborted_and_frees_the_queue(engine: Engine) -> None:
    engine.kv("limit", {"size": 2 * BUNDLE, "force": True})
    big = engine.stream("word " * 3000, max_tokens=5)
    eventually(lambda: engine.metric("num_requests_waiting") == 1)
    small = engine.stream("hi", max_tokens=5)
    eventually(lambda: engine.metric("num_requests_waiting") == 2)
    assert small.events == 0
    assert len(engine.kv("abort_stuck", {})["aborted"]) == 1
    assert small.finished().reasons == ["length"]
    assert big.finished().reasons == ["abort"]


def test_limit_below_use_waits_and_fails_nobody(tmp_path: Path) -> None:
    with running(tmp_path, "--no-enable-prefix-caching", "--enforce-eager", speed=20.0, **MEASURED) as engine:
        streams = busy(engine, 8, 400)
        answer = engine.kv("limit", {"size": 4 * BUNDLE, "force": True})
        assert answer["status"] == "deferred"
        assert answer["overage_bytes"] > 0
        assert all(stream.finished().reasons == ["length"] for stream in streams)
        eventually(lambda: segment(engine)["state"] == "applied")
        assert engine.footprint <= 4 * BUNDLE


def test_reclaim_by_preemption_is_at_once_and_changes_no_answer(tmp_path: Path) -> None:
    with running(tmp_path, "--no-enable-prefix-caching", "--enforce-eager", speed=10.0, **MEASURED) as engine:
        streams = busy(engine, 8, 300)
        undisturbed = [stream._body["prompt"] for stream in streams]
        eventually(lambda: all(stream.events > 3 for stream in streams))
        answer = engine.kv("limit", {"size": 5 * BUNDLE, "force": True, "reclaim": "preempt"})
        assert answer["status"] == "applied"
        assert answer["preempted"]["requests"] > 0
        assert engine.footprint <= 5 * BUNDLE
        assert engine.metric("num_preemptions_total") >= answer["preempted"]["requests"]
        texts = [stream.finished().text for stream in streams]
        assert all(stream.reasons == ["length"] for stream in streams)
        engine.kv("limit", {"size": 100 * BUNDLE})
        preempted = engine.metric("num_preemptions_total")
        again = [engine.stream(prompt, max_tokens=300, ignore_eos=True) for prompt in undisturbed]
        assert [stream.finished().text for stream in again] == texts
        assert engine.metric("num_preemptions_total") == preempted


@pytest.mark.slow
def test_limit_above_capacity_is_clamped_and_never_corrupts(engine: Engine) -> None:
    capacity = segment(engine)["capacity_bytes"]
    engine.kv("limit", {"size": 20 * BUNDLE})
    answer = engine.kv("limit", {"size": "200g"})
    assert answer["clamped"] is True
    assert answer["limit_bytes"] <= capacity
    assert engine.numbers()[0] <= capacity
    streams = [engine.stream(f"{number} " + "word " * 2000, max_tokens=50) for number in range(30)]
    assert all(stream.finished().reasons for stream in streams)


def test_stranger_above_capacity_is_put_back(engine: Engine) -> None:
    total = engine.numbers()[0]
    engine.write_limit(total * 3)
    eventually(lambda: engine.kv("status") and engine.numbers()[0] <= total)
    assert engine.complete(max_tokens=5)["usage"]["completion_tokens"] == 5


def test_limits_that_mean_nothing_write_nothing(engine: Engine) -> None:
    before = engine.numbers()
    for size in ("5TiB5", "-1g", "nan", 0, True, [1], "1e400", ""):
        answer = engine.http.post("/kvcache/limit", json={"size": size})
        assert answer.status_code == 400, size
    answer = engine.http.post("/kvcache/limit", json={"size": "3g", "force": "false"})
    assert answer.status_code == 400
    assert engine.numbers() == before


def test_floor_refuses_and_hard_minimum_cannot_be_forced(engine: Engine) -> None:
    floors = engine.kv("safety_floor")
    below = floors["safety_floor_bytes"] - BUNDLE
    answer = engine.http.post("/kvcache/limit", json={"size_bytes": below})
    assert (answer.status_code, answer.json()["code"]) == (409, "below_safety_floor")
    assert engine.kv("limit", {"size_bytes": below, "force": True})["warnings"]
    answer = engine.http.post("/kvcache/limit", json={"size_bytes": BUNDLE, "force": True})
    assert (answer.status_code, answer.json()["code"]) == (409, "below_hard_minimum")


def test_full_context_is_served_at_the_full_context_floor(tmp_path: Path) -> None:
    arguments = ("--no-enable-prefix-caching", "--enforce-eager", "--max-model-len", "8192")
    with running(tmp_path, *arguments, **MEASURED) as engine:
        floor = engine.kv("safety_floor")["full_context_floor_bytes"]
        # Measured: nine bundles; the add-on keeps one more for fragmentation.
        assert floor in (9 * BUNDLE, 10 * BUNDLE)
        engine.kv("limit", {"size_bytes": floor})
        body = engine.http.post(
            "/v1/completions", json={"model": "tiny", "prompt": [7] * 8172, "max_tokens": 19, "ignore_eos": True}
        ).json()
        assert body["usage"]["completion_tokens"] == 19


def test_revisions_are_kept_in_order(engine: Engine) -> None:
    engine.kv("limit", {"size": 50 * BUNDLE, "revision": 7, "by": "ann"})
    answer = engine.http.post("/kvcache/limit", json={"size": 60 * BUNDLE, "revision": 6})
    assert (answer.status_code, answer.json()["code"]) == (409, "stale")
    answer = engine.http.post("/kvcache/limit", json={"size": 60 * BUNDLE, "revision": 7})
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert engine.kv("limit", {"size": 50 * BUNDLE, "revision": 7})["status"] == "applied"
    assert engine.kv("status")["last_change"]["revision"] == 7


def test_initial_limit_is_in_force_before_health_is_200(tmp_path: Path) -> None:
    limit = 40 * BUNDLE
    with running(tmp_path, env={"SARDEENZ_INITIAL_LIMIT_BYTES": str(limit)}, **MEASURED) as engine:
        assert engine.numbers()[0] == limit
        assert segment(engine)["effective_limit_bytes"] == limit
        log = engine.log()
        assert log.index("initial limit") < log.index("Starting vLLM server on")


def test_trim_measures_what_it_frees_and_leaves_the_limit(engine: Engine) -> None:
    release(busy(engine))
    eventually(lambda: engine.numbers()[1:] == (BUNDLE, 10 * BUNDLE))
    total = engine.numbers()[0]
    before = engine.resident()
    answer = engine.kv("trim", {})
    assert answer["freed_bytes"] == before - engine.resident() == 10 * BUNDLE
    assert engine.numbers() == (total, BUNDLE, 0)


def test_trim_while_requests_run_changes_no_answer(tmp_path: Path) -> None:
    with running(tmp_path, "--enforce-eager", speed=20.0, **MEASURED) as engine:
        alone = engine.complete("abc", max_tokens=200, ignore_eos=True)["choices"][0]["text"]
        stream = engine.stream("abc", max_tokens=200, ignore_eos=True)
        eventually(lambda: stream.events > 5)
        engine.kv("trim", {})
        engine.kv("reset_prefix_cache", {})
        assert stream.finished().text == alone


def test_prefix_cache_pins_memory_until_it_is_reset(tmp_path: Path) -> None:
    with running(tmp_path, "--enforce-eager", **MEASURED) as engine:
        for number in range(12):
            engine.complete(f"{number} " + "word " * 2000, max_tokens=2)
        used = engine.numbers()[1]
        assert used > 10 * BUNDLE
        assert segment(engine)["prefix_cached_bytes"] > 10 * BUNDLE
        answer = engine.kv("reset_prefix_cache", {})
        assert answer["freed_bytes"] > 0
        assert engine.numbers()[1] == BUNDLE


def test_second_request_hits_the_prefix_cache(tmp_path: Path) -> None:
    with running(tmp_path, "--enforce-eager") as engine:
        for _ in range(2):
            engine.complete("word " * 500, max_tokens=2)
        assert engine.metric("prefix_cache_hits_total") > 400


def test_deleted_segment_is_made_again_when_a_limit_is_written(engine: Engine) -> None:
    engine.segment.unlink()
    release(busy(engine, 2))
    assert engine.numbers()[0] in (0, segment(engine)["limit_bytes"])
    engine.kv("limit", {"size": 50 * BUNDLE})
    assert engine.numbers()[0] == 50 * BUNDLE


def test_usage_gauge_of_an_idle_engine_reads_full_when_the_limit_is_low(engine: Engine) -> None:
    engine.kv("limit", {"size": 3 * BUNDLE, "force": True})
    engine.complete("x", max_tokens=2)
    assert engine.metric("kv_cache_usage_perc") > 0.9
    assert engine.numbers()[1] == BUNDLE


def test_name_of_another_instance_is_refused(engine: Engine) -> None:
    answer = engine.http.post("/kvcache/limit", json={"size": "10g", "ipc_name": "someone-else"})
    assert answer.status_code == 404
    assert engine.kv("limit", {"size": "10g", "ipc_name": engine.ipc_name})["status"] == "applied"


def test_percent_is_of_the_engines_own_card(engine: Engine) -> None:
    answer = engine.kv("limit_percent", {"percent": 25})
    assert answer["limit_bytes"] == pytest.approx(20 * GIB, abs=BUNDLE)
    assert answer["gpu"]["uuid"] == engine.cards[0].uuid


# -- competing ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_grown_engine_fills_the_card_to_95_percent_and_squeezing_it_makes_room(tmp_path: Path) -> None:
    size = 24 * GIB
    options = {"gpu_bytes": size, "sim_dir": tmp_path / "gpus", **MEASURED}
    with running(tmp_path, "--no-enable-prefix-caching", "--enforce-eager", **options) as first:
        # A prompt of a bundle and more each: together far more than the card holds.
        streams = [
            first.stream(f"{number} " + "word " * 4000, max_tokens=20_000, ignore_eos=True) for number in range(90)
        ]
        eventually(lambda: first.metric("num_requests_waiting") > 0 and first.resident() > 0.9 * size)
        assert first.resident() <= 0.95 * size + BUNDLE
        assert first.health() == 200
        with Engine(tmp_path, "--enforce-eager", model="Qwen/Qwen3-8B", facts=None, **options) as second:
            assert second.start().ended() == 1
            assert "torch.OutOfMemoryError" in second.log()
        started = time.monotonic()
        answer = first.kv("limit", {"size": 30 * BUNDLE, "force": True, "reclaim": "preempt"})
        assert answer["status"] == "applied"
        assert answer["freed_bytes"] > 5 * GIB
        assert time.monotonic() - started < 20
        with running(tmp_path, "--enforce-eager", facts=None, model="Qwen/Qwen3-4B", **options) as second:
            assert second.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
        # Squeezed to a few bundles, they go on one after the other; none fails.
        assert all(stream.error is None and stream.reasons in ([], ["length"]) for stream in streams)
        release(streams)


# -- sleep -------------------------------------------------------------------------------------------------------


def test_sleep_frees_weights_and_kv_stays_but_for_the_trim(tmp_path: Path) -> None:
    with running(tmp_path, "--enable-sleep-mode", "--enforce-eager", **MEASURED) as engine:
        awake = engine.resident()
        engine.kv("sleep", {"level": 1})
        asleep = engine.resident()
        # Measured: 1,075,838,976 bytes beside the KV bundles.
        assert asleep - engine.footprint == 1_075_838_976
        assert engine.footprint == BUNDLE
        assert engine.health() == 200
        assert engine.kv("status")["sleep"]["level"] == 1
        assert engine.metric("engine_sleep_state", sleep_state="weights_offloaded") == 1
        stream = engine.stream(max_tokens=3)
        time.sleep(0.3)
        assert stream.events == 0
        engine.kv("wake", {})
        assert stream.finished().reasons == ["length"]
        assert engine.kv("status")["sleep"]["level"] is None
        assert asleep < engine.resident() <= awake


def test_sleep_at_level_2_needs_its_weights_read_again_and_the_add_on_does_it(tmp_path: Path) -> None:
    with running(tmp_path, "--enable-sleep-mode", "--enforce-eager", **MEASURED) as engine:
        before = engine.complete("x", max_tokens=5)["choices"][0]["text"]
        engine.kv("sleep", {"level": 2})
        assert engine.metric("engine_sleep_state", sleep_state="discard_all") == 1
        engine.kv("wake", {})
        assert engine.complete("x", max_tokens=5)["choices"][0]["text"] == before


def test_wake_on_a_full_card_fails_and_stays_asleep(tmp_path: Path) -> None:
    from gpus_app.probes.sim_ledger import Ledger

    with running(tmp_path, "--enable-sleep-mode", "--enforce-eager", **MEASURED) as engine:
        engine.kv("sleep", {"level": 1})
        ledger = Ledger(engine.sim_dir)
        uuid = engine.cards[0].uuid
        ledger.change_gpu(uuid, foreign_bytes=ledger.free_bytes(uuid) - 1000)
        answer = engine.http.post("/kvcache/wake", json={})
        assert answer.status_code == 500
        assert "out of memory" in answer.json()["error"]
        assert engine.kv("status")["sleep"]["level"] == 1
        ledger.change_gpu(uuid, foreign_bytes=0)
        assert engine.kv("wake", {})["status"] == "awake"
        assert engine.complete(max_tokens=2)["usage"]["completion_tokens"] == 2


def test_sleeping_busy_engine_with_abort_ends_its_requests_with_a_reason(tmp_path: Path) -> None:
    with running(tmp_path, "--enable-sleep-mode", "--enforce-eager", speed=5.0, **MEASURED) as engine:
        streams = busy(engine, 4)
        engine.kv("sleep", {"level": 1, "mode": "abort"})
        assert [stream.finished().reasons for stream in streams] == [["abort"]] * 4


def test_sleep_is_refused_without_its_flag(engine: Engine) -> None:
    assert engine.http.post("/kvcache/sleep", json={"level": 1}).status_code == 409


# -- engines without the add-on ----------------------------------------------------------------------------------


def test_stock_engine_does_not_shrink_while_idle_but_at_its_next_allocation(tmp_path: Path) -> None:
    with running(tmp_path, "--no-enable-prefix-caching", "--enforce-eager", faults="stock", **MEASURED) as engine:
        release(busy(engine))
        eventually(lambda: engine.numbers()[1:] == (BUNDLE, 10 * BUNDLE))
        assert engine.kv("status")["provider"] == "shm"
        assert engine.http.post("/kvcache/limit", json={"size": "1g"}).json()["code"] == "unavailable"
        engine.write_limit(3 * BUNDLE)
        time.sleep(0.5)
        assert engine.numbers() == (3 * BUNDLE, BUNDLE, 10 * BUNDLE)
        engine.complete("x", max_tokens=2)
        eventually(lambda: engine.footprint <= 3 * BUNDLE)


@pytest.mark.slow
def test_stock_engine_that_is_starved_stays_so_when_the_limit_is_raised(tmp_path: Path) -> None:
    with running(tmp_path, "--no-enable-prefix-caching", "--enforce-eager", faults="stock", **MEASURED) as engine:
        engine.write_limit(2 * BUNDLE)
        time.sleep(0.3)
        engine.complete("x", max_tokens=2)
        engine.http.timeout = 1.5
        stuck = {"model": "tiny", "prompt": [7] * 3000, "max_tokens": 5}
        with pytest.raises(httpx.ReadTimeout):
            engine.http.post("/v1/completions", json=stuck)
        engine.write_limit(100 * BUNDLE)
        with pytest.raises(httpx.ReadTimeout):
            engine.http.post("/v1/completions", json=stuck)
        assert engine.health() == 200
        # With nobody stuck at the head, a small request allocates, which applies the limit; everything moves again.
        engine.http.timeout = 30.0
        eventually(lambda: engine.metric("num_requests_waiting") == 0)
        engine.complete("x", max_tokens=2)
        assert engine.http.post("/v1/completions", json=stuck).status_code == 200


def test_engine_without_the_add_on_has_no_endpoints(tmp_path: Path) -> None:
    with running(tmp_path, faults="no_addon") as engine:
        for method, path in (("GET", "status"), ("POST", "limit"), ("POST", "trim")):
            answer = engine.http.request(method, f"/kvcache/{path}")
            assert (answer.status_code, answer.json()) == (404, {"detail": "Not Found"})
        assert "sardeenz" not in engine.log()


@pytest.mark.slow
def test_overshoot_kills_a_stock_engine(tmp_path: Path) -> None:
    options = {"gpu_bytes": 200 * GIB, **MEASURED}
    arguments = ("--no-enable-prefix-caching", "--enforce-eager", "--kv-cache-memory-bytes", str(50 * BUNDLE))
    with running(tmp_path, *arguments, "--max-model-len", "4096", faults="stock,overshoot", **options) as engine:
        engine.write_limit(120 * BUNDLE)
        time.sleep(0.3)
        streams = [
            engine.stream(f"{number} " + "word " * 3000, max_tokens=900, ignore_eos=True) for number in range(60)
        ]
        assert engine.ended() == 0
        assert "IndexError: list index out of range" in engine.log()
        release(streams)


# -- an engine with the pull request's own endpoints -------------------------------------------------------------


@pytest.fixture
def pr324(tmp_path: Path):
    with running(
        tmp_path, "--no-enable-prefix-caching", "--enforce-eager", faults="pr324", token=False, **MEASURED
    ) as engine:
        yield engine


def test_pull_requests_segment_has_32_bytes_and_its_endpoints_no_guard(pr324: Engine) -> None:
    assert pr324.segment.stat().st_size == 32
    status = httpx.get(f"http://127.0.0.1:{pr324.port}/kvcache/status", trust_env=False).json()
    own = next(row for row in status["segments"] if row["ipc_name"] == pr324.ipc_name)
    assert status["self_ipc_name"] == pr324.ipc_name
    assert own["min_safe_limit"] == 2 * BUNDLE
    assert "api" not in status


def test_pull_requests_limit_clamps_to_its_floor_and_trim_only_lowers_the_limit(pr324: Engine) -> None:
    release(busy(pr324))
    eventually(lambda: pr324.numbers()[1:] == (BUNDLE, 10 * BUNDLE))
    answer = pr324.http.post("/kvcache/limit", json={"size": "1m"}).json()
    assert (answer["clamped"], answer["new_total_size"]) == (True, 2 * BUNDLE)
    pr324.http.post("/kvcache/limit", json={"size": "10g"})
    before = pr324.numbers()
    answer = pr324.http.post("/kvcache/trim", json={}).json()
    assert answer["new_limit"] == 2 * BUNDLE
    assert answer["freed_estimate"] == before[0] - 2 * BUNDLE
    assert pr324.numbers() == (2 * BUNDLE, BUNDLE, 10 * BUNDLE)


@pytest.mark.slow
def test_pull_requests_engine_dies_of_a_limit_below_use(tmp_path: Path) -> None:
    arguments = ("--no-enable-prefix-caching", "--enforce-eager", "--block-size", "128")
    with running(tmp_path, *arguments, faults="pr324", token=False, speed=1.0, **MEASURED) as engine:
        # The next block of this stream is two seconds away, so the next allocation is the newcomer's.
        stream = engine.stream([7] * (128 * 60 + 1), max_tokens=4000, ignore_eos=True)
        eventually(lambda: stream.events > 1)
        engine.http.post("/kvcache/limit", json={"size_bytes": engine.numbers()[1] // 2})
        time.sleep(0.3)
        newcomer = engine.stream([8] * 5000, max_tokens=5)
        assert engine.ended() == 0
        assert "ValueError: Cannot get" in engine.log()
        release([stream, newcomer])
