"""Memory stays flat: what ended leaves nothing behind. The long soak is ``python -m tests.bench.soak``."""

from __future__ import annotations

import asyncio
import functools
import gc
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from models_app.router.exchange import Exchange
from models_app.router.reply import Client, Reply
from models_app.router.request import Ask
from models_app.router.upstream import Connection
from tests.models_app.router.support import AUTH, Answer, FakeEngine, Request, Router, ask, content, model

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


async def whole(router: Router, engine: FakeEngine) -> None:
    await router.chat()
    await router.chat(stream=True)


async def refused(router: Router, engine: FakeEngine) -> None:
    await router.chat("nope")
    for status in (400, 503):
        engine.behaviour = functools.partial(_says, status)
        assert (await router.chat()).status_code == status


async def _says(status: int, request: Request, answer: Answer) -> None:
    await answer.json({"error": {"message": "no"}}, status)


async def engine_dies_midway(router: Router, engine: FakeEngine) -> None:
    async def behaviour(request: Request, answer: Answer) -> None:
        await answer.start()
        await answer.event(content("a"))
        answer.die()

    engine.behaviour = behaviour
    assert "engine_lost" in (await router.chat(stream=True)).text


async def engine_dies_at_once(router: Router, engine: FakeEngine) -> None:
    async def behaviour(request: Request, answer: Answer) -> None:
        answer.die()

    engine.behaviour = behaviour
    assert (await router.chat()).status_code == 503


async def client_leaves(router: Router, engine: FakeEngine) -> None:
    async def behaviour(request: Request, answer: Answer) -> None:
        await answer.start()
        await answer.event(content("a"))
        await answer.gone.wait()

    engine.behaviour = behaviour
    async with router.client.stream("POST", "/v1/chat/completions", json=ask(stream=True), headers=AUTH) as answer:
        await anext(answer.aiter_bytes())
    await router.wait_for(lambda: engine.gone > 0)


@pytest.mark.parametrize("ending", [whole, refused, engine_dies_midway, engine_dies_at_once, client_leaves])
async def test_what_ended_is_free_without_the_garbage_collector(
    router: Router, engine: FakeEngine, ending: Callable[[Router, FakeEngine], Awaitable[None]]
) -> None:
    """An engine that dies takes hundreds of streams along; their memory must not wait for the collector's turn."""
    healthy = engine.behaviour
    for _ in range(2):  # the first time fills what is kept
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                engine.behaviour = healthy
                await ending(router, engine)
            engine.behaviour = healthy
            await router.chat()
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = Counter(type(one).__name__ for one in gc.garbage if type(one) in KINDS)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not left
