"""The channel layer of service: Redis pub/sub, where what came once is decoded once, however many pages look on."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from channels_redis.pubsub import RedisPubSubChannelLayer

#: Messages kept decoded: what a process's consumers have still to take, some hosts' newest readings.
_KEPT = 32


class SharedPubSubChannelLayer(RedisPubSubChannelLayer):  # type: ignore[misc]  # channels_redis carries no types
    """Every consumer of a process gets the same message object: handlers must not change what they are given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._decode = lru_cache(maxsize=_KEPT)(super().deserialize)

    def deserialize(self, message: bytes) -> Any:
        return self._decode(message)
