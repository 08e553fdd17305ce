"""The official client through the router to a simulated engine: a real process behind its add-on and its token."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.models_app.router.support import AUTH, HANGS_S, KEY, Router, model, running_router
from tests.models_app.simulator.engine import TOKEN, Engine

HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(tmp_path_factory.mktemp("sim"), "--max-model-len", "2048") as engine:
        yield engine.ready()


def route(engine: Engine, **fields: Any) -> dict[str, Any]:
    instance = {"id": 1, "url": f"http://127.0.0.1:{engine.port}", "token": TOKEN, "weight": 1}
    return model("tiny", instances=[instance], status="ready", **fields)


def client_for(router: Router) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key=KEY, timeout=4 * HANGS_S, max_retries=0)


async def test_plain_and_streamed_answers_and_their_usage(simulated: Engine) -> None:
    async with running_router(route(simulated, aliases=["nick"])) as router, client_for(router) as client:
        answer = await client.chat.completions.create(model="nick", messages=HELLO, max_tokens=5)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=5, stream=True)
        chunks = [chunk async for chunk in stream]
        assert all(chunk.choices for chunk in chunks)
        await router.wait_for(lambda: sum(record["completion_tokens"] for record in router.used) == 10)
        assert sum(record["errors"] for record in router.used) == 0


@pytest.mark.parametrize(
    "options",
    [None, {"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}, {"include_usage": True}],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_stream_is_the_engines_own_event_by_event_and_is_counted(
    simulated: Engine, path: str, options: dict[str, Any] | None
) -> None:
    """Usage is asked for behind the client's back: nothing of that may reach it."""
    asked = {"messages": HELLO} if "chat" in path else {"prompt": "hello"}
    body = {"model": "tiny", "max_tokens": 7, "temperature": 0, "stream": True, "stream_options": options, **asked}
    async with running_router(route(simulated)) as router:
        through = await router.client.post(path, json=body, headers=AUTH)
        url = f"http://127.0.0.1:{simulated.port}{path}"
        direct = await router.client.post(url, json=body, headers={"Authorization": f"Bearer {TOKEN}"})
        assert _events(through.text) == _events(direct.text)
        await router.wait_for(lambda: bool(router.used))
        assert router.used[0]["completion_tokens"] == 7
        assert router.used[0]["prompt_tokens"] > 0


def _events(text: str) -> list[Any]:
    """The events of a stream, without what differs between two answers to the same question."""
    data = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    found = [one if one == "[DONE]" else json.loads(one) for one in data]
    return [
        one if isinstance(one, str) else {k: v for k, v in one.items() if k not in ("id", "created")} for one in found
    ]


async def test_engines_own_refusal_reaches_the_client(simulated: Engine) -> None:
    async with running_router(route(simulated)) as router, client_for(router) as client:
        with pytest.raises(openai.BadRequestError, match="2048"):
            await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=100_000)


async def test_leaving_client_frees_the_simulated_engine(simulated: Engine) -> None:
    async with running_router(route(simulated)) as router, client_for(router) as client:
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1900, stream=True)
        await anext(stream)
        await stream.close()
        async with httpx.AsyncClient(trust_env=False, timeout=HANGS_S) as http:
            end = time.monotonic() + HANGS_S
            while time.monotonic() < end:
                text = (
                    await http.get(
                        f"http://127.0.0.1:{simulated.port}/metrics", headers={"Authorization": f"Bearer {TOKEN}"}
                    )
                ).text
                running = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
                if running and running[0].endswith(" 0.0"):
                    break
            assert running[0].endswith(" 0.0")


async def test_engine_is_of_no_use_without_its_token(simulated: Engine) -> None:
    wrong = {"id": 1, "url": f"http://127.0.0.1:{simulated.port}", "token": "wrong", "weight": 1}
    async with running_router(model("tiny", instances=[wrong], status="ready")) as router:
        response = await router.client.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": HELLO}, headers=AUTH
        )
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_refused_router")
