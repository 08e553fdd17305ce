"""Sleep and wake: known level, right order, no half-awake serving, nothing done twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from models_app.kvcache_addon.engine_core import Addon, sardeenz_op
from models_app.kvcache_addon.vllm_backend import VllmBackend
from models_app.kvcache_addon.wire import Refused
from tests.models_app.kvcache_addon.fake_vllm import Engine, PauseState

Make = Callable[..., tuple[Engine, Addon]]
BUNDLE = 2 * 2**20 * 28 * 2


class Client:
    """vLLM's engine client, with the engine at its side."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.calls: list[Any] = []
        self.sleep_error = ""
        self.engine_core = self
        self.gate: asyncio.Event | None = None

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        assert method == "sardeenz_op"
        await asyncio.sleep(0)
        return sardeenz_op(self.engine, *args)

    async def sleep(self, level: int, mode: str) -> None:
        self.calls.append(("sleep", level, mode))
        if self.gate is not None:
            await self.gate.wait()
        self.engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        if mode == "abort":
            self.engine.scheduler.finish_requests(list(self.engine.scheduler.requests), 6)  # type: ignore[arg-type]
        if self.sleep_error:
            raise RuntimeError(self.sleep_error)
        self.engine.model_executor.sleep(level)

    async def wake_up(self, tags: Any) -> None:
        self.calls.append(("wake_up", tags))
        self.engine.scheduler.set_pause_state(PauseState.UNPAUSED)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(("pause", mode, clear_cache))
        self.engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)

    async def resume_generation(self) -> None:
        self.calls.append(("resume",))
        self.engine.scheduler.set_pause_state(PauseState.UNPAUSED)


@pytest.fixture
def asleep_or_awake(engine_with_pool: Make) -> tuple[Engine, Client, VllmBackend]:
    """An engine, its client and the backend over both."""
    engine, _ = engine_with_pool()
    client = Client(engine)
    return engine, client, VllmBackend(SimpleNamespace(engine_client=client, vllm_config=engine.vllm_config))


Trio = tuple[Engine, Client, VllmBackend]


async def test_sleeping_trims_the_pool_and_measures(asleep_or_awake: Trio) -> None:
    """E8: KV bundles do not sleep by themselves; the limit is kept."""
    engine, _, backend = asleep_or_awake
    answer = await backend.sleep(1, "wait")
    assert (answer["status"], answer["level"], answer["already"]) == ("asleep", 1, False)
    assert (answer["before_bytes"], answer["after_bytes"], answer["freed_bytes"]) == (6 * BUNDLE, BUNDLE, 5 * BUNDLE)
    facts = await backend.status()
    assert facts["sleep"]["level"] == 1
    assert facts["limit_bytes"] == 100 * BUNDLE
    assert engine.model_executor.calls == [("sleep", 1)]


async def test_sleeping_twice_is_sleeping_once(asleep_or_awake: Trio) -> None:
    engine, _, backend = asleep_or_awake
    await backend.sleep(1, "wait")
    assert (await backend.sleep(1, "wait"))["already"] is True
    assert engine.model_executor.calls == [("sleep", 1)]
    with pytest.raises(Refused, match="wake it first"):
        await backend.sleep(2, "wait")


async def test_wake_from_level_1_reads_no_weights(asleep_or_awake: Trio) -> None:
    engine, client, backend = asleep_or_awake
    await backend.sleep(1, "wait")
    assert (await backend.wake(None))["status"] == "awake"
    assert engine.model_executor.calls[1:] == [("wake_up", "weights"), ("wake_up", "kv_cache")]
    assert client.calls[-1] == ("wake_up", None)
    assert (await backend.status())["sleep"]["level"] is None


async def test_wake_from_level_2_reads_the_weights_before_the_kv_cache(asleep_or_awake: Trio) -> None:
    """A plain wake from level 2 serves from weights that are gone."""
    engine, _, backend = asleep_or_awake
    await backend.sleep(2, "wait")
    await backend.wake(None)
    assert engine.model_executor.calls[1:] == [("wake_up", "weights"), "reload_weights", ("wake_up", "kv_cache")]


async def test_sleep_of_unknown_level_is_woken_as_level_2(asleep_or_awake: Trio) -> None:
    engine, _, backend = asleep_or_awake
    engine.model_executor.sleep(1)  # by somebody else
    assert (await backend.status())["sleep"]["level"] == 2
    await backend.wake(None)
    assert "reload_weights" in engine.model_executor.calls


async def test_partial_wake_does_not_serve(asleep_or_awake: Trio) -> None:
    engine, client, backend = asleep_or_awake
    await backend.sleep(1, "wait")
    answer = await backend.wake(("weights",))
    assert (answer["status"], answer["asleep_tags"]) == ("partly_awake", ["kv_cache"])
    assert not any(call[0] == "wake_up" for call in client.calls)
    assert engine.scheduler.pause_state == PauseState.PAUSED_NEW
    with pytest.raises(Refused):
        await backend.resume()
    assert (await backend.wake(None))["status"] == "awake"
    assert engine.scheduler.pause_state == PauseState.UNPAUSED


