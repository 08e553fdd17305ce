"""What a browser is sent of a host's record: encoded once per record and process, whoever looks on."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import orjson

_GPU_FIELDS = ("uuid", "total", "used", "free", "util", "temp", "power", "error", "other")
_INSTANCE_FIELDS = (
    "id",
    "resident",
    "baseline",
    "used",
    "prealloc",
    "limit",
    "running",
    "waiting",
    "gen_tokens_per_s",
    "state",
    "drift",
)


def compact(record: dict[str, Any]) -> dict[str, Any]:
    """The record without what the pages do not draw (names of foreign processes, counters)."""
    return {
        "host": record["host"],
        "t": record["t"],
        "gpus": [
            {name: gpu.get(name) for name in _GPU_FIELDS}
            | {"instances": [{name: part.get(name) for name in _INSTANCE_FIELDS} for part in gpu["instances"]]}
            for gpu in record["gpus"]
        ],
    }


class _Keyed:
    """A record that is hashed by host and number, so that two hundred browsers cost one encoding."""

    __slots__ = ("key", "record")

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.key = (record["host"], record.get("seq"), record["t"])

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keyed) and self.key == other.key


@lru_cache(maxsize=256)
def _encode(keyed: _Keyed) -> str:
    return orjson.dumps(compact(keyed.record)).decode()


def encode(record: dict[str, Any]) -> str:
    """JSON text of the compact record."""
    return _encode(_Keyed(record))
