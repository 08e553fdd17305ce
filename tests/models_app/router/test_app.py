"""The router from outside: who may ask what, and in which shape it answers."""

from __future__ import annotations

import logging
import time

import httpx
import pytest

from models_app.router.config import RouterConfig
from models_app.router.endpoints import ENDPOINTS
from models_app.router.exchange import Exchange
from models_app.router.table import TableSource
from tests.models_app.router.support import (
    AUTH,
    FAST,
    Answer,
    FakeEngine,
    Request,
    Router,
    ask,
    key,
    model,
    running_engines,
    running_router,
)

JSON_PATHS = sorted(path for path, endpoint in ENDPOINTS.items() if not endpoint.multipart)


async def echo(request: Request, answer: Answer) -> None:
    await answer.json({"path": request.path})


async def test_answers_what_the_engine_answers(router: Router, engine: FakeEngine) -> None:
    response = await router.chat()
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "a b c"
    assert engine.requests[0].path == "/v1/chat/completions"


async def test_every_route_needs_a_key(router: Router) -> None:
    for path in [*ENDPOINTS, "/v1/models", "/v1/models/m", "/metrics", "/nothing"]:
        for response in (await router.client.get(path), await router.client.post(path, json=ask())):
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("query", ["auth_error=x", "token=x&key=y", "api_key=sz-test-key"])
async def test_query_opens_nothing(router: Router, query: str) -> None:
    assert (await router.client.post(f"/v1/chat/completions?{query}", json=ask())).status_code == 401


@pytest.mark.parametrize(
    "header",
    ["Bearer", "Basic sz-test-key", "sz-test-key", "Bearer sz-other", "bearer\tx", "Bearer " + "x" * 9000],
)
async def test_bad_authorization_is_401_in_openai_shape(router: Router, header: str) -> None:
    response = await router.client.post("/v1/chat/completions", json=ask(), headers={"Authorization": header})
    assert response.status_code == 401
    error = response.json()["error"]
    assert error["type"] == "authentication_error"
    assert "sz-other" not in response.text


@pytest.mark.parametrize("scheme", ["Bearer ", "Basic ", "", "bearer  "])
async def test_refused_key_is_repeated_nowhere(router: Router, caplog: pytest.LogCaptureFixture, scheme: str) -> None:
    """J8: neither in the answer, nor in the log, nor in what is counted and told."""
    caplog.set_level(logging.DEBUG)
    secret = "sz-almost-the-right-key"
    for headers in ({"Authorization": scheme + secret}, {"x-api-key": secret}):
        answer = await router.client.post("/v1/messages", json=ask(), headers=headers)
        assert answer.status_code == 401
        assert secret not in answer.text + str(answer.headers)
    assert secret not in caplog.text
    assert secret not in router.app.metrics.render().decode() + repr(router.events) + repr(router.used)


async def test_x_api_key_is_for_messages_only(router: Router) -> None:
    headers = {"x-api-key": "sz-test-key"}
    assert (await router.client.post("/v1/messages", json=ask(), headers=headers)).status_code == 200
    assert (await router.client.post("/v1/chat/completions", json=ask(), headers=headers)).status_code == 401


async def test_messages_errors_have_anthropic_shape(router: Router) -> None:
    response = await router.client.post("/v1/messages", json=ask("nope"), headers=AUTH)
    assert response.status_code == 404
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "not_found_error"


async def test_expired_key_is_401(engine: FakeEngine) -> None:
    async with running_router(model("m", engine), keys=[key(expires_at=time.time() - 1)]) as router:
        response = await router.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (401, "expired_api_key")


async def test_revoked_key_is_refused_from_the_next_table_on(router: Router, engine: FakeEngine) -> None:
    assert (await router.chat()).status_code == 200
    router.set_routes(model("m", engine), keys=[])
    assert (await router.chat()).status_code == 401


async def test_no_table_yet_is_503_and_never_401() -> None:
    async with running_router() as router:
        router.app.source = TableSource()
        response = await router.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "routes_unknown")
        assert int(response.headers["retry-after"]) >= 1
        assert (await router.client.get("/readyz")).status_code == 503


async def test_keys_too_old_to_trust_are_503(engine: FakeEngine) -> None:
    config = RouterConfig(key_age_limit_s=60)
    async with running_router(model("m", engine), config=config, at=time.time() - 3600) as router:
        response = await router.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "keys_stale")


