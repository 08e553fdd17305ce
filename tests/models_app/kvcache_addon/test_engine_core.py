"""The plug-in inside vLLM's processes: where it takes hold, what it says, and that it breaks nothing without
kvcached."""

from __future__ import annotations

import multiprocessing
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models_app.kvcache_addon import engine_core
from models_app.kvcache_addon.engine_core import Addon, addon_of, register, sardeenz_op
from models_app.kvcache_addon.wire import LimitOrder
from tests.models_app.kvcache_addon.fake_kvcached import FakeManager
from tests.models_app.kvcache_addon.fake_vllm import Engine

Make = Callable[..., tuple[Engine, Addon]]
BUNDLE = 2 * 2**20 * 28 * 2


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that stands for ``vllm.v1.engine.core``."""

    class EngineCore:
        pass

    class EngineCoreProc(EngineCore):
        def run_busy_loop(self) -> str:
            return f"served {vars(self)['_sardeenz']}"

    class DPEngineCoreProc(EngineCoreProc):
        def run_busy_loop(self) -> str:
            return "served in parallel"

    module: Any = types.ModuleType(engine_core.CORE_MODULE)
    module.EngineCore, module.EngineCoreProc, module.DPEngineCoreProc = EngineCore, EngineCoreProc, DPEngineCoreProc
    package: Any = types.ModuleType("vllm.v1.engine")
    package.core = module
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", package)
    monkeypatch.setitem(sys.modules, engine_core.CORE_MODULE, module)

    def made(engine: Any) -> None:
        vars(engine)["_sardeenz"] = "with add-on"

    monkeypatch.setattr(engine_core, "addon_of", made)
    return module


def test_registering_adds_one_method_and_starts_before_serving(core: Any) -> None:
    register()
    assert core.EngineCore.sardeenz_op is sardeenz_op
    assert core.EngineCoreProc().run_busy_loop() == "served with add-on"
    assert core.DPEngineCoreProc().run_busy_loop() == "served in parallel"


def test_registering_twice_wraps_once(core: Any) -> None:
    register()
    wrapped = core.EngineCoreProc.run_busy_loop
    register()
    assert core.EngineCoreProc.run_busy_loop is wrapped


def test_workers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has no EngineCore and must not import one."""
    monkeypatch.delitem(sys.modules, engine_core.CORE_MODULE, raising=False)
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    register()
    assert engine_core.CORE_MODULE not in sys.modules


def test_model_inspector_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, engine_core.CORE_MODULE, raising=False)
    main: Any = types.ModuleType("__main__")
    main.__spec__ = types.SimpleNamespace(name=engine_core.INSPECTOR)
    monkeypatch.setitem(sys.modules, "__main__", main)
    register()
    assert engine_core.CORE_MODULE not in sys.modules


def test_add_on_is_made_once_per_engine(engine_with_pool: Make) -> None:
    engine, addon = engine_with_pool()
    assert addon_of(engine) is addon


