"""J8: whatever goes wrong, a client's key and an engine's token are in no answer and in no log line."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from models_app.router.config import RouterConfig
from models_app.router.table import TableSource
from tests.models_app.router.support import FAST, Answer, FakeEngine, Request, Router, ask, key, model, running_router

SECRET = "sz-ThisIsTheSecretOfAClient0123456789abcdef"
PATH = "/v1/chat/completions"


async def send(router: Router, **changes: Any) -> httpx.Response:
    given: dict[str, Any] = {"json": ask("m"), "headers": {"Authorization": f"Bearer {SECRET}"}} | changes
    return await router.client.post(PATH, **given)


async def _echoes(request: Request, answer: Answer) -> None:
    """The worst of engines: tells in its error what it was sent."""
    await answer.json({"error": {"message": f"bad: {request.headers}", "type": "x", "code": 400}}, 400)


async def _breaks(request: Request, answer: Answer) -> None:
    answer.writer.transport.abort()


def _fault(router: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*args: Any) -> None:
        raise RuntimeError("a fault of our own")

    monkeypatch.setattr(router.app, "_run", fails)


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "unknown key": (401, {"keys": []}, {}),
    "wrong scheme": (401, {}, {"headers": {"Authorization": f"Basic {SECRET}"}}),
    "no scheme": (401, {}, {"headers": {"Authorization": SECRET}}),
    "expired": (401, {"keys": [key(SECRET, expires_at=time.time() - 1)]}, {}),
    "other model": (403, {"keys": [key(SECRET, models=["other"])]}, {}),
    "no such model": (404, {}, {"json": ask("none")}),
    "no JSON": (400, {}, {"json": None, "content": b"{"}),
    "limit": (429, {"keys": [key(SECRET, rpm=0)]}, {}),
    "at once": (429, {"keys": [key(SECRET, max_concurrency=0)]}, {}),
    "too large": (413, {"config": RouterConfig(max_body_bytes=10)}, {}),
    "key as a request id": (401, {"keys": []}, {"headers": {"Authorization": f"Bearer {SECRET}", "x-request-id": "r"}}),
}


@pytest.mark.parametrize("case", CASES)
async def test_refusals_of_the_router(engine: FakeEngine, caplog: pytest.LogCaptureFixture, case: str) -> None:
    caplog.set_level(logging.DEBUG)
    status, fields, changes = CASES[case]
    async with running_router(model("m", engine), **({"keys": [key(SECRET)], "config": FAST} | fields)) as router:
        response = await send(router, **changes)
    assert response.status_code == status
    _nothing_of(SECRET, response, caplog)


@pytest.mark.parametrize("behaviour", [_echoes, _breaks])
async def test_failures_of_the_engine(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, behaviour: Callable[..., Any]
) -> None:
    caplog.set_level(logging.DEBUG)
    engine.behaviour = behaviour
    async with running_router(model("m", engine), keys=[key(SECRET)]) as router:
        response = await send(router)
    assert response.status_code in (400, 503)
    _nothing_of(SECRET, response, caplog)
    assert all(SECRET not in str(request.headers) + request.body.decode() for request in engine.requests)


async def test_a_fault_of_our_own(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    async with running_router(model("m", engine), keys=[key(SECRET)]) as router:
        _fault(router, monkeypatch)
        response = await send(router)
    assert response.status_code == 503
    assert "a fault of our own" in caplog.text  # it is logged, with its traceback
    _nothing_of(SECRET, response, caplog)


async def test_keys_that_nobody_can_check_now(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with running_router() as router:
        router.app.source = TableSource()
        response = await send(router)
    assert response.status_code == 503
    _nothing_of(SECRET, response, caplog)


def _nothing_of(secret: str, response: httpx.Response, caplog: pytest.LogCaptureFixture) -> None:
    ours = [
        record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))
    ]  # the client's own
    said = "\n".join(logging.Formatter().format(record) for record in ours)
    for text in (response.text, str(response.headers), said):
        assert secret not in text
        assert secret[3:] not in text
