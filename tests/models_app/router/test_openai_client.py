"""The official client against the router: streams, tools, errors, cancellation, and its own retries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.models_app.router.support import (
    HANGS_S,
    KEY,
    NO_TLS,
    Answer,
    FakeEngine,
    Request,
    Router,
    chat,
    content,
    key,
    model,
    running_router,
)

HELLO: Any = [{"role": "user", "content": "hello"}]


def client_for(router: Router, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{router.url}/v1",
        http_client=httpx.AsyncClient(trust_env=False, verify=NO_TLS),
        **{"api_key": KEY, "timeout": HANGS_S, "max_retries": 0, **options},
    )


@pytest.fixture
async def client(router: Router) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_for(router) as client:
        yield client


async def test_plain_answer(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="m", messages=HELLO)
    assert answer.choices[0].message.content == "a b c"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 10


async def test_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "a b c"
    assert all(chunk.choices for chunk in chunks)  # code that never asked for usage meets no empty list


async def test_stream_with_usage(client: openai.AsyncOpenAI) -> None:
    options: Any = {"include_usage": True}
    stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == 7


async def test_tool_calls_pass_both_ways(client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    async def calls_tool(request: Request, answer: Answer) -> None:
        await answer.start()
        for arguments in ('{"city":', '"Rome"}'):
            event = content("")
            call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
            event["choices"][0]["delta"] = {"tool_calls": [call]}
            await answer.event(event)
        await answer.event("[DONE]")
        await answer.end()

    engine.behaviour = calls_tool
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    stream = await client.chat.completions.create(model="m", messages=HELLO, tools=tools, stream=True)
    text = ""
    async for chunk in stream:
        for call in chunk.choices[0].delta.tool_calls or ():
            assert call.function is not None
            text += call.function.arguments or ""
    assert json.loads(text) == {"city": "Rome"}
    assert engine.requests[0].json["tools"] == tools


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    assert [one.id async for one in client.models.list()] == ["m"]
    assert (await client.models.retrieve("m")).owned_by == "sardeenz"


async def test_errors_are_the_clients_own(router: Router, client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    with pytest.raises(openai.NotFoundError) as not_found:
        await client.chat.completions.create(model="nope", messages=HELLO)
    assert not_found.value.code == "model_not_found"
    async with client_for(router, api_key="sz-wrong") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.chat.completions.create(model="m", messages=HELLO)
    router.set_routes(model("m", engine), keys=[key(models=[])])
    with pytest.raises(openai.PermissionDeniedError):
        await client.chat.completions.create(model="m", messages=HELLO)


async def test_stream_that_breaks_off_raises(client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    async def dies(request: Request, answer: Answer) -> None:
        await answer.start()
        await answer.event(content("a"))
        await asyncio.sleep(0.02)
        answer.die()

    engine.behaviour = dies
    stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="ended in the middle"):
        async for _ in stream:
            pass


async def test_closed_stream_frees_the_engine(router: Router, client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    async def endless(request: Request, answer: Answer) -> None:
        await answer.start()
        await answer.event(content("a"))
        await answer.gone.wait()

    engine.behaviour = endless
    stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
    await anext(stream)
    await stream.close()
    await router.wait_for(lambda: engine.gone == 1)


async def test_client_retries_503_by_our_retry_after(engine: FakeEngine) -> None:
    async with running_router(model("m", status="ready")) as router, client_for(router, max_retries=1) as client:
        call = asyncio.ensure_future(
            client.with_options(timeout=HANGS_S).chat.completions.create(model="m", messages=HELLO)
        )
        await router.wait_for(lambda: router.app.metrics.requests.values.get(("m", "503")) == 1)
        router.set_routes(model("m", engine))
        assert (await call).choices[0].message.content == "a b c"


async def test_client_retries_429(engine: FakeEngine) -> None:
    go_on = asyncio.Event()

    async def held(request: Request, answer: Answer) -> None:
        await go_on.wait()
        await chat(request, answer)

    engine.behaviour = held
    async with (
        running_router(model("m", engine), keys=[key(max_concurrency=1)]) as router,
        client_for(router, max_retries=2) as client,
    ):
        first = asyncio.ensure_future(client.chat.completions.create(model="m", messages=HELLO))
        await router.wait_for(lambda: len(engine.requests) == 1)
        second = asyncio.ensure_future(client.chat.completions.create(model="m", messages=HELLO))
        await router.wait_for(lambda: router.app.metrics.limited.values.get(("concurrency_limit_exceeded",)) == 1)
        go_on.set()
        assert (await first).choices
        assert (await second).choices


async def test_embeddings_and_completions(client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    async def embed(request: Request, answer: Answer) -> None:
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}]
        await answer.json(
            {"object": "list", "model": "m", "data": data, "usage": {"prompt_tokens": 2, "total_tokens": 2}}
        )

    engine.behaviour = embed
    answer = await client.embeddings.create(model="m", input="x", encoding_format="float")
    assert answer.data[0].embedding == [0.5, 1.0]


async def test_responses_stream(router: Router, client: openai.AsyncOpenAI, engine: FakeEngine) -> None:
    async def respond(request: Request, answer: Answer) -> None:
        await answer.start()
        usage = {"input_tokens": 4, "output_tokens": 6, "total_tokens": 10}
        delta = {"type": "response.output_text.delta", "delta": "hi", "sequence_number": 1}
        done = {
            "type": "response.completed",
            "sequence_number": 2,
            "response": {"id": "r", "output": [], "usage": usage},
        }
        for event in (delta, done):
            await answer.chunk(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        await answer.end()

    engine.behaviour = respond
    kinds = [event.type async for event in await client.responses.create(model="m", input="x", stream=True)]
    assert kinds == ["response.output_text.delta", "response.completed"]
    await router.wait_for(lambda: bool(router.used))
    assert (router.used[0]["prompt_tokens"], router.used[0]["completion_tokens"]) == (4, 6)
    assert "stream_options" not in engine.requests[0].json