def test_start_says_in_one_line_what_was_found(
    engine_with_pool: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SARDEENZ_INITIAL_LIMIT_BYTES", str(20 * BUNDLE))
    caplog.set_level("INFO", "vllm.sardeenz")
    engine_with_pool()
    line = caplog.messages[-1]
    for part in ("segment sz-test-i1-a1", "bundle 112.00 MB", "capacity 10.94 GB", "initial limit 2.19 GB applied"):
        assert part in line


def test_engine_without_kvcached_answers_and_offers_no_limits(shm: Path) -> None:
    engine = Engine(None)
    engine.add(100, 5)
    status = sardeenz_op(engine, "status")
    assert (status["kvcached_active"], status["provider"]) == (False, "none")
    assert status["requests"]["waiting"] == 1
    for op in ("trim", "floor", "abort_stuck"):
        assert sardeenz_op(engine, op)["refused"]["code"] == "unavailable"
    order = LimitOrder(10 * BUNDLE).to_json()
    assert sardeenz_op(engine, "limit", order)["refused"]["status"] == 409
    assert sardeenz_op(engine, "reset_prefix_cache")["status"] == "reset"


def test_kvcached_asked_for_but_not_there_is_named(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D1: without its .pth file vLLM runs as if nothing had been asked, with static memory."""
    monkeypatch.setenv("ENABLE_KVCACHED", "true")
    status = sardeenz_op(Engine(None), "status")
    assert ".pth" in status["warnings"][0]


def test_older_kvcached_gets_no_limit(shm: Path) -> None:
    """A7: on 0.1.5 a limit below use ends the engine."""
    manager = FakeManager(shm)
    del manager.in_shrink
    engine = Engine(manager)
    status = sardeenz_op(engine, "status")
    assert status["kvcached_active"] is False
    assert "0.1.6" in status["warnings"][0]
    assert "in_shrink" in sardeenz_op(engine, "limit", LimitOrder(10 * BUNDLE).to_json())["refused"]["error"]


def test_data_parallel_ranks_get_no_limit(shm: Path) -> None:
    """C14: they would all share one segment."""
    engine = Engine(FakeManager(shm))
    engine.vllm_config.parallel_config.data_parallel_size = 2
    refused = sardeenz_op(engine, "limit", LimitOrder(10 * BUNDLE).to_json())["refused"]
    assert (refused["code"], "data parallel" in refused["error"]) == ("unavailable", True)
    assert sardeenz_op(engine, "status")["used_bytes"] == BUNDLE


def test_failing_take_over_never_fails_the_start(
    shm: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SARDEENZ_INITIAL_LIMIT_BYTES", str(20 * BUNDLE))
    manager = FakeManager(shm)

    def broken(_size: int) -> bool:
        raise RuntimeError("KV unmap could not complete")

    monkeypatch.setattr(manager, "resize", broken)
    engine = Engine(manager)
    status = sardeenz_op(engine, "status")
    assert "could not be taken over" in status["warnings"][0]
    assert status["wanted_limit_bytes"] is None


def test_failed_allocator_is_told_by_status(engine_with_pool: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, addon = engine_with_pool()
    assert engine.manager is not None

    def failed() -> Any:
        raise RuntimeError("KV unmap could not complete")

    monkeypatch.setattr(engine.manager.page_allocator, "get_page_state", failed)
    status = addon.status()
    assert "restart the engine" in status["warnings"][0]
    assert status["kvcached_active"] is True


def test_trim_gives_back_the_reserve_and_leaves_the_limit(engine_with_pool: Make) -> None:
    """B1: used 1, reserve 5: what is freed is what was measured."""
    engine, addon = engine_with_pool()
    assert engine.manager is not None
    first = addon.trim()
    assert (first["before_bytes"], first["after_bytes"], first["limit_bytes"]) == (6 * BUNDLE, BUNDLE, 100 * BUNDLE)
    engine.manager.page_allocator.refill()
    assert addon.trim()["before_bytes"] == 6 * BUNDLE


@pytest.mark.parametrize("batches", [1, 2])
def test_trim_under_load_changes_no_answer(engine_with_pool: Make, batches: int) -> None:
    """B4."""
    engine, addon = engine_with_pool(caching=True, batches=batches)
    requests = [engine.add(700, 150) for _ in range(8)]
    while engine.scheduler.has_requests():
        engine.steps(9)
        addon.trim()
    engine.finish_all()
    assert [request.output for request in requests] == [list(range(150))] * 8
    assert addon.trim()["after_bytes"] == BUNDLE


def test_retired_pages_are_given_back_behind_the_workers_barrier(engine_with_pool: Make) -> None:
    engine, addon = engine_with_pool(batches=2, caching=True)
    assert engine.manager is not None
    for _ in range(4):
        engine.add(2000, 3)
    engine.finish_all()
    barriers = engine.manager.barriers
    addon.trim()
    assert engine.manager.barriers == barriers + 1
    assert addon.status()["retired_bytes"] == 0


def test_reset_of_the_prefix_cache_is_measured(engine_with_pool: Make) -> None:
    engine, addon = engine_with_pool(caching=True)
    for _ in range(8):
        engine.add(2000, 3)
    engine.finish_all()
    answer = addon.reset_prefix_cache()
    assert answer["status"] == "reset"
    assert answer["freed_bytes"] == answer["before_bytes"] - answer["after_bytes"] > 0
    assert answer["after_bytes"] == 11 * BUNDLE  # the null block's bundle and a full reserve


def test_unknown_operation_is_refused(engine_with_pool: Make) -> None:
    engine, _ = engine_with_pool()
    assert sardeenz_op(engine, "format_disk")["refused"]["status"] == 400


def test_preempting_by_number_is_for_self_tests_only(engine_with_pool: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_with_pool()
    assert sardeenz_op(engine, "preempt", {"requests": 1})["refused"]["status"] == 403
    monkeypatch.setenv("SARDEENZ_ADDON_SELFTEST", "1")
    assert sardeenz_op(engine, "preempt", {"requests": 1})["requests"] == 0


def test_immediate_floor_is_what_running_requests_hold(engine_with_pool: Make) -> None:
    engine, addon = engine_with_pool(caching=True)
    engine.add(2000, 3)
    engine.finish_all()
    idle = addon.floor()["immediate_floor_bytes"]
    engine.add(2000, 300)
    engine.steps(4)
    assert idle <= 2 * BUNDLE
    assert addon.floor()["immediate_floor_bytes"] >= 2 * BUNDLE
