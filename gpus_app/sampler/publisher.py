"""Hands records to Redis and to the pages, and goes on when the broker is away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import orjson
import redis
from channels.layers import get_channel_layer

from gpus_app import broker
from gpus_app.events import LIVE_GROUP, SamplePayload
from gpus_app.sampler.record import GpuPart, HostRecord

log = logging.getLogger(__name__)

#: Seconds between attempts while the broker is away: first and longest.
PAUSE_S, PAUSE_MAX_S = 1.0, 5.0
#: One message to the pages at most: pub/sub copies it for every web process.
MOST_BYTES = 512 * 1024
#: What a chart needs of an instance: an hour of seconds is kept, so the rest is left out.
_KEPT = (
    "id",
    "name",
    "replica",
    "baseline",
    "used",
    "prealloc",
    "limit",
    "running",
    "waiting",
    "preemptions",
    "gen_tokens_per_s",
    "state",
)
_KEPT_OF_GPU = ("total", "used", "free", "util", "temp", "power", "error", "other")


class Publisher:
    """One per process. Keeps its event loop, and with it the channel layer's connection, from tick to tick.

    ``async_to_sync`` would make a loop and a connection for every message.
    """

    def __init__(self, url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = broker.connect(url)
        self._clock = clock
        self._loop = asyncio.new_event_loop()
        self._again_at = float("-inf")
        self._pause_s = PAUSE_S
        self._away = False

    @property
    def away(self) -> bool:
        return self._away

    def publish(self, record: HostRecord) -> bool:
        """Whether it got through. Takes at most about a second, and nothing while it waits to try again."""
        if self._clock() < self._again_at:
            return False
        try:
            self._store(record)
            self._tell(record)
        except (*broker.BrokerErrors, TimeoutError) as exc:
            self._note_away(exc)
            return False
        if self._away:
            log.info("the broker is back")
        self._away, self._pause_s = False, PAUSE_S
        return True

    def close(self) -> None:
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
        self._client.close()

    def _store(self, record: HostRecord) -> None:
        pipe = self._client.pipeline(transaction=False)
        for gpu in record["gpus"]:
            point = orjson.dumps(slim(gpu, record["t"]))
            pipe.xadd(broker.gpu_stream_key(gpu["uuid"]), {"d": point}, maxlen=broker.STREAM_LENGTH, approximate=True)
        key = broker.host_latest_key(record["host"])
        pipe.set(key, orjson.dumps(record), ex=broker.LATEST_EXPIRES_S)
        pipe.execute()

    def _tell(self, record: HostRecord) -> None:
        layer = get_channel_layer()
        if layer is None:
            return
        payload: SamplePayload = {"type": "sample", "record": _bounded(record)}
        self._loop.run_until_complete(
            asyncio.wait_for(layer.group_send(LIVE_GROUP, payload), timeout=broker.SOCKET_LIMIT_S)
        )

    def _note_away(self, exc: Exception) -> None:
        if not self._away:
            log.warning("the broker is away, readings are kept in the database only: %s", exc)
        self._away = True
        self._again_at = self._clock() + self._pause_s
        self._pause_s = min(self._pause_s * 2, PAUSE_MAX_S)
        try:
            self._client.connection_pool.disconnect()
        except (redis.RedisError, OSError) as error:
            log.debug("connections not closed: %s", error)


def slim(gpu: GpuPart, t: float) -> dict[str, Any]:
    """What the hour of seconds keeps of one GPU."""
    row: dict[str, Any] = {"t": t}
    row |= {name: gpu[name] for name in _KEPT_OF_GPU}  # type: ignore[literal-required]
    row["instances"] = [{name: part[name] for name in _KEPT} for part in gpu["instances"]]  # type: ignore[literal-required]
    return row


def _bounded(record: HostRecord) -> dict[str, Any]:
    """The record for the pages; without the names of other processes should it ever be too large to broadcast."""
    if sum(400 * len(gpu["instances"]) + 150 * len(gpu["other_processes"]) for gpu in record["gpus"]) < MOST_BYTES:
        return dict(record)
    return {**record, "gpus": [{**gpu, "other_processes": []} for gpu in record["gpus"]], "stale_segments": []}
