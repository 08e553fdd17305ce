from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from models_app.errors import Conflict, InvalidInput
from models_app.models import ApiKey, AuditEntry
from models_app.services.keys import api_key_check, api_key_create, api_key_revoke
from tests.builders import make_key, make_model

pytestmark = pytest.mark.django_db


def test_key_is_shown_once_and_stored_as_a_digest() -> None:
    key, token = make_key()
    assert token.startswith("sz-")
    assert len(token) == 43
    stored = ApiKey.objects.values().get(pk=key.pk)
    assert all(token not in str(value) for value in stored.values())
    assert api_key_check(token) == key


def test_wrong_and_malformed_keys_are_nobody() -> None:
    _, token = make_key()
    assert api_key_check(token + "x") is None
    assert api_key_check("") is None
    assert api_key_check("sz-" + "x" * 10_000) is None


def test_revoked_key_is_nobody_and_revoking_twice_is_harmless() -> None:
    key, token = make_key()
    first = api_key_revoke(key, actor="anna").revoked_at
    assert api_key_revoke(key, actor="anna").revoked_at == first
    assert api_key_check(token) is None
    assert AuditEntry.objects.filter(action="key.revoke").count() == 1


def test_expired_key_is_nobody() -> None:
    key, token = make_key()
    ApiKey.objects.filter(pk=key.pk).update(expires_at=timezone.now() - timedelta(seconds=1))
    assert api_key_check(token) is None


def test_name_exists_already() -> None:
    make_key(name="ci")
    with pytest.raises(Conflict, match="'ci' exists already"):
        make_key(name="ci")


def test_every_wrong_field_gets_its_sentence() -> None:
    with pytest.raises(InvalidInput) as caught:
        api_key_create(
            " ",
            role="root",
            actor="anna",
            expires_at=timezone.now() - timedelta(days=1),
            max_concurrency=0,
        )
    assert set(caught.value.fields) == {"name", "role", "expires_at", "max_concurrency"}


def test_key_can_be_bound_to_models() -> None:
    model = make_model()
    key, _ = make_key(models=[model])
    assert list(key.allowed_models.all()) == [model]


def test_last_use_is_written_at_most_once_a_minute(django_assert_num_queries: object) -> None:
    key, token = make_key()
    api_key_check(token)
    first = ApiKey.objects.get(pk=key.pk).last_used_at
    api_key_check(token)
    assert first is not None
    assert ApiKey.objects.get(pk=key.pk).last_used_at == first


def test_making_and_revoking_are_on_record() -> None:
    key, _ = make_key(name="ci", role="viewer")
    api_key_revoke(key, actor="anna")
    assert list(AuditEntry.objects.order_by("pk").values_list("actor", "action", "target")) == [
        ("test", "key.create", "ci"),
        ("anna", "key.revoke", "ci"),
    ]