async def test_scope_of_a_key_holds(engine: FakeEngine) -> None:
    models = [model("m", engine), model("other", engine)]
    async with running_router(*models, keys=[key(models=["other"])]) as router:
        refused = await router.chat("m")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
        assert (await router.chat("other")).status_code == 200
        listed = (await router.client.get("/v1/models", headers=AUTH)).json()["data"]
        assert [one["id"] for one in listed] == ["other"]
        assert (await router.client.get("/v1/models/m", headers=AUTH)).status_code == 404


@pytest.mark.parametrize("path", JSON_PATHS)
async def test_each_route_reaches_the_engines_own_route(path: str) -> None:
    async with running_engines(echo) as engines, running_router(model("m", *engines)) as router:
        response = await router.client.post(path, json={"model": "m"}, headers=AUTH)
        assert response.json() == {"path": path}


@pytest.mark.parametrize(
    "path",
    [
        "/sleep",
        "/wake_up",
        "/collective_rpc",
        "/kvcache/status",
        "/kvcache/limit",
        "/v1/kvcache/limit",
        "/invocations",
        "/version",
        "/health",
        "/load",
        "/docs",
        "/re-rank",
        "/classification",
        "/api/direct/5432/",
        "/v1/chat/completions/render",
        "/v1/chat/completions/../../sleep",
        "/v1/chat/completions/",
        "/v1//chat/completions",
        "/%2e%2e/sleep",
    ],
)
async def test_what_is_not_on_the_list_does_not_exist(router: Router, engine: FakeEngine, path: str) -> None:
    request = httpx.Request("POST", router.url + path, headers=AUTH, json={"model": "m"})
    response = await router.client.send(request)
    assert response.status_code == 404
    assert engine.requests == []


async def test_wrong_method_is_405(router: Router) -> None:
    response = await router.client.get("/v1/chat/completions", headers=AUTH)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert (await router.client.post("/v1/models", headers=AUTH)).status_code == 405


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"{}", b'{"model":5}', b'{"model":""}', b"\xff"])
async def test_malformed_body_is_400_in_openai_shape(router: Router, engine: FakeEngine, body: bytes) -> None:
    response = await router.client.post("/v1/chat/completions", content=body, headers=AUTH)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert engine.requests == []


async def test_unknown_model_is_404_with_the_names_that_exist(router: Router) -> None:
    response = await router.chat("org/some-model")
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "model_not_found"
    assert "org/some-model" in error["message"]
    assert "m." in error["message"]


async def test_unknown_model_is_told_once_with_key_and_address(router: Router) -> None:
    await router.chat("gone")
    await router.chat("gone")
    (event,) = router.events
    assert (event["type"], event["model"], event["key_name"], event["address"]) == (
        "unknown_model",
        "gone",
        "test",
        "127.0.0.1",
    )


async def test_alias_asks_for_the_served_name(engine: FakeEngine) -> None:
    async with running_router(model("m", engine, aliases=["org/m-8b"])) as router:
        assert (await router.chat("org/m-8b")).status_code == 200
    assert engine.requests[0].json["model"] == "m"


async def test_ids_pass_both_ways_and_the_clients_key_does_not(router: Router, engine: FakeEngine) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {**AUTH, "X-Request-Id": "abc-1", "traceparent": trace, "Cookie": "a=b", "X-Forwarded-For": "1.2.3.4"}
    response = await router.client.post("/v1/chat/completions", json=ask(), headers=headers)
    assert response.headers["x-request-id"] == "abc-1"
    seen = engine.requests[0].headers
    assert (seen["x-request-id"], seen["traceparent"]) == ("abc-1", trace)
    assert seen["authorization"] == f"Bearer token-{engine.port}"
    assert not {"cookie", "x-forwarded-for", "user-agent"} & seen.keys()


async def test_engines_request_id_comes_out(router: Router, engine: FakeEngine) -> None:
    async def answer_with_id(request: Request, answer: Answer) -> None:
        await answer.json({}, headers={"X-Request-Id": "from-engine", "Server": "uvicorn", "Keep-Alive": "5"})

    engine.behaviour = answer_with_id
    response = await router.chat()
    assert response.headers.get_list("x-request-id") == ["from-engine"]
    assert "keep-alive" not in response.headers


