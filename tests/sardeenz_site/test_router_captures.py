"""The ring of captured requests: bounded twice, gone when the time is over, closed when capture is off."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
import redis
import redis.asyncio as aioredis

from models_app.router.app import RouterApp
from models_app.router.table import TableSource
from models_app.services.capture import RING
from sardeenz_site.router_captures import CAPTURES_LIST, RING_BYTES, RING_LENGTH, push, ring_names
from sardeenz_site.router_feed import RouterFeed
from tests.models_app.router.support import key, table


@pytest.fixture
def broker(valkey_url: str) -> redis.Redis:
    connection = redis.Redis.from_url(valkey_url)
    connection.flushdb()
    return connection


@pytest.fixture
async def client(broker: redis.Redis, valkey_url: str) -> AsyncIterator[aioredis.Redis]:
    client = aioredis.Redis.from_url(valkey_url)
    yield client
    await client.aclose()
    broker.close()


def test_router_and_worker_mean_the_same_ring() -> None:
    assert RING == CAPTURES_LIST


async def test_ring_holds_the_newest(client: aioredis.Redis, broker: redis.Redis) -> None:
    for number in range(RING_LENGTH + 20):
        await push(client, {"key_id": 7, "number": number}, until=time.time() + 60)
    ring, _ = ring_names(7)
    assert broker.llen(ring) == RING_LENGTH
    assert orjson.loads(broker.lindex(ring, 0))["number"] == RING_LENGTH + 19


async def test_ring_holds_no_more_than_its_bytes(client: aioredis.Redis, broker: redis.Redis) -> None:
    big = "x" * (RING_BYTES // 10)
    for number in range(25):
        await push(client, {"key_id": 7, "number": number, "request": big}, until=time.time() + 60)
    ring, size = ring_names(7)
    held = sum(len(one) for one in broker.lrange(ring, 0, -1))
    assert 5 <= broker.llen(ring) < 10
    assert held == int(broker.get(size)) <= RING_BYTES
    assert orjson.loads(broker.lindex(ring, 0))["number"] == 24


async def test_ring_goes_when_the_time_is_over(client: aioredis.Redis, broker: redis.Redis) -> None:
    await push(client, {"key_id": 7}, until=time.time() + 60)
    for name in ring_names(7):
        assert 0 < broker.ttl(name) <= 62
    await push(client, {"key_id": 7}, until=time.time() - 60)
    assert broker.exists(*ring_names(7)) == 0


async def test_what_waits_for_redis_goes_when_its_time_is_over(tmp_path: Path) -> None:
    feed = RouterFeed(TableSource(), file=tmp_path / "routes.json", redis_url="redis://127.0.0.1:1/0")
    feed.on_capture({"key_id": 7, "until": time.time() - 1})
    feed.on_capture({"key_id": 8, "until": time.time() + 60})
    feed._forget_captures()
    assert [capture["key_id"] for capture in feed._captures] == [8]


async def test_what_was_begun_while_capture_was_on_is_not_kept_once_it_is_off(
    client: aioredis.Redis, broker: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    source = TableSource(table(keys=[key(id=7, capture_until=time.time() + 60)]))
    feed = RouterFeed(source, file=tmp_path / "routes.json", redis_url=valkey_url)
    RouterApp(source)
    feed.on_capture({"key_id": 7})
    await feed._push_captures(client)
    assert broker.llen(ring_names(7)[0]) == 1
    feed.on_capture({"key_id": 7})
    source.swap(table(keys=[key(id=7)]))
    await feed._push_captures(client)
    assert broker.llen(ring_names(7)[0]) == 1
    assert not feed._captures
