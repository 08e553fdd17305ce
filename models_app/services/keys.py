"""API keys: made once, shown once, kept as SHA-256. One key is good for REST and for /v1."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import Q
from django.utils import timezone

from models_app.errors import Conflict, InvalidInput
from models_app.events import publish_models_on_commit
from models_app.models import ApiKey, Model
from models_app.services.audit import audit

PREFIX = "sz-"
_SECRET_CHARS = 40
#: A key's last use is written at most this often, so that a busy key costs no write per request.
_LAST_USED_STEP = timedelta(minutes=1)
_PREFIX_CHARS = 8
#: Longest time for which a secret goes on after a rotation.
MAX_GRACE_S = 30 * 86400
_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrency")
#: What ``api_key_update`` may change.
CHANGEABLE = ("role", "expires_at", "priority", "may_capture", *_LIMITS)


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
    priority: int = 50,
    may_capture: bool = False,
) -> tuple[ApiKey, str]:
    """Make a key. Returns the row and the key itself, which is stored nowhere. ``models`` empty means every model.

    Whoever lets it capture must have that right himself: the doors see to it. Raises InvalidInput with a sentence
    per field, Conflict for a name that exists.
    """
    name = name.strip()
    fields: dict[str, Any] = {
        "role": role,
        "expires_at": expires_at,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrency": max_concurrency,
        "priority": priority,
        "may_capture": may_capture,
    }
    wrong = _wrong(fields)
    if not name or len(name) > 64:
        wrong["name"] = "Give the key a name of 1 to 64 characters."
    if wrong:
        raise InvalidInput(wrong)
    token = _new_token()
    try:
        with transaction.atomic():
            key = ApiKey.objects.create(
                name=name, prefix=token[:_PREFIX_CHARS], digest=digest_of(token), created_by=actor[:150], **fields
            )
            _scope(key, list(models))
            audit(actor, "key.create", name, detail=f"role {role}")
            publish_models_on_commit()
    except IntegrityError:
        raise Conflict(f"An API key named {name!r} exists already.") from None
    return key, token


def _scope(key: ApiKey, models: list[Model]) -> None:
    """Good for these models, or for every one. A scope outlives its models: when they are deleted, it opens nothing."""
    key.allowed_models.set(models)
    key.is_scoped = bool(models)
    key.save(update_fields=["is_scoped"])


def _new_token() -> str:
    return PREFIX + secrets.token_urlsafe(_SECRET_CHARS)[:_SECRET_CHARS]


def _wrong(fields: Mapping[str, Any]) -> dict[str, str]:
    """A sentence for each value that a key cannot have."""
    wrong: dict[str, str] = {}
    if fields["role"] not in ApiKey.Role.values:
        wrong["role"] = f"{fields['role']!r} is no role; use viewer, operator or admin."
    if fields["expires_at"] is not None and fields["expires_at"] <= timezone.now():
        wrong["expires_at"] = "The end lies in the past: the key would never work."
    for name in _LIMITS:
        if fields[name] is not None and fields[name] < 1:
            wrong[name] = "Use a number of at least 1, or leave it empty for no limit."
    if not 0 <= fields["priority"] <= 100:
        wrong["priority"] = "Use a number from 0 to 100; higher is served first."
    if fields["may_capture"] and fields["role"] != ApiKey.Role.ADMIN:
        wrong["may_capture"] = "Only a key of an admin may capture requests and read them."
    return wrong


def api_key_update(
    key: ApiKey, *, actor: str, changes: Mapping[str, Any], models: Iterable[Model] | None = None
) -> ApiKey:
    """Change what a key may do, from its next request on. Its name and secret stay.

    ``changes`` may hold role, expires_at, priority, may_capture and the three limits (None: no limit); ``models``
    None leaves them as they are. Raises InvalidInput with a sentence per field, Conflict for a revoked key.
    """
    unknown = sorted(set(changes) - {*CHANGEABLE})
    if unknown:
        raise InvalidInput(dict.fromkeys(unknown, "This cannot be changed."))
    with transaction.atomic():
        row = ApiKey.objects.select_for_update().get(pk=key.pk)
        _must_be_alive(row)
        said = [
            f"{name} {getattr(row, name)} → {value}" for name, value in changes.items() if getattr(row, name) != value
        ]
        wrong = _wrong({name: getattr(row, name) for name in CHANGEABLE} | dict(changes))
        if "expires_at" not in changes:  # one that has run out stays as it is until a new end is given
            wrong.pop("expires_at", None)
        if wrong:
            raise InvalidInput(wrong)
        for name, value in changes.items():
            setattr(row, name, value)
        row.save(update_fields=list(changes))
        if models is not None:
            chosen = list(models)
            if {one.pk for one in chosen} != {one.pk for one in row.allowed_models.all()}:
                said.append("models → " + (", ".join(one.served_model_name for one in chosen) or "every model"))
                _scope(row, chosen)
        if said:
            audit(actor, "key.update", row.name, detail="; ".join(said))
            publish_models_on_commit()
    return row


def api_key_rotate(key: ApiKey, *, grace_s: float, actor: str) -> tuple[ApiKey, str]:
    """Give a key a new secret; the one that it had goes on for ``grace_s`` seconds (0: ends now).

    Returns the row and the new secret, which is stored nowhere. A secret from before an earlier rotation ends now: at
    most two work at once. Raises InvalidInput for a grace out of bounds, Conflict for a revoked or expired key.
    """
    if not 0 <= grace_s <= MAX_GRACE_S:
        raise InvalidInput({"grace_s": f"Use 0 to {MAX_GRACE_S} seconds (30 days)."})
    token = _new_token()
    with transaction.atomic():
        row = ApiKey.objects.select_for_update().get(pk=key.pk)
        _must_be_alive(row)
        if not row.is_valid:
            raise Conflict(f"The key {row.name!r} has expired: give it a later end first.")
        now = timezone.now()
        if grace_s > 0:
            row.previous_prefix, row.previous_digest = row.prefix, row.digest
            row.previous_until = now + timedelta(seconds=grace_s)
        else:
            row.previous_prefix, row.previous_digest, row.previous_until = "", None, None
        row.prefix, row.digest, row.rotated_at = token[:_PREFIX_CHARS], digest_of(token), now
        row.save(
            update_fields=["prefix", "digest", "rotated_at", "previous_prefix", "previous_digest", "previous_until"]
        )
        until = f"the secret before works until {row.previous_until:%Y-%m-%d %H:%M:%S} UTC" if grace_s > 0 else ""
        audit(actor, "key.rotate", row.name, detail=until or "the secret before ended at once")
        publish_models_on_commit()
    return row, token


def _must_be_alive(key: ApiKey) -> None:
    if key.revoked_at is not None:
        raise Conflict(f"The key {key.name!r} is revoked; make a new one.")


def graces_end() -> int:
    """Forget secrets whose grace is over; how many. They work no longer anyway: this is tidying."""
    ended = ApiKey.objects.filter(previous_until__lte=timezone.now())
    return ended.update(previous_prefix="", previous_digest=None, previous_until=None)


def api_key_revoke(key: ApiKey, *, actor: str) -> ApiKey:
    """End a key now. Repeating it changes nothing."""
    with transaction.atomic():
        ends = {"revoked_at": timezone.now(), "previous_prefix": "", "previous_digest": None, "previous_until": None}
        alive = ApiKey.objects.filter(pk=key.pk, revoked_at=None)
        alive.filter(capture_until__gt=ends["revoked_at"]).update(capture_until=ends["revoked_at"])
        if alive.update(**ends):
            audit(actor, "key.revoke", key.name)
            publish_models_on_commit()
    key.refresh_from_db()
    return key


def api_key_check(token: str) -> ApiKey | None:
    """The valid key that this token is, or None. The look-up is by digest, so timing tells nothing of the key."""
    if not token.startswith(PREFIX) or len(token) > 128:
        return None
    digest, now = digest_of(token), timezone.now()
    wanted = Q(digest=digest) | Q(previous_digest=digest, previous_until__gt=now)
    key = ApiKey.objects.filter(wanted).first()
    if key is None or not key.is_valid:
        return None
    if key.last_used_at is None or now - key.last_used_at > _LAST_USED_STEP:
        ApiKey.objects.filter(pk=key.pk).update(last_used_at=now)
        key.last_used_at = now
    return key