async def test_waking_the_awake_does_no_harm(asleep_or_awake: Trio) -> None:
    engine, _, backend = asleep_or_awake
    assert (await backend.wake(None))["status"] == "awake"
    assert engine.model_executor.calls == []


async def test_failed_reload_stays_asleep_and_is_tried_again(asleep_or_awake: Trio) -> None:
    """Weights that are mapped but not read must neither serve nor be mapped a second time."""
    engine, client, backend = asleep_or_awake
    await backend.sleep(2, "wait")
    engine.model_executor.fail_on = "reload_weights"
    with pytest.raises(Refused) as refused:
        await backend.wake(None)
    assert (refused.value.status, refused.value.code) == (500, "wake_failed")
    assert refused.value.facts["asleep_tags"] == ["weights", "kv_cache"]
    assert not any(call[0] == "wake_up" for call in client.calls)
    engine.model_executor.fail_on = ""
    assert (await backend.wake(None))["status"] == "awake"
    assert engine.model_executor.calls.count(("wake_up", "weights")) == 1


async def test_wake_without_memory_stays_asleep_with_its_reason(asleep_or_awake: Trio) -> None:
    engine, _, backend = asleep_or_awake
    await backend.sleep(1, "wait")
    engine.model_executor.fail_on = "weights"
    with pytest.raises(Refused, match="out of memory"):
        await backend.wake(None)
    assert (await backend.status())["sleep"]["asleep_tags"] == ["weights", "kv_cache"]


async def test_neighbour_that_grows_meanwhile_is_no_failed_sleep(asleep_or_awake: Trio) -> None:
    """vLLM 0.19–0.24 compare the whole card's free memory and call a sleep that happened a failure."""
    engine, client, backend = asleep_or_awake
    client.sleep_error = "Worker failed with error 'Memory usage increased after sleeping.'"
    assert (await backend.sleep(1, "wait"))["status"] == "asleep"
    assert engine.model_executor.is_sleeping
    client.sleep_error = ""
    await backend.wake(None)
    client.sleep_error = "CUDA error"
    with pytest.raises(Refused, match="CUDA error"):
        await backend.sleep(1, "wait")


async def test_engine_without_sleep_mode_is_told_so(asleep_or_awake: Trio) -> None:
    engine, client, backend = asleep_or_awake
    engine.vllm_config.model_config.enable_sleep_mode = False
    with pytest.raises(Refused, match="enable-sleep-mode"):
        await backend.sleep(1, "wait")
    assert client.calls == []


async def test_dummy_weights_are_not_dropped(asleep_or_awake: Trio) -> None:
    engine, _, backend = asleep_or_awake
    engine.vllm_config.load_config.load_format = "dummy"
    with pytest.raises(Refused, match="dummy"):
        await backend.sleep(2, "wait")
    assert (await backend.sleep(1, "wait"))["status"] == "asleep"


async def test_second_call_for_the_same_sleep_waits_for_the_first(asleep_or_awake: Trio) -> None:
    _, client, backend = asleep_or_awake
    client.gate = asyncio.Event()
    first = asyncio.ensure_future(backend.sleep(1, "wait"))
    second = asyncio.ensure_future(backend.sleep(1, "wait"))
    while not client.calls:
        await asyncio.sleep(0)
    with pytest.raises(Refused, match="a sleep is under way"):
        await backend.wake(None)
    client.gate.set()
    assert await first == await second
    assert client.calls == [("sleep", 1, "wait")]


async def test_pause_keeps_requests_and_cache(asleep_or_awake: Trio) -> None:
    engine, client, backend = asleep_or_awake
    request = engine.add(100, 20)
    engine.steps(3)
    await backend.pause("keep")
    assert client.calls == [("pause", "keep", False)]
    engine.steps(5)
    kept = len(request.output)
    assert (await backend.status())["sleep"]["paused"] is True
    await backend.resume()
    engine.finish_all()
    assert request.output == list(range(20))
    assert kept < 20


async def test_paused_engine_with_waiting_requests_is_not_starved(asleep_or_awake: Trio) -> None:
    engine, _, backend = asleep_or_awake
    engine.add(100, 20)
    await backend.pause("keep")
    facts = await backend.status()
    assert facts["state"] == "applied"
    assert facts["requests"] == {"running": 0, "waiting": 1, "stuck": [], "starved_by": None}


async def test_limit_can_be_changed_while_asleep(asleep_or_awake: Trio) -> None:
    from models_app.kvcache_addon.wire import LimitOrder

    _, _, backend = asleep_or_awake
    await backend.sleep(1, "wait")
    assert (await backend.limit(LimitOrder(20 * BUNDLE)))["status"] == "applied"
    await backend.wake(None)
    assert (await backend.status())["effective_limit_bytes"] == 20 * BUNDLE
