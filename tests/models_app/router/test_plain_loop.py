"""The router on asyncio's own loop, as inside daphne: no lifespan, another transport, the same rules."""

from __future__ import annotations

import asyncio

from models_app.router.config import RouterConfig
from tests.models_app.router.support import Answer, FakeEngine, Request, Router, content, model, running_router
from tests.models_app.router.test_relay import raw_stream, words


async def test_streams_and_plain_answers(router: Router, engine: FakeEngine) -> None:
    assert (await router.chat()).status_code == 200
    assert words((await router.chat(stream=True)).text) == "a b c"
    assert engine.connections == 1


async def test_leaving_client_frees_the_engine(router: Router, engine: FakeEngine) -> None:
    async def endless(request: Request, answer: Answer) -> None:
        await answer.gone.wait()

    engine.behaviour = endless
    _, writer = await raw_stream(router)
    await router.wait_for(lambda: len(engine.requests) == 1)
    writer.close()
    await router.wait_for(lambda: engine.gone == 1)


async def test_slow_reader_pauses_the_engine(engine: FakeEngine) -> None:
    async def firehose(request: Request, answer: Answer) -> None:
        await answer.start()
        while True:
            await answer.event(content("x" * 16_000))

    engine.behaviour = firehose
    async with running_router(model("m", engine), config=RouterConfig(sweep_s=0.02, idle_s=0.3)) as router:
        _, writer = await raw_stream(router, stream=True)
        await router.wait_for(lambda: engine.gone == 1)  # dropped in the end
        writer.close()


async def test_lifespan_and_restart(engine: FakeEngine) -> None:
    async with running_router(model("m", engine)) as router:
        assert (await router.chat()).status_code == 200
        await router.app.stop()
        messages: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        sent: list[object] = []

        async def send(message: dict[str, object]) -> None:
            sent.append(message["type"])

        await messages.put({"type": "lifespan.startup"})
        await messages.put({"type": "lifespan.shutdown"})
        await router.app({"type": "lifespan"}, messages.get, send)
        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
