"""Sleep, wake, pause, resume: the API server's half. All async.

kvcached's pages are not in vLLM's sleeping allocator (measured: 738 MB of them stay through a sleep), so the pool is
trimmed before and after. What a sleep frees of KV memory is measured here; what it frees in all is for NVML to tell.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from models_app.kvcache_addon.wire import Refused


class Core(Protocol):
    """What is needed of ``VllmBackend``."""

    async def call(self, op: str, args: dict[str, Any] | None = None) -> dict[str, Any]: ...


async def fall_asleep(core: Core, client: Any, level: int, mode: str) -> dict[str, Any]:
    """Put the engine to sleep; asking again at the same level does nothing. ``mode`` as in ``Backend.sleep``."""
    before = await _footprint(core)
    prepared = await core.call("sleep_prepare", {"level": level})
    if not prepared["already"]:
        await _trim(core)
        error = ""
        try:
            await client.sleep(level=level, mode=mode)
        except Exception as exc:
            if type(exc).__name__ == "EngineDeadError":
                raise
            error = str(exc) or type(exc).__name__
        await core.call("sleep_settle", {"error": error})
    await _trim(core)
    after = await _footprint(core)
    return {
        "status": "asleep",
        "level": level,
        "already": prepared["already"],
        "before_bytes": before,
        "after_bytes": after,
        "freed_bytes": None if before is None or after is None else max(before - after, 0),
    }


async def wake_up(core: Core, client: Any, tags: tuple[str, ...] | None) -> dict[str, Any]:
    """Wake the named parts (all when None). Scheduling goes on only when everything is back."""
    facts = await core.call("wake", {"tags": list(tags) if tags is not None else None})
    if facts["asleep_tags"]:
        return {"status": "partly_awake", "level": facts["level"], "asleep_tags": facts["asleep_tags"]}
    await client.wake_up(None)  # everything is mapped: this resumes scheduling and corrects vLLM's own metric
    return {"status": "awake", "level": None, "asleep_tags": []}


async def pause(core: Core, client: Any, mode: str) -> dict[str, Any]:
    """Stop scheduling. Refused (409) while asleep: that is a deeper pause."""
    await _refuse_asleep(core)
    await client.pause_generation(mode=mode, clear_cache=False)
    return {"status": "paused", "mode": mode}


async def resume(core: Core, client: Any) -> dict[str, Any]:
    """Schedule again. Refused (409) while asleep: there would be no weights to run with."""
    await _refuse_asleep(core)
    await client.resume_generation()
    return {"status": "running"}


async def _refuse_asleep(core: Core) -> None:
    facts = (await core.call("status"))["sleep"]
    if facts["asleep_tags"]:
        raise Refused(409, "asleep", "the engine sleeps: wake it first", **facts)


async def _footprint(core: Core) -> int | None:
    """KV bytes mapped on one GPU; None without kvcached."""
    facts = await core.call("status")
    return facts["used_bytes"] + facts["prealloc_bytes"] if facts["kvcached_active"] else None


async def _trim(core: Core) -> None:
    """Trim where there is a pool; an engine without one sleeps as well."""
    with contextlib.suppress(Refused):
        await core.call("trim")
