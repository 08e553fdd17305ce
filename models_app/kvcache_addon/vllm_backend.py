"""The backend of a real vLLM: every call becomes one utility call into EngineCore (``engine_core.sardeenz_op``). All
async.

In the API server's process. Sleep and wake go through the engine client as well, so that vLLM's developer mode, whose
routes have no authentication, stays off.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from typing import Any

from models_app.kvcache_addon import devices, sleep
from models_app.kvcache_addon.backend import STATUS_KEYS
from models_app.kvcache_addon.segment import Segment, segment_name
from models_app.kvcache_addon.versions import kvcached_version, vllm_version
from models_app.kvcache_addon.wire import LimitOrder, Refused

#: Status falls back on the segment rather than wait for a long step: it is asked every second.
STATUS_PATIENCE_S = 3.0


class VllmBackend:
    """``state`` is the FastAPI application's: ``engine_client`` and ``vllm_config`` are vLLM's."""

    def __init__(self, state: Any, *, status_patience_s: float = STATUS_PATIENCE_S) -> None:
        self._client = state.engine_client
        self._config = getattr(state, "vllm_config", None)
        self._status_patience_s = status_patience_s
        self._status_task: asyncio.Task[dict[str, Any]] | None = None
        self._change: asyncio.Task[dict[str, Any]] | None = None
        self._change_name: tuple[Any, ...] = ()
        name = os.environ.get("KVCACHED_IPC_NAME", "")
        self._ipc_name = segment_name(name) if name else None

    @property
    def ipc_name(self) -> str | None:
        return self._ipc_name

    async def status(self) -> dict[str, Any]:
        """From the engine; from the segment alone when the engine is in a long step or lacks the add-on's other
        half."""
        task = self._status_task
        if task is None or task.done():
            task = self._status_task = asyncio.ensure_future(self.call("status"))
            task.add_done_callback(_take_note)
        done, _ = await asyncio.wait({task}, timeout=self._status_patience_s)
        if not done:
            return self._from_segment("the engine is in a long step: these numbers are the segment's")
        try:
            facts = task.result()
        except Refused as refused:
            return self._from_segment(refused.message)
        return {**dict.fromkeys(STATUS_KEYS), **facts}

    async def limit(self, order: LimitOrder) -> dict[str, Any]:
        self._refuse_data_parallel()
        return await self.call("limit", order.to_json())

    async def trim(self) -> dict[str, Any]:
        self._refuse_data_parallel()
        return await self.call("trim")

    async def safety_floor(self) -> dict[str, Any]:
        return await self.call("floor")

    async def gpus(self) -> list[dict[str, Any]]:
        parallel = getattr(self._config, "parallel_config", None)
        count = int(getattr(parallel, "tensor_parallel_size", 1)) * int(getattr(parallel, "pipeline_parallel_size", 1))
        return await asyncio.to_thread(devices.own_gpus, count)

    async def sleep(self, level: int, mode: str) -> dict[str, Any]:
        return await self._exclusively(
            ("sleep", level, mode), lambda: sleep.fall_asleep(self, self._client, level, mode)
        )

    async def wake(self, tags: tuple[str, ...] | None) -> dict[str, Any]:
        return await self._exclusively(("wake", tags), lambda: sleep.wake_up(self, self._client, tags))

    async def pause(self, mode: str) -> dict[str, Any]:
        return await self._exclusively(("pause", mode), lambda: sleep.pause(self, self._client, mode))

    async def resume(self) -> dict[str, Any]:
        return await self._exclusively(("resume",), lambda: sleep.resume(self, self._client))

    async def reset_prefix_cache(self) -> dict[str, Any]:
        return await self.call("reset_prefix_cache")

    async def abort_stuck(self) -> dict[str, Any]:
        return await self.call("abort_stuck")

    async def call(self, op: str, args: dict[str, Any] | None = None) -> dict[str, Any]:
        """One operation in EngineCore. Raises ``Refused``; vLLM's ``EngineDeadError`` passes through."""
        try:
            result = await self._client.engine_core.call_utility_async("sardeenz_op", op, args or {})
        except Exception as exc:
            if "sardeenz_op" in str(exc) and "attribute" in str(exc):
                raise Refused(
                    409,
                    "unavailable",
                    "the add-on's engine half is not loaded: its entry point is not on PYTHONPATH, or VLLM_PLUGINS "
                    "leaves it out",
                ) from exc
            raise
        refused = result.get("refused")
        if refused is not None:
            facts = {name: value for name, value in refused.items() if name not in ("status", "code", "error")}
            raise Refused(int(refused["status"]), str(refused["code"]), str(refused["error"]), **facts)
        return dict(result)

    def _refuse_data_parallel(self) -> None:
        """A utility call reaches one engine of several, all of which share one segment. Only this process knows how
        many there are: vLLM tells each engine of a dense model that it is alone."""
        parallel = getattr(self._config, "parallel_config", None)
        ranks = int(getattr(parallel, "data_parallel_size", 1) or 1)
        if ranks > 1:
            raise Refused(
                409, "unavailable", f"data parallel: {ranks} ranks share one segment, so limits are not offered"
            )

    async def _exclusively(
        self, name: tuple[Any, ...], start: Callable[[], Coroutine[Any, Any, dict[str, Any]]]
    ) -> dict[str, Any]:
        """One change of sleep or pause at a time; the same one asked for again waits for the first."""
        if self._change is None or self._change.done():
            self._change, self._change_name = asyncio.ensure_future(start()), name
        elif self._change_name != name:
            raise Refused(409, "busy", f"a {self._change_name[0]} is under way")
        return await asyncio.shield(self._change)

    def _from_segment(self, why: str) -> dict[str, Any]:
        """What can be told without EngineCore."""
        facts: dict[str, Any] = {
            **dict.fromkeys(STATUS_KEYS),
            "kvcached_active": False,
            "provider": "none",
            "engine": {"vllm": vllm_version(), "kvcached": kvcached_version()},
            "warnings": [why],
        }
        numbers = Segment(self._ipc_name).read() if self._ipc_name else None
        if numbers is not None:
            facts |= {
                "kvcached_active": True,
                "provider": "shm",
                "ipc_name": self._ipc_name,
                "limit_bytes": numbers.limit_bytes,
                "used_bytes": numbers.used_bytes,
                "prealloc_bytes": numbers.prealloc_bytes,
                "state": "unknown",
            }
        return facts


def _take_note(task: asyncio.Task[Any]) -> None:
    """Look at the outcome, so that a status nobody waited for does not end in a warning about it."""
    if not task.cancelled():
        task.exception()
