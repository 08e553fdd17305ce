"""Keeps the routers' table fresh: written on every commit that changes it, and by the control worker's timer.

Redis carries it (key and pub/sub); a file in SARDEENZ_HOME carries it when the broker is away. The version is Redis's
own clock, taken before the database is read: of two writers at once, the one that read later wins, on every host.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from pathlib import Path
from typing import Any

import orjson
import redis
from django.conf import settings
from django.db import DatabaseError

from models_app import broker, events, selectors

log = logging.getLogger(__name__)

KEY = "sardeenz:routes"
CHANNEL = "sardeenz:routes.changed"
_DIGEST_KEY = "sardeenz:routes.digest"

#: Writes the table unless a newer one stands there; tells the routers only when something but the clock differs.
_WRITE = """
local held = tonumber(redis.call('GET', KEYS[2]) or '0')
if held > tonumber(ARGV[2]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], ARGV[2])
if redis.call('GETSET', KEYS[3], ARGV[3]) ~= ARGV[3] then redis.call('PUBLISH', ARGV[4], ARGV[2]) end
return 1
"""


def file_path() -> Path:
    return Path(settings.SARDEENZ_HOME) / "routes.json"


def _write_file(data: bytes) -> None:
    """Replace the file in one step; it holds engine tokens, so only its owner may read it."""
    path = file_path()
    part = path.with_name(f".routes.{os.getpid()}.{time.monotonic_ns()}")
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as out:
            out.write(data)
        part.replace(path)
    except OSError as exc:
        log.warning("routes not written to %s: %s", path, exc)
        part.unlink(missing_ok=True)


def _clock(connection: redis.Redis | None) -> tuple[int, redis.Redis | None]:
    """Microseconds by Redis's clock, or by ours when it does not answer."""
    if connection is not None:
        try:
            seconds, micros = connection.time()
        except (redis.RedisError, OSError) as exc:
            log.warning("routes go to the file only: %s", exc)
        else:
            return seconds * 1_000_000 + micros, connection
    return time.time_ns() // 1000, None


def publish() -> dict[str, Any]:
    """Read the database, write the table to Redis and to the file; returns it. A broker away costs a warning."""
    version, connection = _clock(broker.client())
    snapshot = selectors.routes_snapshot()
    digest = hashlib.sha256(orjson.dumps([snapshot[part] for part in ("models", "routes", "keys")])).hexdigest()
    snapshot["version"] = version
    data = orjson.dumps(snapshot)
    _write_file(data)
    if connection is not None:
        try:
            connection.eval(_WRITE, 3, KEY, f"{KEY}.version", _DIGEST_KEY, data, version, digest, CHANNEL)
        except (redis.RedisError, OSError) as exc:
            log.warning("routes not written to Redis: %s", exc)
    return snapshot


def on_change() -> None:
    """After a commit. Must not raise: the act is done, and the timer writes the table again within seconds."""
    try:
        publish()
    except DatabaseError as exc:
        log.warning("routes not read: %s", exc)


def connect() -> None:
    """Have every change of this process written."""
    if on_change not in events.routes_listeners:
        events.routes_listeners.append(on_change)
