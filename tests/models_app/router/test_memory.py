"""Memory stays flat: what ended leaves nothing behind. The long soak is ``python -m tests.bench.soak``."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

from models_app.router.exchange import Exchange
from models_app.router.reply import Client, Reply
from models_app.router.request import Ask
from models_app.router.upstream import Connection
from tests.models_app.router.support import FakeEngine, Router, model

KINDS = (Exchange, Client, Reply, Ask, Connection)


def living() -> Counter[type]:
    gc.collect()
    return Counter(kind for one in gc.get_objects() if (kind := type(one)) in KINDS)


async def test_requests_that_ended_leave_nothing_behind(router: Router, engine: FakeEngine) -> None:
    async def some(count: int) -> None:
        for number in range(count):
            stream = number % 3 == 0
            call = asyncio.ensure_future(router.chat("m" if number % 5 else "nope", stream=stream))
            if number % 7 == 0:
                await asyncio.sleep(0.001)
                call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            engine.requests.clear()
        router.used.clear()
        await router.wait_for(lambda: not any(state.outstanding for state in router.app.targets))
        await asyncio.sleep(0.05)

    await some(20)
    before = living()
    tasks = len(asyncio.all_tasks())
    await some(80)
    after = living()
    assert all(after[kind] <= before[kind] + 2 for kind in KINDS), (before, after)
    assert len(asyncio.all_tasks()) <= tasks + 2
    assert router.app.buffered.held == 0
    door = router.app.doors.get("m")
    assert door is not None
    assert door.inflight == 0


async def test_instances_that_left_leave_nothing_behind(router: Router, engine: FakeEngine) -> None:
    for number in range(20):
        instance = {"id": number, "url": engine.url, "token": "t", "weight": 1}
        router.set_routes(model("m", instances=[instance], status="ready"))
        assert (await router.chat()).status_code == 200
    await router.wait_for(lambda: not router.app.targets._leaving)
    assert len(list(router.app.targets)) == 1
    assert living()[Connection] <= 5
