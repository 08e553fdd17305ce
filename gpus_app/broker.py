"""Where recent readings live in Redis/Valkey, and a client that gives up quickly.

``sardeenz:gpu:<uuid>``            stream, one entry a second for the last hour, field ``d`` = JSON of one GPU and ``t``
``sardeenz:host:<name>:latest``    string, the host's last record as JSON
"""

from __future__ import annotations

import functools

import redis
from django.conf import settings
from redis.backoff import NoBackoff
from redis.retry import Retry

#: Seconds and thus entries kept per GPU.
STREAM_LENGTH = 3600
#: A record older than this is nobody's present: its key goes by itself.
LATEST_EXPIRES_S = 24 * 3600
#: The broker stands beside us; whoever waits for longer than this waits for nothing.
SOCKET_LIMIT_S = 0.5

#: What a broken or absent broker looks like.
BrokerErrors = (redis.RedisError, OSError)


def gpu_stream_key(uuid: str) -> str:
    return f"sardeenz:gpu:{uuid}"


def host_latest_key(host_name: str) -> str:
    return f"sardeenz:host:{host_name}:latest"


def connect(url: str) -> redis.Redis:
    """A client without retries: a page or a tick would rather do without than wait."""
    return redis.Redis.from_url(
        url,
        socket_timeout=SOCKET_LIMIT_S,
        socket_connect_timeout=SOCKET_LIMIT_S,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )


@functools.lru_cache(maxsize=4)
def _shared(url: str) -> redis.Redis:
    return connect(url)


def client() -> redis.Redis:
    """This process's client of the configured broker."""
    return _shared(settings.REDIS_URL)
