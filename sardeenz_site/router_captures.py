"""Captured requests on their way to Redis: one ring per key, bounded by number and by bytes, gone when time is over."""

from __future__ import annotations

from typing import Any

import orjson
import redis.asyncio as aioredis

CAPTURES_LIST = "sardeenz:router.captures:"  # and the key's id
RING_LENGTH = 100
RING_BYTES = 4 * 1024**2

#: KEYS: the ring, its size in bytes. ARGV: the capture, most captures, most bytes, when all of it goes (epoch seconds).
_PUSH = """
redis.call('LPUSH', KEYS[1], ARGV[1])
local bytes = redis.call('INCRBY', KEYS[2], #ARGV[1])
while redis.call('LLEN', KEYS[1]) > tonumber(ARGV[2]) or bytes > tonumber(ARGV[3]) do
  local oldest = redis.call('RPOP', KEYS[1])
  if not oldest then break end
  bytes = redis.call('DECRBY', KEYS[2], #oldest)
end
redis.call('EXPIREAT', KEYS[1], ARGV[4])
redis.call('EXPIREAT', KEYS[2], ARGV[4])
return bytes
"""


def ring_names(key_id: int) -> tuple[str, str]:
    """The ring and its size."""
    ring = f"{CAPTURES_LIST}{key_id}"
    return ring, f"{ring}:bytes"


async def push(client: aioredis.Redis, capture: dict[str, Any], *, until: float) -> None:
    """Add a capture to its key's ring, which goes at ``until`` (epoch seconds). Raises RedisError or OSError."""
    ring, size = ring_names(capture["key_id"])
    await client.eval(_PUSH, 2, ring, size, orjson.dumps(capture), RING_LENGTH, RING_BYTES, int(until) + 1)
