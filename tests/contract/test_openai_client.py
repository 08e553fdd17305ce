"""The official client through our router to a living engine: streams, tools, errors, leaving, retries.

The same calls against a scripted engine, faults included, stand in ``tests/models_app/router/test_openai_client.py``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from models_app.engines.process import cleanup, terminate
from models_app.router.endpoints import ENDPOINTS
from tests.contract.kit import Kit, Started
from tests.models_app.router.support import AUTH, KEY, NO_TLS, Router, key, running_router

pytestmark = pytest.mark.xdist_group("contract")

HELLO: Any = [{"role": "user", "content": "hello"}]
#: On a shared machine a real engine may be slow; longer than this means *hangs*.
LIMIT_S = 120.0
#: What the client may ask for: one function with one short argument.
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
#: Routes of an engine that are no inference: health, metrics, administration, what only renders or scripts, and answers
#: kept in one engine's memory (``/v1/responses/…``), which no other replica and no restart has.
NOT_INFERENCE = (
    "/health", "/load", "/metrics", "/ping", "/version", "/kvcache", "/v1/models", "/docs", "/redoc", "/openapi.json",
    "/invocations", "/render", "/inference/v1", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    "/is_scaling_elastic_ep", "/scale_elastic_ep", "/tokenizer_info", "/abort_requests",
    "/v1/responses/",
)  # fmt: skip


@pytest.fixture(scope="module")
def engine(kit: Kit) -> Iterator[Started]:
    """An engine that knows tools."""
    started = kit.start(extra_args="--max-num-seqs 8 --enable-auto-tool-choice --tool-call-parser hermes")
    started.wait_ready()
    yield started
    assert terminate(started.run_dir, limit_s=60).done
    cleanup(started.run_dir)


def _model(engine: Started | None, **fields: Any) -> dict[str, Any]:
    """The entry of the routes for this engine; None: the model is ready and nobody can be reached."""
    instances = [{"id": 1, "url": engine.url, "token": engine.token}] if engine else []
    return {"name": "tiny", "aliases": ["also"], "status": "ready", "instances": instances, **fields}


@pytest.fixture
async def router(engine: Started) -> AsyncIterator[Router]:
    async with running_router(_model(engine)) as router:
        yield router


def client_for(router: Router, **options: Any) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(trust_env=False, verify=NO_TLS)
    given: dict[str, Any] = {"api_key": KEY, "timeout": LIMIT_S, "max_retries": 0}
    return openai.AsyncOpenAI(base_url=f"{router.url}/v1", http_client=http, **(given | options))


@pytest.fixture
async def client(router: Router) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_for(router) as client:
        yield client


async def until(what: Callable[[], Any]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await asyncio.to_thread(what):
            await asyncio.sleep(0.02)


async def test_plain_answer_by_name_and_alias(client: openai.AsyncOpenAI) -> None:
    answers = [
        await client.chat.completions.create(model=name, messages=HELLO, max_tokens=8, temperature=0)
        for name in ("tiny", "also")
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].usage is not None and answers[0].usage.completion_tokens <= 8


async def test_stream_says_what_the_plain_answer_says(client: openai.AsyncOpenAI, router: Router) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 8, "temperature": 0}
    plain = await client.chat.completions.create(**asked)
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
    assert all(chunk.choices for chunk in chunks)  # nobody asked for usage
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == plain.choices[0].message.content
    usage = {"include_usage": True}
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True, stream_options=usage)]
    assert plain.usage is not None and chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == plain.usage.total_tokens
    await router.wait_for(lambda: sum(one["requests"] for one in router.used) == 3)
    assert sum(one["completion_tokens"] for one in router.used) == 3 * plain.usage.completion_tokens


async def test_completions_and_responses(client: openai.AsyncOpenAI) -> None:
    text = await client.completions.create(model="tiny", prompt="the engine", max_tokens=4, temperature=0)
    parts = [
        one.choices[0].text
        async for one in await client.completions.create(
            model="tiny", prompt="the engine", max_tokens=4, temperature=0, stream=True
        )
    ]
    assert "".join(parts) == text.choices[0].text
    stream = await client.responses.create(model="tiny", input="hello", max_output_tokens=8, stream=True)
    kinds = [event.type async for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_that_was_asked_for_is_called(client: openai.AsyncOpenAI, router: Router, stream: bool) -> None:
    spaces = await router.client.post("/tokenize", json={"model": "tiny", "prompt": " \t\n\r"}, headers=AUTH)
    # random weights would fill the call with white space, which JSON allows, until its tokens are used up
    no_spaces = {str(token): -100 for token in spaces.json()["tokens"]}
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    asked: dict[str, Any] = {
        "model": "tiny", "messages": HELLO, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 200,
        "logit_bias": no_spaces, "temperature": 0,
    }  # fmt: skip
    name = arguments = ""
    if stream:
        async for chunk in await client.chat.completions.create(**asked, stream=True):
            for part in chunk.choices[0].delta.tool_calls or ():
                assert part.function is not None
                name, arguments = name or part.function.name or "", arguments + (part.function.arguments or "")
    else:
        answer = await client.chat.completions.create(**asked)
        call: Any = (answer.choices[0].message.tool_calls or [None])[0]
        name, arguments = call.function.name, call.function.arguments
    assert name == "weather"
    assert json.loads(arguments)["city"] in ("Rome", "Oslo")


async def test_models_are_listed_by_us(client: openai.AsyncOpenAI) -> None:
    assert [one.id async for one in client.models.list()] == ["also", "tiny"]


async def test_refusals_are_the_clients_own_errors(client: openai.AsyncOpenAI, router: Router) -> None:
    with pytest.raises(openai.BadRequestError) as too_long:
        await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=100_000)
    assert "512" in too_long.value.message
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(model="tiny", messages=HELLO, temperature=-5)
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="nope", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.APIStatusError):  # a model that generates makes no embeddings
        await client.embeddings.create(model="tiny", input="x", encoding_format="float")
    async with client_for(router, api_key="sz-wrong") as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.chat.completions.create(model="tiny", messages=HELLO)


async def _leave_stream(
    client: openai.AsyncOpenAI, asked: dict[str, Any], running: Callable[[], Awaitable[None]]
) -> None:
    stream = await client.chat.completions.create(**asked, stream=True)
    await anext(aiter(stream))
    await running()
    await stream.close()


async def _leave_plain(
    client: openai.AsyncOpenAI, asked: dict[str, Any], running: Callable[[], Awaitable[None]]
) -> None:
    call = asyncio.ensure_future(client.chat.completions.create(**asked))
    await running()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


@pytest.mark.parametrize("leave", [_leave_stream, _leave_plain])
async def test_who_leaves_frees_the_engine(
    client: openai.AsyncOpenAI, engine: Started, router: Router, leave: Any
) -> None:
    answers = 64  # eight at a time: a fast machine is far from the end, too, when the client is gone
    asked: dict[str, Any] = {
        "model": "tiny", "messages": HELLO, "max_tokens": 480, "n": answers, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    before = engine.client.metrics().generation_tokens
    await leave(client, asked, lambda: until(lambda: engine.client.metrics().running > 0))
    await until(lambda: engine.client.metrics().running == 0)
    made = engine.client.metrics().generation_tokens - before
    assert made < answers * 480  # it did not go on to the end
    assert router.app.metrics.gone.values == {("tiny",): 1}


async def test_client_comes_back_after_503(engine: Started) -> None:
    async with running_router(_model(None)) as router, client_for(router, max_retries=3) as client:
        call = asyncio.ensure_future(client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2))
        await router.wait_for(lambda: router.app.metrics.requests.values.get(("tiny", "503")) == 1)
        router.set_routes(_model(engine))
        assert (await call).choices


async def test_client_comes_back_after_429(engine: Started) -> None:
    async with (
        running_router(_model(engine), keys=[key(max_concurrency=1)]) as router,
        client_for(router, max_retries=8) as client,
    ):
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=480, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        second = asyncio.ensure_future(client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2))
        await router.wait_for(
            lambda: router.app.metrics.limited.values.get(("concurrency_limit_exceeded",), 0) >= 1 or second.done()
        )
        await stream.close()
        assert (await second).choices


async def test_every_inference_route_of_the_engine_is_ours_and_no_other(
    kit: Kit, engine: Started, router: Router
) -> None:
    """The engine's own list of routes, judged: a newer vLLM with a new route fails here."""
    with engine.http() as http:
        answer = http.get("/openapi.json")
    if kit.kind == "simulated":
        assert answer.status_code == 404  # it lists nothing
        return
    posts = {path for path, methods in answer.json()["paths"].items() if "post" in methods}
    assert "/v1/chat/completions" in posts
    rest = {path for path in posts - ENDPOINTS.keys() if not path.startswith(NOT_INFERENCE) and "/render" not in path}
    assert rest == set()
    for path in sorted(posts - ENDPOINTS.keys()):
        refused = await router.client.post(path, json={"model": "tiny"}, headers=AUTH)
        assert refused.status_code in (404, 405), path
