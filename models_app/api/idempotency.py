"""Idempotency-Key: the same POST sent twice acts once and is answered twice with the same words."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from django.db import IntegrityError, transaction
from django.http import HttpRequest

from models_app.api.auth import caller_of
from models_app.errors import Conflict, InvalidInput
from models_app.models import IdempotencyRecord

HEADER = "Idempotency-Key"


def once(request: HttpRequest, act: Callable[[], tuple[int, dict[str, Any]]]) -> tuple[int, dict[str, Any]]:
    """Run ``act`` unless this caller's key was seen; then give the first answer again.

    Raises Conflict when the first one is still at work, InvalidInput when the key was used for something else.
    A failed act frees its key, so that it can be tried again.
    """
    key = request.headers.get(HEADER)
    if key is None:
        return act()
    if not 1 <= len(key) <= 255 or not key.isprintable():
        raise InvalidInput({HEADER: "Use 1 to 255 printable characters."})
    caller = caller_of(request).actor
    what = f"{request.method} {request.path}\n".encode() + request.body
    fingerprint = hashlib.sha256(what).hexdigest()
    try:
        with transaction.atomic():
            record = IdempotencyRecord.objects.create(caller=caller, key=key, fingerprint=fingerprint)
    except IntegrityError:
        first = IdempotencyRecord.objects.get(caller=caller, key=key)
        if first.fingerprint != fingerprint:
            raise InvalidInput({HEADER: "This key was used for another request; choose a new one."}) from None
        if first.status is None:
            raise Conflict("The first request with this Idempotency-Key is still at work.") from None
        return first.status, first.body
    try:
        status, body = act()
    except BaseException:
        record.delete()
        raise
    record.status, record.body = status, body
    record.save(update_fields=["status", "body"])
    return status, body
