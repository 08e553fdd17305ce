"""Usage arrives, and counts once, whatever breaks on the way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
import redis.asyncio as aioredis
from redis.exceptions import ConnectionError as RedisAway

from models_app.router.usage import UsageRecord
from sardeenz_site import router_usage
from sardeenz_site.router_usage import USAGE_LIST, UsageSender


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


@pytest.fixture
async def dead() -> AsyncIterator[aioredis.Redis]:
    client = aioredis.Redis.from_url("redis://127.0.0.1:1/0")
    yield client
    await client.aclose()


def counted(requests: int) -> UsageRecord:
    record = UsageRecord("2026-11-30", 1, "k", "m")
    record.requests = requests
    return record


def arrived(broker: redis.Redis) -> int:
    """Requests as the worker would count them: a number that a sender has used already is passed over."""
    last: dict[str, int] = {}
    total = 0
    for raw in broker.lrange(USAGE_LIST, 0, -1):
        batch = orjson.loads(raw)
        if batch["sequence"] > last.get(batch["sender"], 0):
            last[batch["sender"]] = batch["sequence"]
            total += sum(record["requests"] for record in batch["records"])
    return total


async def test_batches_are_numbered_and_leave_no_file(
    client: aioredis.Redis, broker: redis.Redis, tmp_path: Path
) -> None:
    sender = UsageSender(tmp_path / "router-usage")
    await sender.send(client, [counted(1)])
    await sender.send(client, [counted(2)])
    assert [orjson.loads(raw)["sequence"] for raw in broker.lrange(USAGE_LIST, 0, -1)] == [1, 2]
    assert not (tmp_path / "router-usage").exists()


async def test_a_batch_whose_answer_was_lost_is_sent_again_as_it_was(
    client: aioredis.Redis, broker: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = UsageSender(tmp_path)
    push = router_usage._push

    async def arrives_but_nobody_says_so(*args: Any) -> None:
        await push(*args)
        raise RedisAway("timeout")

    monkeypatch.setattr(router_usage, "_push", arrives_but_nobody_says_so)
    await sender.send(client, [counted(1)])
    assert sender.file.exists()
    monkeypatch.setattr(router_usage, "_push", push)
    await sender.settle(client)
    await sender.send(client, [counted(2)])
    assert arrived(broker) == 3
    assert broker.llen(USAGE_LIST) == 3
    assert list(tmp_path.iterdir()) == []


async def test_while_redis_is_away_the_caller_keeps_what_it_tells_next_time(
    client: aioredis.Redis, dead: aioredis.Redis, broker: redis.Redis, tmp_path: Path
) -> None:
    sender = UsageSender(tmp_path)
    await sender.send(dead, [counted(1)])  # taken over: it may have arrived
    for requests in (2, 5):
        with pytest.raises(RedisAway):
            await sender.send(dead, [counted(requests)])
    await sender.send(client, [counted(5)])
    assert arrived(broker) == 6
    assert list(tmp_path.iterdir()) == []


async def test_what_a_router_left_is_sent_by_the_next_one(
    client: aioredis.Redis, dead: aioredis.Redis, broker: redis.Redis, tmp_path: Path
) -> None:
    ended = UsageSender(tmp_path)
    await ended.send(dead, [counted(1)])
    with pytest.raises(RedisAway):
        await ended.send(dead, [counted(2)])
    successor = UsageSender(tmp_path)
    assert await successor.send_left(client) == 0  # its owner lives
    ended.close()
    assert await successor.send_left(client) == 2
    assert await successor.send_left(client) == 0
    assert arrived(broker) == 3
    assert list(tmp_path.iterdir()) == []


async def test_a_successor_killed_in_the_middle_counts_nothing_twice(
    client: aioredis.Redis, dead: aioredis.Redis, broker: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = UsageSender(tmp_path)
    await ended.send(dead, [counted(1)])
    ended.close()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            await UsageSender(tmp_path).send_left(client)
    assert await UsageSender(tmp_path).send_left(client) == 1
    assert arrived(broker) == 1


async def test_a_full_disk_stops_nothing(
    client: aioredis.Redis, dead: aioredis.Redis, broker: redis.Redis, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    sender = UsageSender(tmp_path / "file" / "folder")
    await sender.send(dead, [counted(1)])
    await sender.send(client, [counted(2)])
    assert arrived(broker) == 3
