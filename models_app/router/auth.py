"""Who asks: the client's key, looked up by its SHA-256. Whatever is not a good key is refused (default deny)."""

from __future__ import annotations

import time
from hashlib import sha256

from models_app.router.errors import RouterError
from models_app.router.table import Key, TableSource


def presented_key(authorization: bytes | None, x_api_key: bytes | None) -> bytes:
    """The key that the client sent, or raise 401. Nothing of it is ever put into a message."""
    if authorization is not None:
        scheme, _, value = authorization.partition(b" ")
        value = value.strip()
        if scheme.lower() == b"bearer" and value:
            return value
    if x_api_key is not None and x_api_key.strip():
        return x_api_key.strip()
    if authorization is None and x_api_key is None:
        raise RouterError(401, "missing_api_key", "No API key was given. Send it as 'Authorization: Bearer <key>'.")
    raise RouterError(401, "invalid_api_key", "The Authorization header is not 'Bearer <key>'.")


def check_key(source: TableSource, value: bytes, *, age_limit_s: float) -> Key:
    """The key's entry. Raises 401 for a key that is unknown, revoked or expired, 503 when we cannot know."""
    table = source.table
    if table is None:
        raise RouterError(
            503, "routes_unknown", "The router has not heard of any route or key yet. Try again soon.", retry_after_s=2
        )
    if source.age_s() > age_limit_s:
        raise RouterError(
            503,
            "keys_stale",
            "The router has been cut off from the control side for too long to trust the keys it knows.",
            retry_after_s=10,
        )
    key = table.keys.get(sha256(value).hexdigest())
    if key is None:
        raise RouterError(401, "invalid_api_key", "This API key is unknown or was revoked.")
    if key.expires_at is not None and key.expires_at <= time.time():
        raise RouterError(401, "expired_api_key", "This API key has expired.")
    return key
