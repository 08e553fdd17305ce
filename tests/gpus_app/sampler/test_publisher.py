"""Records reach Redis and the pages; a broker that is away costs neither time nor the sampler."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator

import orjson
import pytest
import redis
from channels.layers import get_channel_layer

from gpus_app import broker
from gpus_app.events import LIVE_GROUP
from gpus_app.sampler import publisher as publisher_module
from gpus_app.sampler.publisher import Publisher, _bounded, slim
from tests.gpus_app.sampler.records import gpu_part, instance_part, record


@pytest.fixture
def publisher(valkey: str) -> Iterator[Publisher]:
    publisher = Publisher(valkey)
    yield publisher
    publisher.close()


def test_the_newest_record_and_an_entry_per_card_are_stored(publisher: Publisher, valkey: str) -> None:
    one = record(1_800_000_000.5, gpu_part(), gpu_part(uuid="GPU-b"))
    assert publisher.publish(one)
    with redis.Redis.from_url(valkey) as client:
        latest = client.get(broker.host_latest_key("host-a"))
        assert orjson.loads(latest) == one  # type: ignore[arg-type]
        for uuid in ("GPU-a", "GPU-b"):
            ((_, fields),) = client.xrange(broker.gpu_stream_key(uuid))
            point = orjson.loads(fields[b"d"])
            assert point["t"] == 1_800_000_000.5 and point["used"] == 5 * 1024**3
            assert point["instances"][0]["used"] == 1024**3


def test_the_stream_keeps_an_hour(publisher: Publisher, valkey: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker, "STREAM_LENGTH", 100)
    for second in range(350):
        publisher._store(record(1_800_000_000.0 + second))
    with redis.Redis.from_url(valkey) as client:
        # Trimmed by whole nodes of a hundred entries, which costs the broker nothing.
        assert 100 <= client.xlen(broker.gpu_stream_key("GPU-a")) <= 210


def test_pages_are_told_over_the_channel_layer(publisher: Publisher) -> None:
    layer = get_channel_layer()

    async def listen() -> dict[str, object]:
        name = await layer.new_channel()
        await layer.group_add(LIVE_GROUP, name)
        await asyncio.to_thread(publisher.publish, record(seq=7))
        return await asyncio.wait_for(layer.receive(name), 10)  # type: ignore[no-any-return]

    message = asyncio.run(listen())
    assert message["type"] == "sample" and message["record"] == record(seq=7)


def test_what_the_hour_keeps_is_what_a_chart_needs() -> None:
    point = slim(gpu_part(), 5.0)
    assert set(point) == {"t", "total", "used", "free", "util", "temp", "power", "error", "other", "instances"}
    assert "gen_tokens" not in point["instances"][0] and "limit" in point["instances"][0]


def test_a_record_too_large_to_broadcast_loses_the_names_of_strangers() -> None:
    """H11: an event of megabytes breaks pub/sub for everyone."""
    crowd = [{"pid": pid, "name": "x", "bytes": 1} for pid in range(5000)]
    large = record(1.0, gpu_part(other_processes=crowd))
    assert _bounded(large)["gpus"][0]["other_processes"] == []
    assert _bounded(record(1.0, gpu_part(instances=[instance_part()] * 32)))["gpus"][0]["instances"]


def test_a_broker_that_refuses_is_away_and_is_tried_again_after_a_pause(valkey: str) -> None:
    now = [0.0]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    publisher = Publisher(f"redis://127.0.0.1:{port}/0", clock=lambda: now[0])
    try:
        assert not publisher.publish(record()) and publisher.away
        tries = []
        publisher._store = tries.append  # type: ignore[method-assign]
        assert not publisher.publish(record()) and tries == []
        now[0] += publisher_module.PAUSE_S
        assert publisher.publish(record()) and not publisher.away
    finally:
        publisher.close()


def test_a_broker_that_says_nothing_holds_up_a_look_by_a_second_at_most() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        publisher = Publisher(f"redis://127.0.0.1:{server.getsockname()[1]}/0")
        try:
            began = time.monotonic()
            assert not publisher.publish(record())
            assert time.monotonic() - began < 5 * broker.SOCKET_LIMIT_S + 2
        finally:
            publisher.close()
