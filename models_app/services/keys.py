"""API keys: made once, shown once, kept as SHA-256. One key is good for REST and for /v1."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from datetime import datetime, timedelta

from django.db import IntegrityError, transaction
from django.utils import timezone

from models_app.errors import Conflict, InvalidInput
from models_app.events import publish_models_on_commit
from models_app.models import ApiKey, Model
from models_app.services.audit import audit

PREFIX = "sz-"
_SECRET_CHARS = 40
#: A key's last use is written at most this often, so that a busy key costs no write per request.
_LAST_USED_STEP = timedelta(minutes=1)


def digest_of(token: str) -> str:
    """SHA-256 of the whole key, hex. Keys carry 240 random bits, so no slow hash is needed."""
    return hashlib.sha256(token.encode()).hexdigest()


def api_key_create(
    name: str,
    *,
    role: str,
    actor: str,
    models: Iterable[Model] = (),
    expires_at: datetime | None = None,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    max_concurrency: int | None = None,
) -> tuple[ApiKey, str]:
    """Make a key. Returns the row and the key itself, which is stored nowhere. ``models`` empty means every model.

    Raises InvalidInput with a sentence per field, Conflict for a name that exists.
    """
    name = name.strip()
    wrong: dict[str, str] = {}
    if not name or len(name) > 64:
        wrong["name"] = "Give the key a name of 1 to 64 characters."
    if role not in ApiKey.Role.values:
        wrong["role"] = f"{role!r} is no role; use viewer, operator or admin."
    if expires_at is not None and expires_at <= timezone.now():
        wrong["expires_at"] = "The end lies in the past: the key would never work."
    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrency": max_concurrency,
    }
    for field, value in limits.items():
        if value is not None and value < 1:
            wrong[field] = "Use a number of at least 1, or leave it empty for no limit."
    if wrong:
        raise InvalidInput(wrong)
    token = PREFIX + secrets.token_urlsafe(_SECRET_CHARS)[:_SECRET_CHARS]
    try:
        with transaction.atomic():
            key = ApiKey.objects.create(
                name=name,
                prefix=token[:8],
                digest=digest_of(token),
                role=role,
                expires_at=expires_at,
                created_by=actor[:150],
                **limits,
            )
            key.allowed_models.set(models)
            audit(actor, "key.create", name, detail=f"role {role}")
            publish_models_on_commit()
    except IntegrityError:
        raise Conflict(f"An API key named {name!r} exists already.") from None
    return key, token


def api_key_revoke(key: ApiKey, *, actor: str) -> ApiKey:
    """End a key now. Repeating it changes nothing."""
    with transaction.atomic():
        if ApiKey.objects.filter(pk=key.pk, revoked_at=None).update(revoked_at=timezone.now()):
            audit(actor, "key.revoke", key.name)
            publish_models_on_commit()
    key.refresh_from_db()
    return key


def api_key_check(token: str) -> ApiKey | None:
    """The valid key that this token is, or None. The look-up is by digest, so timing tells nothing of the key."""
    if not token.startswith(PREFIX) or len(token) > 128:
        return None
    key = ApiKey.objects.filter(digest=digest_of(token)).first()
    if key is None or not key.is_valid:
        return None
    now = timezone.now()
    if key.last_used_at is None or now - key.last_used_at > _LAST_USED_STEP:
        ApiKey.objects.filter(pk=key.pk).update(last_used_at=now)
        key.last_used_at = now
    return key
