"""Routes in from Redis and file, usage and wishes out, and a broker that comes and goes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis

from models_app.router.app import RouterApp
from models_app.router.config import RouterConfig
from models_app.router.table import TableSource
from sardeenz_site.redis_url import celery_broker_url
from sardeenz_site.router_feed import EVENTS_LIST, ROUTES_CHANNEL, ROUTES_KEY, RouterFeed
from sardeenz_site.router_usage import USAGE_LIST
from tests.models_app.router.support import key, model, snapshot

DEAD = "redis://127.0.0.1:1/0"


async def wait_for(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.01)


class Fed:
    """A router with its feed, and a way to speak to its Redis."""

    def __init__(self, url: str, file: Path) -> None:
        self.source = TableSource()
        self.feed = RouterFeed(self.source, file=file, redis_url=url, celery_url=celery_broker_url(url))
        self.app = RouterApp(
            self.source,
            on_demand=self.feed.on_demand,
            on_usage=self.feed.on_usage,
            on_event=self.feed.on_event,
            on_capture=self.feed.on_capture,
            on_suspect=self.feed.on_suspect,
            config=RouterConfig(usage_flush_s=0.05),
        )
        self.feed.start(self.app)
        self.app.start()

    @property
    def names(self) -> list[str] | None:
        return None if self.source.table is None else sorted(self.source.table.models)

    async def stop(self) -> None:
        await self.app.stop()
        await self.feed.stop()


@pytest.fixture
def broker(valkey_url: str) -> redis.Redis:
    connection = redis.Redis.from_url(valkey_url)
    connection.flushdb()
    return connection


@pytest.fixture
async def fed(broker: redis.Redis, valkey_url: str, tmp_path: Path) -> AsyncIterator[Fed]:
    fed = Fed(valkey_url, tmp_path / "routes.json")
    yield fed
    await fed.stop()
    broker.close()


def publish(broker: redis.Redis, *models: dict[str, Any], **fields: Any) -> None:
    broker.set(ROUTES_KEY, orjson.dumps(snapshot(*models, **fields)))
    broker.publish(ROUTES_CHANNEL, "1")


async def test_change_arrives_by_message(fed: Fed, broker: redis.Redis) -> None:
    await asyncio.sleep(0.2)
    publish(broker, model("m"), version=5)
    await wait_for(lambda: fed.names == ["m"])
    publish(broker, model("n"), version=6)
    await wait_for(lambda: fed.names == ["n"])


async def test_change_whose_message_was_lost_arrives_by_timer(fed: Fed, broker: redis.Redis) -> None:
    broker.set(ROUTES_KEY, orjson.dumps(snapshot(model("m"))))
    await wait_for(lambda: fed.names == ["m"])


async def test_what_redis_holds_counts_even_if_its_clock_was_set_back(fed: Fed, broker: redis.Redis) -> None:
    publish(broker, model("m"), version=900)
    await wait_for(lambda: fed.names == ["m"])
    publish(broker, model("n"), version=5)
    await wait_for(lambda: fed.names == ["n"])


async def test_snapshot_that_cannot_be_read_leaves_the_routes_as_they_are(fed: Fed, broker: redis.Redis) -> None:
    publish(broker, model("m"))
    await wait_for(lambda: fed.names == ["m"])
    for broken in (b"{half", b"[]", orjson.dumps({"version": 9, "at": 1, "models": [{}], "keys": []})):
        broker.set(ROUTES_KEY, broken)
        await fed.feed.refresh()
        assert fed.names == ["m"]


async def test_same_routes_again_only_renew_their_age(fed: Fed) -> None:
    first = snapshot(model("m"), keys=[key()])
    fed.feed.take(orjson.dumps(first), newest=True)
    made = fed.source.table
    fed.feed.take(orjson.dumps({**first, "version": 2, "at": first["at"] + 2}), newest=True)
    assert fed.source.table is made
    assert fed.source.age_s() < 5


async def test_usage_events_and_wishes_go_out(fed: Fed, broker: redis.Redis) -> None:
    fed.app.usage.record(1, "k", "m").requests += 2
    fed.feed.on_event({"type": "unknown_model", "model": "x"})
    await fed.feed.on_demand("m")
    await wait_for(lambda: broker.llen(USAGE_LIST) == 1 and broker.llen(EVENTS_LIST) == 1)
    batch = orjson.loads(broker.lindex(USAGE_LIST, 0))
    (record,) = batch["records"]
    assert batch["sequence"] == 1
    assert (record["key_id"], record["key_name"], record["model"], record["requests"]) == (1, "k", "m", 2)
    task = json.loads(broker.lindex("control", 0))
    assert task["headers"]["task"] == "models_app.demand"
    assert "'m'" in task["headers"]["argsrepr"]
    assert task["headers"]["expires"]


async def test_suspect_is_told_to_the_control_side(fed: Fed, broker: redis.Redis) -> None:
    fed.app.tell_suspect(7, "connect")
    await wait_for(lambda: broker.llen("control") == 1)
    headers = json.loads(broker.lindex("control", 0))["headers"]
    assert headers["task"] == "models_app.suspect"
    assert "7" in headers["argsrepr"] and "'connect'" in headers["argsrepr"]
    assert headers["expires"]


async def test_hint_that_the_broker_did_not_take_in_time_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = Fed(DEAD, tmp_path / "routes.json")
    try:
        fed.app.tell_suspect(7, "connect")
        fed.app.tell_suspect(8, "reset")
        await wait_for(lambda: not fed.feed._suspects)
        await wait_for(lambda: fed.feed._away)
        fed.app.tell_suspect(9, "reset")  # and it goes on listening to failures
        await wait_for(lambda: not fed.feed._suspects)
    finally:
        await fed.stop()


async def test_two_processes_hear_of_each_other(fed: Fed, valkey_url: str, tmp_path: Path) -> None:
    other = Fed(valkey_url, tmp_path / "other.json")
    assert other.feed._peers is not None
    other.feed._peers.me = "other"
    one = fed.app.limiter
    from models_app.router.table import Key

    limited = Key(id=1, name="k", digest="", max_concurrency=1)
    other.app.limiter.enter(limited)
    await wait_for(lambda: one._keys and one._keys[1].inflight_elsewhere == 1)
    await other.stop()


async def test_file_serves_while_redis_is_away(tmp_path: Path) -> None:
    file = tmp_path / "routes.json"
    file.write_bytes(orjson.dumps(snapshot(model("m"), version=5)))
    fed = Fed(DEAD, file)
    try:
        assert fed.names == ["m"]  # at once
        file.write_bytes(orjson.dumps(snapshot(model("old"), version=4)))
        await fed.feed.refresh()
        assert fed.names == ["m"]
        draft = file.with_suffix(".new")
        draft.write_bytes(orjson.dumps(snapshot(model("n"), version=6)))
        draft.replace(file)
        await fed.feed.refresh()
        assert fed.names == ["n"]
        fed.app.usage.record(1, "k", "m").requests += 1
        await fed.app._flush()
        (kept,) = (orjson.loads(file.read_bytes()) for file in (tmp_path / "router-usage").glob("*.json"))
        assert [record["requests"] for record in kept["records"]] == [1]
        with pytest.raises(Exception, match=r"refused|connect"):
            await fed.feed.on_demand("m")
    finally:
        await fed.stop()


def test_router_loads_no_django_app_and_stays_small(tmp_path: Path) -> None:
    code = (
        "import sys; from sardeenz_site.router_asgi import app;"
        "bad = [n for n in sys.modules if n.split('.')[0] in ('celery', 'channels', 'models_app.models')"
        " or n.startswith(('django.db', 'django.apps', 'django.conf'))];"
        "rss = int(open('/proc/self/statm').read().split()[1]) * 4096; print(bad, rss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"SARDEENZ_HOME": str(tmp_path), "REDIS_URL": DEAD, "PATH": "/usr/bin", "SARDEENZ_ENV_FILE": "/dev/null"},
        timeout=60,
        check=True,
    )
    bad, rss = done.stdout.rsplit(" ", 1)
    assert bad == "[]"
    assert int(rss) < 60e6
