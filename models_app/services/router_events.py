"""What routers found notable: written into the audit trail, so that it is seen before anybody complains.

Today that is one thing: a client asks for a model that does not exist, with which key and from where. A router tells
each pair of key and name once a minute.
"""

from __future__ import annotations

import ipaddress
import logging
from typing import Any, cast

import orjson
import redis

from models_app import broker
from models_app.services.audit import audit

log = logging.getLogger(__name__)

LIST = "sardeenz:router.events"
_BATCH = 100


def router_events_fold() -> int:
    """Take the waiting events, oldest first; how many were written. 0 while the broker is away."""
    connection = broker.client()
    if connection is None:
        return 0
    written = 0
    try:
        for raw in cast("list[bytes]", connection.rpop(LIST, _BATCH) or []):
            written += _write(raw)
    except (redis.RedisError, OSError) as exc:
        log.warning("events of routers not read: %s", exc)
    return written


def _write(raw: bytes) -> bool:
    try:
        event: dict[str, Any] = orjson.loads(raw)
        if event["type"] != "unknown_model":
            raise ValueError(f"unknown type {event['type']!r}")
        actor, model = f"key:{event['key_name']}", str(event["model"])
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as exc:
        log.warning("event of a router not understood: %s", exc)
        return False
    sentence = f"Asked for the model {model!r}, which does not exist."
    audit(actor, "request.unknown_model", model, "refused", sentence, _address(event.get("address")))
    return True


def _address(value: Any) -> str | None:
    try:
        return str(ipaddress.ip_address(str(value)))
    except ValueError:
        return None
