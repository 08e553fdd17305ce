"""The way from the API server to EngineCore: errors with names, and a status that never waits for a long step."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models_app.kvcache_addon import devices
from models_app.kvcache_addon.backend import STATUS_KEYS
from models_app.kvcache_addon.vllm_backend import VllmBackend
from models_app.kvcache_addon.wire import LimitOrder, Refused


class Core:
    """``engine_client.engine_core``."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.calls: list[Any] = []
        self.gate: asyncio.Event | None = None

    async def call_utility_async(self, *args: Any) -> Any:
        self.calls.append(args)
        if self.gate is not None:
            await self.gate.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def backend(answer: Any, **options: Any) -> tuple[Core, VllmBackend]:
    core = Core(answer)
    state = SimpleNamespace(engine_client=SimpleNamespace(engine_core=core))
    return core, VllmBackend(state, **options)


async def test_order_travels_as_plain_values() -> None:
    core, over = backend({"status": "applied"})
    await over.limit(LimitOrder(5, 1, True, "preempt", "ann"))
    order = {"size_bytes": 5, "revision": 1, "force": True, "reclaim": "preempt", "by": "ann"}
    assert core.calls == [("sardeenz_op", "limit", order)]


async def test_refusal_comes_back_as_one() -> None:
    _, over = backend({"refused": {"status": 409, "code": "stale", "error": "older", "revision": 4}})
    with pytest.raises(Refused) as refused:
        await over.trim()
    assert (refused.value.status, refused.value.code, refused.value.facts) == (409, "stale", {"revision": 4})


async def test_missing_engine_half_is_told_apart_from_a_failure() -> None:
    """VLLM_PLUGINS is an allow-list that a user may have set."""
    missing = Exception("Call to sardeenz_op method failed: 'EngineCoreProc' object has no attribute 'sardeenz_op'")
    _, over = backend(missing)
    with pytest.raises(Refused, match="VLLM_PLUGINS"):
        await over.trim()
    _, over = backend(RuntimeError("CUDA error"))
    with pytest.raises(RuntimeError):
        await over.trim()


async def test_status_without_the_engine_half_is_the_segments(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCACHED_IPC_NAME", "sz-x")
    (shm / "sz-x").write_bytes(struct.pack("<qqq", 900, 300, 100))
    _, over = backend(Exception("no attribute 'sardeenz_op'"))
    facts = await over.status()
    assert set(STATUS_KEYS) <= set(facts)
    assert (facts["provider"], facts["state"], facts["limit_bytes"], facts["used_bytes"]) == (
        "shm",
        "unknown",
        900,
        300,
    )
    assert over.ipc_name == "sz-x"


async def test_status_does_not_wait_for_a_long_step_nor_pile_up(shm: Path) -> None:
    core, over = backend({"kvcached_active": False}, status_patience_s=0.01)
    core.gate = asyncio.Event()
    for _ in range(3):
        facts = await over.status()
        assert facts["warnings"]
        assert facts["provider"] == "none"
    assert len(core.calls) == 1
    core.gate.set()
    assert (await over.status())["warnings"] is None


async def test_data_parallel_engines_get_no_limit() -> None:
    """C14: a call reaches one of them, and they all share one segment."""
    core, over = backend({"status": "applied"})
    over._config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=2))
    for call in (over.limit(LimitOrder(5)), over.trim()):
        with pytest.raises(Refused, match="data parallel"):
            await call
    assert core.calls == []


def fake_nvml(totals: list[int]) -> Any:
    """As many GPUs as totals, UUIDs GPU-0…"""
    return SimpleNamespace(
        nvmlMemory_v2=2,
        nvmlDeviceGetCount=lambda: len(totals),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetIndex=lambda handle: handle,
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}aaaa".encode(),
        nvmlDeviceGetMemoryInfo=lambda handle, version: SimpleNamespace(total=totals[handle], free=version),
    )


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1]), ("2,0", [2, 0]), ("GPU-1aaaa", [1]), ("GPU-2", [2]), ("3,x,0", [3]), ("", [])],
)
def test_gpus_are_those_that_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, indices: list[int]
) -> None:
    """E9: by NVML, never by a CUDA context in the API server; index 0 is the first visible one."""
    nvml = fake_nvml([10, 20, 30, 40])

    def opened() -> Any:
        return nvml

    opened.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(devices, "_open", opened)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = devices.own_gpus(2)
    assert [gpu["index"] for gpu in found] == indices
    assert all(gpu["free"] == 2 for gpu in found)


def test_machine_without_nvml_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Any:
        return None

    monkeypatch.setattr(devices, "_open", none)
    assert devices.own_gpus(1) == []
