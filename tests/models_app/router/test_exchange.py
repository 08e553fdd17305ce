"""Which engine answers, what is tried again, who stands in, and how a model is waited for."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from models_app.router.config import RouterConfig
from tests.models_app.router.support import (
    AUTH,
    FAST,
    Answer,
    FakeEngine,
    Request,
    Router,
    ask,
    chat,
    key,
    model,
    running_engines,
    running_router,
)

LONG_REST = replace(FAST, cool_down_s=600.0, cool_down_max_s=600.0)  # however slow the machine is


def answers(status: int, headers: dict[str, str] | None = None) -> Any:
    async def behaviour(request: Request, answer: Answer) -> None:
        await answer.json({"error": {"message": "no", "code": status}}, status, headers)

    return behaviour


async def dies_at_once(request: Request, answer: Answer) -> None:
    answer.die()


async def hangs(request: Request, answer: Answer) -> None:
    await answer.gone.wait()


async def asked_first(router: Router, number: int) -> None:
    """Let the turn begin with the engine ``number`` of two."""
    router.app.targets._turn = number + 1


# --- trying another engine ---


@pytest.mark.parametrize("bad", [answers(503), answers(401), dies_at_once])
async def test_other_replica_is_tried_before_the_first_byte(bad: Any) -> None:
    async with running_engines(bad, chat) as engines, running_router(model("m", *engines)) as router:
        for turn in (0, 1):
            await asked_first(router, turn)
            response = await router.chat()
            assert response.status_code == 200
        assert len(engines[0].requests) == 1 or bad is not dies_at_once
        assert len(engines[1].requests) == 2


async def test_dead_replica_is_left_alone_after_one_failure() -> None:
    async with running_engines(chat, chat) as engines, running_router(model("m", *engines), config=LONG_REST) as router:
        await engines[0].stop()
        statuses = [(await router.chat()).status_code for _ in range(10)]
        assert statuses == [200] * 10
        failures = sum(router.app.metrics.failures.values.values())
        assert failures == 1  # refused once, then it rests


async def test_failing_engine_is_told_of_once_at_a_time() -> None:
    async with (
        running_engines(chat, chat) as (dead, alive),
        running_router(model("m", dead, alive), config=LONG_REST) as router,
    ):
        await dead.stop()
        for _ in range(6):
            assert (await router.chat()).status_code == 200
        assert router.suspects == [(dead.port, "connect")]


async def test_single_5xx_and_refusals_make_nobody_suspect(router: Router, engine: FakeEngine) -> None:
    async def fails(request: Request, answer: Answer) -> None:
        await answer.json({"error": {"message": "no"}}, status=request.json["max_tokens"])

    engine.behaviour = fails
    for status in (500, 500, 400, 500, 500):  # what the client did wrong shows an engine at work
        await router.chat(max_tokens=status)
    assert router.suspects == []
    await router.chat(max_tokens=500)
    assert router.suspects == [(engine.port, "status_500")]


async def test_second_model_on_the_same_host_has_its_own_port() -> None:
    async with (
        running_engines(chat, chat) as engines,
        running_router(model("a", engines[0]), model("b", engines[1])) as router,
    ):
        await router.chat("a")
        await router.chat("b")
        await router.chat("a")
    assert [len(engine.requests) for engine in engines] == [2, 1]
    assert engines[1].requests[0].json["model"] == "b"


async def test_dead_engine_of_one_model_does_not_delay_another() -> None:
    async with (
        running_engines(hangs, chat) as engines,
        running_router(model("stuck", engines[0]), model("m", engines[1])) as router,
    ):
        stuck = [asyncio.ensure_future(router.chat("stuck")) for _ in range(20)]
        await router.wait_for(lambda: len(engines[0].requests) == 20)
        assert (await router.chat("m")).status_code == 200
        for one in stuck:
            one.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)


async def test_bad_requests_cool_nobody(router: Router, engine: FakeEngine) -> None:
    engine.behaviour = answers(400)
    for _ in range(5):
        assert (await router.chat()).status_code == 400
    (state,) = router.app.targets
    assert (state.failures, state.cooled_until) == (0, 0.0)
    engine.behaviour = chat
    assert (await router.chat()).status_code == 200


async def test_5xx_in_a_row_cool_an_engine_and_are_not_tried_again() -> None:
    async with running_engines(answers(500), chat) as engines, running_router(model("m", *engines)) as router:
        await asked_first(router, 0)
        assert (await router.chat()).status_code == 500
        assert engines[1].requests == []
        state = router.app.targets.state(router.source.table.models["m"].targets[0])
        assert state.failures == 1
        assert state.cooled_until == 0.0
        for _ in range(2):
            router.app.targets.failed(state, "status_500", time.monotonic(), at_once=False)
        assert state.cooled_until > time.monotonic()
        assert {(await router.chat()).status_code for _ in range(4)} == {200}


async def test_first_byte_limit_answers_503_and_is_not_tried_again() -> None:
    async with running_engines(hangs, chat) as engines:
        config = RouterConfig(sweep_s=0.01, answer_s=0.1)
        async with running_router(model("m", *engines), config=config) as router:
            await asked_first(router, 0)
            response = await router.chat()
            assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_timeout")
            assert engines[1].requests == []
            await router.wait_for(lambda: engines[0].gone == 1)
            state = router.app.targets.state(router.source.table.models["m"].targets[0])
            assert state.cooled_until > 0  # a time-out counts


async def test_limit_of_the_first_byte_can_be_the_models_own(engine: FakeEngine) -> None:
    async def slow(request: Request, answer: Answer) -> None:
        await asyncio.sleep(0.3)
        await answer.json({"late": True})

    engine.behaviour = slow
    config = RouterConfig(sweep_s=0.01, answer_s=0.1)
    async with running_router(model("m", engine, first_byte_s=5), config=config) as router:
        assert (await router.chat()).json() == {"late": True}


async def test_all_replicas_dead_is_503_with_retry_after() -> None:
    async with running_engines(chat, chat) as engines, running_router(model("m", *engines)) as router:
        for engine in engines:
            await engine.stop()
        for _ in range(3):  # all cooled: the least bad is tried all the same
            response = await router.chat()
            assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unreachable")
            assert "retry-after" in response.headers


async def test_replica_that_came_back_is_used_again(engine: FakeEngine) -> None:
    config = RouterConfig(cool_down_s=0.01, cool_down_max_s=0.02)
    async with running_router(model("m", engine), config=config) as router:
        await engine.stop()
        assert (await router.chat()).status_code == 503
        await engine.start()
        assert (await router.chat()).status_code == 200
        (state,) = router.app.targets
        assert state.failures == 0


async def test_connection_closed_while_idle_is_replaced_unnoticed(router: Router, engine: FakeEngine) -> None:
    async def close_after(request: Request, answer: Answer) -> None:
        await chat(request, answer)
        answer.writer.close()

    engine.behaviour = close_after
    for _ in range(5):
        assert (await router.chat()).status_code == 200
    assert router.app.metrics.failures.values == {}


async def test_connections_are_kept_and_used_again(router: Router, engine: FakeEngine) -> None:
    for _ in range(10):
        await router.chat()
        await router.chat(stream=True)
    assert engine.connections == 1


async def test_503_of_the_last_engine_is_passed_on_with_retry_after(router: Router, engine: FakeEngine) -> None:
    engine.behaviour = answers(503, {"Retry-After": "7"})
    response = await router.chat()
    assert (response.status_code, response.headers["retry-after"]) == (503, "7")
    engine.behaviour = answers(503)
    assert (await router.chat()).headers["retry-after"] == "2"


async def test_load_is_spread_by_what_is_outstanding() -> None:
    async with running_engines(hangs, chat) as engines, running_router(model("m", *engines)) as router:
        await asked_first(router, 0)
        stuck = asyncio.ensure_future(router.chat())
        await router.wait_for(lambda: len(engines[0].requests) == 1)
        for _ in range(6):
            await router.chat()
        assert len(engines[1].requests) == 6
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)


async def test_same_prompt_goes_to_the_same_replica_when_asked_to() -> None:
    async with (
        running_engines(chat, chat, chat) as engines,
        running_router(model("m", *engines, affinity="prefix")) as router,
    ):
        for _ in range(8):
            await router.chat(messages=[{"role": "system", "content": "you are " + "x" * 2000}])
    assert sorted(len(engine.requests) for engine in engines) == [0, 0, 8]


# --- names, defaults, stand-ins ---


async def test_defaults_fill_what_is_absent_and_nothing_else(engine: FakeEngine) -> None:
    defaults = {"temperature": 0.2, "top_p": 0.9, "model": "evil", "stream": True}
    async with running_router(model("m", engine, defaults=defaults)) as router:
        await router.chat(temperature=1.0)
    sent = engine.requests[0].json
    assert (sent["temperature"], sent["top_p"], sent["model"]) == (1.0, 0.9, "m")
    assert "stream" not in sent


async def test_alias_carries_its_own_preset(engine: FakeEngine) -> None:
    aliases = [{"name": "m-creative", "defaults": {"temperature": 1.5}}]
    async with running_router(model("m", engine, aliases=aliases, defaults={"temperature": 0.1})) as router:
        await router.chat("m-creative")
        await router.chat("m")
    assert [request.json["temperature"] for request in engine.requests] == [1.5, 0.1]


async def test_body_without_changes_goes_out_as_it_came(router: Router, engine: FakeEngine) -> None:
    body = b'{ "model" : "m", "messages":[ ], "seed": 12345678901234567890 }\n'
    await router.client.post("/v1/chat/completions", content=body, headers=AUTH)
    assert engine.requests[0].body == body


async def test_name_spread_by_weight_reaches_all_its_models() -> None:
    async with running_engines(chat, chat) as engines:
        routes = [{"name": "both", "targets": [{"model": "a", "weight": 1}, {"model": "b", "weight": 1}]}]
        models = [model("a", engines[0]), model("b", engines[1])]
        async with running_router(*models, routes=routes) as router:
            for _ in range(40):
                assert (await router.chat("both")).status_code == 200
    assert engines[0].requests
    assert engines[1].requests


async def test_key_for_one_model_of_a_spread_name_gets_that_one() -> None:
    async with running_engines(chat, chat) as engines:
        routes = [{"name": "both", "targets": [{"model": "a", "weight": 9}, {"model": "b", "weight": 1}]}]
        models = [model("a", engines[0]), model("b", engines[1])]
        keys = [key(models=["b"]), key("sz-none", id=2, models=[])]
        async with running_router(*models, routes=routes, keys=keys) as router:
            for _ in range(20):
                assert (await router.chat("both")).status_code == 200
            nothing = {"Authorization": "Bearer sz-none"}
            refused = await router.client.post("/v1/chat/completions", json=ask("both"), headers=nothing)
            assert refused.status_code == 403
    assert len(engines[1].requests) == 20
    assert engines[0].requests == []


@pytest.mark.parametrize("status", ["stopped", "failed", "sleeping", "draining"])
async def test_fallback_stands_in_and_says_so(engine: FakeEngine, status: str) -> None:
    models = [model("big", status=status, fallback="small"), model("small", engine)]
    async with running_router(*models) as router:
        response = await router.chat("big")
    assert response.status_code == 200
    assert response.headers["x-sardeenz-model"] == "small"
    assert engine.requests[0].json["model"] == "small"


async def test_fallback_stands_in_for_a_dead_engine() -> None:
    async with running_engines(chat, chat) as engines:
        models = [model("big", engines[0], fallback="small"), model("small", engines[1])]
        async with running_router(*models) as router:
            await engines[0].stop()
            assert (await router.chat("big")).status_code == 200


async def test_fallback_that_the_key_may_not_use_stands_in_for_nothing(engine: FakeEngine) -> None:
    models = [model("big", status="stopped", fallback="small"), model("small", engine)]
    async with running_router(*models, keys=[key(models=["big"])]) as router:
        response = await router.chat("big")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "model_stopped")


async def test_fallbacks_in_a_circle_end() -> None:
    models = [model("a", status="stopped", fallback="b"), model("b", status="stopped", fallback="a")]
    async with running_router(*models) as router:
        assert (await router.chat("a")).status_code == 503


# --- limits of length and number ---


@pytest.mark.parametrize(
    ("path", "fields", "allowed"),
    [
        ("/v1/chat/completions", {"max_tokens": 1000}, True),
        ("/v1/chat/completions", {"max_tokens": 1001}, False),
        ("/v1/chat/completions", {"max_completion_tokens": 1001, "max_tokens": 5}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 100_000}]}, True),
        ("/v1/chat/completions", {"max_tokens": None}, True),
        ("/v1/chat/completions", {"max_tokens": True}, True),
        ("/v1/completions", {"prompt": [1] * 900, "max_tokens": 100}, True),
        ("/v1/completions", {"prompt": [1] * 901, "max_tokens": 100}, False),
        ("/v1/completions", {"prompt": [[1] * 10, [1] * 1001]}, False),
        ("/v1/completions", {"prompt": [1] * 5000, "truncate_prompt_tokens": 10}, True),
        ("/v1/completions", {"prompt": ["text", "text"], "max_tokens": 1000}, True),
        ("/v1/embeddings", {"input": [1] * 1001}, False),
        ("/v1/responses", {"max_output_tokens": 1001}, False),
        ("/v1/messages", {"max_tokens": 1001}, False),
        ("/tokenize", {"max_tokens": 1001}, True),
    ],
)
async def test_only_what_can_never_fit_the_kv_limit_is_refused(
    engine: FakeEngine, path: str, fields: dict[str, Any], allowed: bool
) -> None:
    async with running_router(model("m", engine, token_limit=1000)) as router:
        response = await router.client.post(path, json={"model": "m", **fields}, headers=AUTH)
    if allowed:
        assert response.status_code == 200
    else:
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_exceeds_kv_limit" or error["type"] == "invalid_request_error"
        assert "1000 tokens" in error["message"]
        assert engine.requests == []


async def test_long_request_goes_where_the_limit_in_force_holds_it() -> None:
    async with running_engines(chat, chat) as (small, large), running_router(model("m", small, large)) as router:
        entry = model("m", small, large)
        entry["instances"][0]["token_limit"], entry["instances"][1]["token_limit"] = 500, 2000
        router.set_routes(entry)
        for _ in range(4):
            assert (await router.chat(max_tokens=1500)).status_code == 200
        assert (len(small.requests), len(large.requests)) == (0, 4)
        for _ in range(4):
            assert (await router.chat(max_tokens=5)).status_code == 200
        assert len(small.requests) == 2
        refused = await router.chat(max_tokens=2001)
        assert refused.status_code == 400
        assert "at most 2000 tokens" in refused.json()["error"]["message"]


async def test_limit_of_a_model_that_was_waited_for_is_looked_at_before_it_gets_inside(engine: FakeEngine) -> None:
    async with running_router(model("m", status="sleeping", on_demand=True)) as router:
        asked = asyncio.ensure_future(router.chat(max_tokens=1500))
        await router.wait_for(lambda: router.demanded == ["m"])
        router.set_routes(model("m", engine, on_demand=True, token_limit=1000))
        assert (await asked).status_code == 400
        assert engine.requests == []


async def test_length_over_the_models_own_context_is_the_engines_to_refuse(engine: FakeEngine) -> None:
    async with running_router(model("m", engine, token_limit=1000, max_model_len=1000)) as router:
        assert (await router.chat(max_tokens=5000)).status_code == 200


async def test_cap_of_a_model_lets_the_next_in_when_one_leaves(engine: FakeEngine) -> None:
    go_on = asyncio.Event()

    async def held(request: Request, answer: Answer) -> None:
        await go_on.wait()
        await chat(request, answer)

    engine.behaviour = held
    async with running_router(model("m", engine, max_concurrency=2)) as router:
        calls = [asyncio.ensure_future(router.chat()) for _ in range(5)]
        await router.wait_for(lambda: len(engine.requests) == 2)
        await asyncio.sleep(0.05)
        assert len(engine.requests) == 2
        go_on.set()
        assert [one.status_code for one in await asyncio.gather(*calls)] == [200] * 5


async def test_cap_of_a_model_refuses_with_429_when_too_many_wait(engine: FakeEngine) -> None:
    """G5."""
    engine.behaviour = hangs
    config = RouterConfig(slot_queue_limit=1, slot_wait_s=0.1)
    async with running_router(model("m", engine, max_concurrency=1), config=config) as router:
        calls = [asyncio.ensure_future(router.chat()) for _ in range(3)]
        done, pending = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED, timeout=5)
        response = done.pop().result()
        assert (response.status_code, response.json()["error"]["code"]) == (429, "model_at_capacity")
        assert response.headers["x-ratelimit-limit-model-concurrency"] == "1"
        assert "retry-after" in response.headers
        for one in pending:
            one.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_requests_of_a_key_at_once_are_limited(engine: FakeEngine) -> None:
    engine.behaviour = hangs
    async with running_router(model("m", engine), keys=[key(max_concurrency=1)]) as router:
        first = asyncio.ensure_future(router.chat())
        await router.wait_for(lambda: len(engine.requests) == 1)
        second = await router.chat()
        assert (second.status_code, second.json()["error"]["code"]) == (429, "concurrency_limit_exceeded")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await router.wait_for(lambda: engine.gone == 1)
        engine.behaviour = chat
        assert (await router.chat()).status_code == 200


# --- waiting for a model ---


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("starting", "model_loading"),
        ("sleeping", "model_sleeping"),
        ("stopped", "model_stopped"),
        ("draining", "model_draining"),
        ("failed", "model_failed"),
        ("ready", "model_unreachable"),
    ],
)
async def test_each_state_has_its_own_code(status: str, code: str) -> None:
    async with running_router(model("m", status=status, reason="out of memory at load")) as router:
        response = await router.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, code)
    assert "out of memory at load" in response.json()["error"]["message"]
    assert int(response.headers["retry-after"]) >= 1
    assert router.demanded == []  # it is not one that requests may start


@pytest.mark.parametrize("status", ["sleeping", "stopped", "starting", "draining"])
async def test_requests_wait_for_a_model_on_demand_and_join_one_load(engine: FakeEngine, status: str) -> None:
    async with running_router(model("m", status=status, on_demand=True)) as router:
        calls = [asyncio.ensure_future(router.chat()) for _ in range(5)]
        await router.wait_for(lambda: router.app.metrics.queued.values.get(("m",)) == 5)
        await router.wait_for(lambda: router.demanded == ["m"])
        router.set_routes(model("m", status="starting", on_demand=True))
        await asyncio.sleep(0.02)
        router.set_routes(model("m", engine, on_demand=True))
        assert [one.status_code for one in await asyncio.gather(*calls)] == [200] * 5
        assert router.demanded == ["m"]
        assert router.app.metrics.queued.values["m",] == 0


async def test_new_need_is_told_at_once(engine: FakeEngine) -> None:
    async with running_router(model("m", status="sleeping", on_demand=True)) as router:
        for needs in (1, 2):
            call = asyncio.ensure_future(router.chat())
            await router.wait_for(lambda needs=needs: len(router.demanded) == needs)
            router.set_routes(model("m", engine, on_demand=True))
            assert (await call).status_code == 200
            router.set_routes(model("m", status="sleeping", on_demand=True))
    assert router.demanded == ["m", "m"]


async def test_lists_health_and_metrics_wake_nothing() -> None:
    async with running_router(model("m", status="sleeping", on_demand=True)) as router:
        for path in ("/v1/models", "/v1/models/m", "/healthz", "/readyz", "/metrics"):
            await router.client.get(path, headers=AUTH)
    assert router.demanded == []


async def test_client_that_leaves_leaves_the_queue() -> None:
    async with running_router(model("m", status="sleeping", on_demand=True)) as router:
        call = asyncio.ensure_future(router.chat())
        await router.wait_for(lambda: router.app.metrics.queued.values.get(("m",)) == 1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await router.wait_for(lambda: router.app.metrics.queued.values.get(("m",)) == 0)
        await router.wait_for(lambda: router.app.buffered.held == 0)


async def test_failed_load_tells_those_who_wait() -> None:
    async with running_router(model("m", status="sleeping", on_demand=True)) as router:
        call = asyncio.ensure_future(router.chat())
        await router.wait_for(lambda: router.app.metrics.queued.values.get(("m",)) == 1)
        router.set_routes(model("m", status="failed", on_demand=True, reason="CUDA out of memory"))
        response = await call
    assert (response.status_code, response.json()["error"]["code"]) == (503, "model_failed")
    assert "CUDA out of memory" in response.json()["error"]["message"]


async def test_refusal_of_room_tells_those_who_wait() -> None:
    async with running_router(model("m", status="stopped", on_demand=True)) as router:
        call = asyncio.ensure_future(router.chat())
        await router.wait_for(lambda: router.app.metrics.queued.values.get(("m",)) == 1)
        router.set_routes(model("m", status="stopped", on_demand=True, refused="every model on the GPU is pinned"))
        assert "is pinned" in (await call).json()["error"]["message"]


async def test_failed_model_is_not_asked_for_by_every_request() -> None:
    async with running_router(model("m", status="failed", on_demand=True)) as router:
        for _ in range(5):
            assert (await router.chat()).json()["error"]["code"] == "model_failed"
        await router.wait_for(lambda: bool(router.demanded))
    assert router.demanded == ["m"]


async def test_waiting_has_a_limit() -> None:
    config = RouterConfig(queue_wait_s=0.05)
    async with running_router(model("m", status="starting", on_demand=True), config=config) as router:
        response = await router.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "model_loading")


async def test_queue_has_a_limit() -> None:
    config = RouterConfig(queue_limit=2)
    async with running_router(model("m", status="starting", on_demand=True), config=config) as router:
        waiting = [asyncio.ensure_future(router.chat()) for _ in range(2)]
        await router.wait_for(lambda: router.app.metrics.queued.values.get(("m",)) == 2)
        for _ in range(2):
            assert (await router.chat()).json()["error"]["code"] == "queue_full"
        router.set_routes(model("m", status="failed", on_demand=True))
        assert {one.json()["error"]["code"] for one in await asyncio.gather(*waiting)} == {"model_failed"}


async def test_loaded_model_does_not_wait_behind_a_loading_one(engine: FakeEngine) -> None:
    models = [model("loading", status="starting", on_demand=True), model("m", engine)]
    async with running_router(*models) as router:
        waiting = asyncio.ensure_future(router.chat("loading"))
        await router.wait_for(lambda: router.app.metrics.queued.values.get(("loading",)) == 1)
        assert (await router.chat("m")).status_code == 200
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_waiting_stream_gets_comments_and_then_only_what_the_engine_says(engine: FakeEngine) -> None:
    config = RouterConfig(sweep_s=0.02, commit_stream_s=0.03, comment_s=0.03)
    async with running_router(model("m", status="starting", on_demand=True), config=config) as router:
        call = asyncio.ensure_future(router.chat(stream=True))
        await router.wait_for(lambda: router.app.metrics.queued.values.get(("m",)) == 1)
        await asyncio.sleep(0.15)
        router.set_routes(model("m", engine, on_demand=True))
        response = await call
    lines = [line for line in response.text.split("\n") if line]
    assert lines[0] == ": waiting for the model"
    data = [line for line in lines if not line.startswith(":")]
    assert all(line.startswith("data: ") for line in data)
    assert len(data) == 5
    assert response.headers["content-type"].startswith("text/event-stream")


async def test_waiting_stream_that_waits_in_vain_ends_with_an_error_event() -> None:
    config = RouterConfig(commit_stream_s=0.02, comment_s=0.02, queue_wait_s=0.1)
    async with running_router(model("m", status="starting", on_demand=True), config=config) as router:
        response = await router.chat(stream=True)
    assert response.status_code == 200
    assert '"code":"model_loading"' in response.text
    assert "[DONE]" not in response.text


async def test_waiting_stream_whose_engine_refuses_ends_with_its_error(engine: FakeEngine) -> None:
    engine.behaviour = answers(400)
    config = RouterConfig(commit_stream_s=0.02, comment_s=0.02)
    async with running_router(model("m", status="starting", on_demand=True), config=config) as router:
        request = router.client.stream("POST", "/v1/chat/completions", json=ask(stream=True), headers=AUTH)
        async with request as response:  # its headers are there: the stream has begun
            router.set_routes(model("m", engine, on_demand=True))
            assert '"message":"no"' in (await response.aread()).decode()


async def test_wish_is_repeated_while_someone_waits_and_the_broker_is_away(engine: FakeEngine) -> None:
    def away(name: str) -> None:
        raise ConnectionError("no broker")

    config = RouterConfig(demand_repeat_s=0.02)
    sleeping = model("m", status="sleeping", on_demand=True)
    async with running_router(sleeping, config=config, on_demand=away) as router:
        call = asyncio.ensure_future(router.chat())
        await router.wait_for(lambda: len(router.demanded) >= 3)
        router.set_routes(model("m", engine, on_demand=True))
        assert (await call).status_code == 200


async def test_removed_model_tells_those_who_wait() -> None:
    async with running_router(model("m", status="starting", on_demand=True)) as router:
        call = asyncio.ensure_future(router.chat())
        await router.wait_for(lambda: router.app.metrics.queued.values.get(("m",)) == 1)
        router.set_routes()
        assert (await call).status_code == 404


# --- the list ---


async def test_models_are_listed_without_asking_any_engine(engine: FakeEngine) -> None:
    engine.behaviour = hangs
    models = [
        model("awake", engine, aliases=["nick"], token_limit=2000),
        model("asleep", status="sleeping", on_demand=True, reason="idle for 10 min"),
    ]
    async with running_router(*models, config=FAST) as router:
        data = (await router.client.get("/v1/models", headers=AUTH)).json()["data"]
    assert engine.requests == []
    by_id = {one["id"]: one for one in data}
    assert sorted(by_id) == ["asleep", "awake", "nick"]
    assert by_id["nick"]["root"] == "awake"
    assert by_id["awake"]["instances"] == [engine.port]
    assert (by_id["asleep"]["status"], by_id["asleep"]["on_demand"]) == ("sleeping", True)
    assert by_id["awake"]["token_limit"] == 2000


async def test_model_that_is_lost_while_some_wait_for_a_place_is_asked_for(engine: FakeEngine) -> None:
    go_on = asyncio.Event()

    async def held(request: Request, answer: Answer) -> None:
        await go_on.wait()
        await chat(request, answer)

    engine.behaviour = held
    async with running_router(model("m", engine, on_demand=True, max_concurrency=1)) as router:
        calls = [asyncio.ensure_future(router.chat()) for _ in range(2)]
        await router.wait_for(lambda: router.app.metrics.queued.values.get(("m",)) == 1)
        router.set_routes(model("m", status="sleeping", on_demand=True, max_concurrency=1))
        await router.wait_for(lambda: router.demanded == ["m"])
        router.set_routes(model("m", engine, on_demand=True, max_concurrency=1))
        go_on.set()
        assert [one.status_code for one in await asyncio.gather(*calls)] == [200, 200]