@pytest.mark.parametrize("value", ["x" * 129, "a\tb", "ä"])
async def test_unfit_request_id_is_replaced(router: Router, value: str) -> None:
    headers = [(b"Authorization", AUTH["Authorization"].encode()), (b"X-Request-Id", value.encode())]
    response = await router.client.post("/v1/chat/completions", json=ask(), headers=headers)
    assert response.headers["x-request-id"].startswith("req-")


async def test_request_without_id_gets_one_each(router: Router) -> None:
    ids = {(await router.chat()).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


async def test_overhead_is_told(router: Router) -> None:
    assert float((await router.chat()).headers["x-sardeenz-overhead-ms"]) < 1000


async def test_declared_giant_body_is_413_before_it_is_read(engine: FakeEngine) -> None:
    config = RouterConfig(max_body_bytes=1000)
    async with running_router(model("m", engine), config=config) as router:
        response = await router.client.post("/v1/chat/completions", content=b"x" * 5000, headers=AUTH)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
        assert router.app.buffered.held == 0


async def test_body_that_grows_past_the_limit_is_413(engine: FakeEngine) -> None:
    async def pieces():
        for _ in range(50):
            yield b"x" * 1000

    config = RouterConfig(max_body_bytes=10_000)
    async with running_router(model("m", engine), config=config) as router:
        response = await router.client.post("/v1/chat/completions", content=pieces(), headers=AUTH)
        assert response.status_code == 413
        assert router.app.buffered.held == 0
        assert (await router.chat()).status_code == 200


async def test_bodies_in_all_are_bounded(engine: FakeEngine) -> None:
    config = RouterConfig(max_buffered_bytes=100)
    async with running_router(model("m", engine), config=config) as router:
        response = await router.chat(padding="x" * 200)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "router_busy")


async def test_own_fault_is_503_with_retry_after(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(router.app, "_resolve", broken)
    response = await router.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "internal_error")
    assert "retry-after" in response.headers
    assert "a bug" not in response.text


async def test_own_fault_in_an_exchange_is_counted_as_what_was_answered(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: Exchange) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Exchange, "run", broken)
    assert (await router.chat()).status_code == 503
    assert router.app.metrics.requests.values == {("m", "503"): 1}
    await router.wait_for(lambda: bool(router.used))
    assert router.used[0]["errors"] == 1


async def test_requests_per_minute_are_limited_with_headers(engine: FakeEngine) -> None:
    async with running_router(model("m", engine), keys=[key(rpm=2)]) as router:
        first = await router.chat()
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        await router.chat()
        third = await router.chat()
    assert (third.status_code, third.json()["error"]["type"]) == (429, "rate_limit_error")
    assert 1 <= int(third.headers["retry-after"]) <= 30
    assert third.headers["x-ratelimit-remaining-requests"] == "0"


async def test_tokens_per_minute_are_paid_after_the_answer(engine: FakeEngine) -> None:
    async with running_router(model("m", engine), keys=[key(tpm=5)]) as router:
        assert (await router.chat(stream=True)).status_code == 200  # took 10
        response = await router.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_health_needs_no_key_and_metrics_do(router: Router) -> None:
    assert (await router.client.get("/healthz")).status_code == 200
    assert (await router.client.get("/readyz")).json()["status"] == "ready"
    await router.chat()
    text = (await router.client.get("/metrics", headers=AUTH)).text
    assert 'sardeenz_router_requests_total{model="m",code="200"} 1' in text
    assert "vllm" not in text


async def test_metrics_can_be_opened(engine: FakeEngine) -> None:
    config = RouterConfig(metrics_open=True)
    async with running_router(model("m", engine), config=config) as router:
        assert (await router.client.get("/metrics")).status_code == 200


async def test_names_that_clients_invent_make_no_new_series(router: Router) -> None:
    for number in range(20):
        await router.chat(f"invented-{number}")
    text = (await router.client.get("/metrics", headers=AUTH)).text
    assert "invented" not in text
    assert 'sardeenz_router_requests_total{model="",code="404"} 20' in text


async def test_no_404_while_tables_are_swapped(router: Router, engine: FakeEngine) -> None:
    for _ in range(100):
        router.set_routes(model("m", engine))
        assert (await router.chat()).status_code == 200
    assert engine.connections == 1  # and no connection was lost over it


async def test_websocket_is_refused() -> None:
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    async with running_router() as router:
        await router.app({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send)
    assert sent[0]["type"] == "websocket.close"


async def test_limits_of_the_fast_config_are_those_of_the_real_one_otherwise() -> None:
    assert FAST.max_body_bytes == RouterConfig().max_body_bytes
