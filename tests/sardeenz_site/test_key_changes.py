"""What is done to a key reaches the routers: from the service through database, Redis and feed to the next request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgiref.sync import sync_to_async
from django.utils import timezone

from models_app.models import ApiKey, UsageRecord
from models_app.router.app import RouterApp
from models_app.router.config import RouterConfig
from models_app.router.table import TableSource
from models_app.services.capture import capture_start, capture_stop, captures_read
from models_app.services.keys import api_key_create, api_key_revoke, api_key_rotate, api_key_update
from models_app.services.usage import usage_fold
from sardeenz_site import router_feed
from sardeenz_site.router_feed import RouterFeed
from tests.builders import make_host, make_instance, make_model
from tests.models_app.router.support import HANGS_S, NO_TLS, FakeEngine, ask, serving

pytestmark = pytest.mark.django_db(transaction=True)

Act = Callable[..., Any]


class Fed:
    """A router under uvicorn with its real feed; nothing but Redis connects it to the services."""

    def __init__(self, url: str, folder: Path) -> None:
        self.source = TableSource()
        self.feed = RouterFeed(self.source, file=folder / "no-file.json", redis_url=url)
        self.app = RouterApp(
            self.source,
            on_usage=self.feed.on_usage,
            on_capture=self.feed.on_capture,
            config=RouterConfig(usage_flush_s=0.05),
        )
        self.feed.start(self.app)
        self.app.start()

    async def stop(self) -> None:
        await self.app.stop()
        await self.feed.stop()


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    engine = await FakeEngine().start()
    yield engine
    await engine.stop()


@pytest.fixture
async def routers(
    valkey: str, settings: Any, tmp_path: Path, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Two routers that know the model ``m``; their timers never come round, so a change must come by message."""
    monkeypatch.setattr(router_feed, "_POLL_S", 3600.0)
    settings.SARDEENZ_HOME = tmp_path
    await sync_to_async(_one_model)(engine.port)
    feds = [Fed(valkey, tmp_path / str(number)) for number in range(2)]
    async with serving(feds[0].app) as first, serving(feds[1].app) as second:
        clients = [
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=HANGS_S, trust_env=False, verify=NO_TLS)
            for port in (first, second)
        ]
        yield clients
        for client in clients:
            await client.aclose()
        for fed in feds:
            await fed.stop()


def _one_model(port: int) -> None:
    make_instance(model=make_model(served_model_name="m"), host=make_host(address="127.0.0.1"), port=port)


async def _status(client: httpx.AsyncClient, token: str, **fields: Any) -> int:
    answer = await client.post(
        "/v1/chat/completions", json=ask("m", **fields), headers={"Authorization": f"Bearer {token}"}
    )
    return answer.status_code


async def _until(routers: list[httpx.AsyncClient], token: str, status: int) -> float:
    """Wait until every router answers so; how long that took, seconds."""
    begun = time.monotonic()
    async with asyncio.timeout(HANGS_S):
        for client in routers:
            while await _status(client, token) != status:
                await asyncio.sleep(0.01)
    return time.monotonic() - begun


async def _made(**fields: Any) -> tuple[ApiKey, str]:
    return await sync_to_async(api_key_create)("ci", role="viewer", actor="anna", **fields)


async def test_revoked_key_is_refused_by_every_router(routers: list[httpx.AsyncClient]) -> None:
    key, token = await _made()
    await _until(routers, token, 200)
    await sync_to_async(api_key_revoke)(key, actor="anna")
    print(f"refused by both routers after {await _until(routers, token, 401):.3f} s")
    assert [await _status(client, token) for client in routers] == [401, 401]


async def test_rotated_key_works_with_both_secrets_and_the_old_one_ends_by_the_routers_own_clock(
    routers: list[httpx.AsyncClient],
) -> None:
    key, old = await _made()
    await _until(routers, old, 200)
    row, new = await sync_to_async(api_key_rotate)(key, grace_s=3600, actor="anna")
    await _until(routers, new, 200)
    assert [await _status(client, old) for client in routers] == [200, 200]
    row, newest = await sync_to_async(api_key_rotate)(row, grace_s=1, actor="anna")
    await _until(routers, newest, 200)
    await _until(routers, old, 401)  # two secrets at most
    await _until(routers, new, 401)  # nobody says a word: its second is over
    assert [await _status(client, newest) for client in routers] == [200, 200]


async def test_limit_of_a_key_changes_for_requests_to_come(routers: list[httpx.AsyncClient]) -> None:
    key, token = await _made(requests_per_minute=1)
    await _until(routers[:1], token, 200)
    assert await _status(routers[0], token) == 429
    await sync_to_async(api_key_update)(key, actor="anna", changes={"requests_per_minute": None})
    await _until(routers, token, 200)


async def test_priority_reaches_the_queue(routers: list[httpx.AsyncClient], valkey: str, tmp_path: Path) -> None:
    _, token = await _made(priority=90)
    await _until(routers, token, 200)
    fed = Fed(valkey, tmp_path)
    async with asyncio.timeout(HANGS_S):
        while fed.source.table is None:
            await asyncio.sleep(0.01)
    assert [key.priority for key in fed.source.table.keys.values()] == [90]
    await fed.stop()


async def test_usage_reaches_the_rows_from_every_router(routers: list[httpx.AsyncClient]) -> None:
    _, token = await _made()
    await _until(routers, token, 200)
    for client in routers:
        assert await _status(client, token, stream=True) == 200

    async with asyncio.timeout(HANGS_S):
        while await sync_to_async(_requests)() < 4:
            await asyncio.sleep(0.02)
    row = await UsageRecord.objects.aget()
    assert (row.key_name, row.served_model_name) == ("ci", "m")
    assert row.completion_tokens == 3 * row.requests
    assert sum(row.ttft_histogram.values()) == 2  # of the two streams


def _requests() -> int:
    usage_fold()
    return sum(UsageRecord.objects.values_list("requests", flat=True))


async def test_requests_are_captured_from_on_to_off_and_by_nobody_else(routers: list[httpx.AsyncClient]) -> None:
    key, token = await _made()
    _, other = await sync_to_async(api_key_create)("other", role="viewer", actor="anna")
    await _until(routers, token, 200)
    await _until(routers, other, 200)
    row = await sync_to_async(capture_start)(key, actor="anna")

    captured: list[Any] = []
    async with asyncio.timeout(HANGS_S):
        while len(captured) < 3:
            for client in routers:
                await _status(client, token, padding="this is of ci")
                await _status(client, other, padding="this is of other")
            captured = await sync_to_async(captures_read)(row, actor="anna")
    assert all("this is of ci" in one.request for one in captured)

    row = await sync_to_async(capture_stop)(row, actor="anna")
    assert await sync_to_async(captures_read)(row, actor="anna") == []


async def test_expired_key_is_refused_without_a_word_from_anybody(routers: list[httpx.AsyncClient]) -> None:
    _, token = await _made(expires_at=timezone.now() + timedelta(seconds=3))
    await _until(routers, token, 200)
    await _until(routers, token, 401)
