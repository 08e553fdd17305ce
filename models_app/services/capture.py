"""Capture of a key's requests: switched on for a time, read while it is on, gone when the time is over.

Routers put what they capture into a ring in Redis (never into the database), which expires by itself. Who may do this
is decided by the doors: the permission ``capture_prompts``, or ``may_capture`` of an admin's key. Switching on,
switching off and reading are on record.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import orjson
import redis
from django.conf import settings
from django.db import transaction
from django.utils import timezone

from models_app import broker
from models_app.errors import BrokerAway, Conflict, InvalidInput
from models_app.events import publish_models_on_commit
from models_app.models import ApiKey
from models_app.services.audit import audit

log = logging.getLogger(__name__)

RING = "sardeenz:router.captures:"  # and the key's id
DEFAULT_S = 3600.0
#: Routers hear of a change within two seconds; so long after the end a ring is looked for once more.
_LATE = timedelta(seconds=10)


@dataclass(frozen=True, slots=True)
class Captured:
    """One request with its answer, cut and redacted. ``*_cut``: more was there than is kept."""

    at: datetime
    model: str
    path: str
    status: int
    request_id: str
    request: str
    request_cut: bool
    answer: str
    answer_cut: bool
    streamed: bool


def longest_s() -> float:
    """The longest time for which capture can be switched on, seconds."""
    return float(settings.CAPTURE_MAX_S)


def capture_start(key: ApiKey, *, actor: str, seconds: float | None = None) -> ApiKey:
    """Capture the requests of a key for ``seconds`` from now (default an hour, or the longest that is allowed).

    Raises InvalidInput for a time out of bounds, Conflict for a key that no longer works.
    """
    longest = longest_s()
    seconds = min(DEFAULT_S, longest) if seconds is None else seconds
    if not 1 <= seconds <= longest:
        raise InvalidInput({"seconds": f"Use 1 to {longest:g} seconds (SARDEENZ_CAPTURE_MAX_S)."})
    if not key.is_captured:
        _forget(key.pk)  # what a router told too late last time
    with transaction.atomic():
        row = ApiKey.objects.select_for_update().get(pk=key.pk)
        if not row.is_valid:
            raise Conflict(f"The key {row.name!r} no longer works: there is nothing to capture.")
        row.capture_until = until = timezone.now() + timedelta(seconds=seconds)
        row.save(update_fields=["capture_until"])
        audit(actor, "capture.on", row.name, detail=f"until {until:%Y-%m-%d %H:%M:%S} UTC")
        publish_models_on_commit()
    _expire(row.pk, until)
    return row


def capture_stop(key: ApiKey, *, actor: str) -> ApiKey:
    """Switch capture off and throw away what was captured. Repeating it changes nothing."""
    now = timezone.now()
    with transaction.atomic():
        if ApiKey.objects.filter(pk=key.pk, capture_until__gt=now).update(capture_until=now):
            audit(actor, "capture.off", key.name)
            publish_models_on_commit()
    _forget(key.pk)
    key.refresh_from_db()
    return key


def captures_read(key: ApiKey, *, actor: str) -> list[Captured]:
    """What was captured, newest first; nothing when capture is off. Raises BrokerAway when Redis does not answer."""
    if not key.is_captured:
        return []
    connection = broker.client()
    if connection is None:
        return []
    try:
        ring = cast("list[bytes]", connection.lrange(f"{RING}{key.pk}", 0, -1))
    except (redis.RedisError, OSError) as exc:
        raise BrokerAway("Captured requests lie in Redis/Valkey, which does not answer.") from exc
    if ring:
        audit(actor, "capture.read", key.name, detail=f"{len(ring)} requests")
    return [captured for raw in ring if (captured := _captured(raw)) is not None]


def _captured(raw: bytes) -> Captured | None:
    try:
        entry: dict[str, Any] = orjson.loads(raw)
        return Captured(
            at=datetime.fromtimestamp(float(entry["at"]), UTC),
            model=str(entry["model"]),
            path=str(entry["path"]),
            status=int(entry["status"]),
            request_id=str(entry["request_id"]),
            request=str(entry["request"]),
            request_cut=bool(entry["request_cut"]),
            answer=str(entry["answer"]),
            answer_cut=bool(entry["answer_cut"]),
            streamed=bool(entry["streamed"]),
        )
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as exc:
        log.warning("captured request not understood: %s", type(exc).__name__)
        return None


def captures_end() -> int:
    """Throw away what is left of captures whose time is over; how many keys. Also what a router told too late."""
    now = timezone.now()
    ended = 0
    for key in ApiKey.objects.filter(capture_until__lte=now):
        gone = _forget(key.pk)
        if gone and key.capture_until is not None and key.capture_until <= now - _LATE:
            ended += ApiKey.objects.filter(pk=key.pk, capture_until=key.capture_until).update(capture_until=None)
    return ended


def keys_captured() -> Sequence[ApiKey]:
    """Keys whose requests are being captured now, for the banner."""
    return list(ApiKey.objects.valid(timezone.now()).filter(capture_until__gt=timezone.now()))


def _names(key_id: int) -> tuple[str, str]:
    return f"{RING}{key_id}", f"{RING}{key_id}:bytes"


def _forget(key_id: int) -> bool:
    """Delete a key's ring. False when Redis does not answer: the ring then goes when its time is over."""
    connection = broker.client()
    if connection is None:
        return True
    try:
        connection.delete(*_names(key_id))
    except (redis.RedisError, OSError) as exc:
        log.warning("captured requests of key %s not deleted: %s", key_id, exc)
        return False
    return True


def _expire(key_id: int, until: datetime) -> None:
    connection = broker.client()
    if connection is None:
        return
    try:
        for name in _names(key_id):
            connection.expireat(name, int(until.timestamp()) + 1)
    except (redis.RedisError, OSError) as exc:
        log.warning("end of captured requests of key %s not moved: %s", key_id, exc)
