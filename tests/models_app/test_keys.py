from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from models_app.errors import Conflict, InvalidInput
from models_app.models import ApiKey, AuditEntry
from models_app.selectors import routes_snapshot
from models_app.services.keys import (
    MAX_GRACE_S,
    api_key_check,
    api_key_create,
    api_key_revoke,
    api_key_rotate,
    api_key_update,
    digest_of,
    graces_end,
)
from models_app.services.models import model_delete
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
            priority=101,
            may_capture=True,
        )
    wrong = {"name", "role", "expires_at", "max_concurrency", "priority", "may_capture"}
    assert set(caught.value.fields) == wrong


def test_only_a_key_of_an_admin_may_capture() -> None:
    with pytest.raises(InvalidInput, match="Only a key of an admin"):
        make_key(role="operator", may_capture=True)
    assert make_key(role="admin", may_capture=True)[0].may_capture


def test_key_can_be_bound_to_models() -> None:
    model = make_model()
    key, _ = make_key(models=[model])
    assert list(key.allowed_models.all()) == [model]


def test_scope_outlives_its_models() -> None:
    """A key for one model must not become one for every model when that one is deleted."""
    model = make_model(served_model_name="secret")
    make_model(served_model_name="other")
    key, _ = make_key(name="narrow", models=[model])
    make_key(name="wide")

    def scopes() -> dict[str, list[str] | None]:
        return {entry["name"]: entry["models"] for entry in routes_snapshot()["keys"]}

    assert scopes() == {"narrow": ["secret"], "wide": None}
    model_delete(model, actor="test")
    assert scopes() == {"narrow": [], "wide": None}
    api_key_update(key, actor="test", changes={"priority": 60}, models=[])  # a form that was saved without a choice
    assert scopes()["narrow"] == []


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


# --- rotation --------------------------------------------------------------------------------------


def _in_routes(token: str) -> dict[str, object] | None:
    return next((one for one in routes_snapshot()["keys"] if one["digest"] == digest_of(token)), None)


def test_rotated_key_works_with_both_secrets_until_the_grace_is_over() -> None:
    key, old = make_key(name="ci")
    row, new = api_key_rotate(key, grace_s=3600, actor="anna")
    assert row.pk == key.pk
    assert new != old
    assert api_key_check(old) == api_key_check(new) == row
    ApiKey.objects.update(previous_until=timezone.now() - timedelta(seconds=1))
    assert api_key_check(old) is None
    assert api_key_check(new) == row


def test_routers_know_both_secrets_as_one_key_and_when_the_old_one_ends() -> None:
    key, old = make_key(requests_per_minute=5, priority=70)
    row, new = api_key_rotate(key, grace_s=3600, actor="anna")
    before, after = _in_routes(old), _in_routes(new)
    assert before is not None
    assert after is not None
    assert (before["id"], before["rpm"], before["priority"]) == (key.pk, 5, 70)
    assert row.previous_until is not None
    assert (before["expires_at"], after["expires_at"]) == (row.previous_until.timestamp(), None)
    ApiKey.objects.update(previous_until=timezone.now() - timedelta(seconds=1))
    assert _in_routes(old) is None


def test_old_secret_does_not_outlive_the_key() -> None:
    end = timezone.now() + timedelta(minutes=1)
    key, old = make_key(expires_at=end)
    api_key_rotate(key, grace_s=3600, actor="anna")
    before = _in_routes(old)
    assert before is not None
    assert before["expires_at"] == end.timestamp()


def test_rotation_without_grace_ends_the_old_secret_at_once() -> None:
    key, old = make_key()
    _, new = api_key_rotate(key, grace_s=0, actor="anna")
    assert api_key_check(old) is None
    assert _in_routes(old) is None
    assert api_key_check(new) == key


def test_second_rotation_ends_the_secret_before_the_first() -> None:
    key, first = make_key()
    row, second = api_key_rotate(key, grace_s=3600, actor="anna")
    _, third = api_key_rotate(row, grace_s=3600, actor="anna")
    assert api_key_check(first) is None
    assert api_key_check(second) == api_key_check(third) == key


def test_revoking_ends_both_secrets() -> None:
    key, old = make_key()
    row, new = api_key_rotate(key, grace_s=3600, actor="anna")
    api_key_revoke(row, actor="anna")
    assert api_key_check(old) is None
    assert api_key_check(new) is None
    assert routes_snapshot()["keys"] == []


def test_dead_keys_are_not_rotated() -> None:
    key, _ = make_key()
    ApiKey.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    with pytest.raises(Conflict, match="has expired"):
        api_key_rotate(key, grace_s=0, actor="anna")
    api_key_revoke(key, actor="anna")
    with pytest.raises(Conflict, match="is revoked"):
        api_key_rotate(key, grace_s=0, actor="anna")


@pytest.mark.parametrize("grace_s", [-1, MAX_GRACE_S + 1])
def test_grace_out_of_bounds_names_its_field(grace_s: float) -> None:
    key, old = make_key()
    with pytest.raises(InvalidInput) as caught:
        api_key_rotate(key, grace_s=grace_s, actor="anna")
    assert set(caught.value.fields) == {"grace_s"}
    assert api_key_check(old) == key


def test_new_secret_is_stored_as_a_digest_and_told_to_nobody_else() -> None:
    key, old = make_key()
    _, new = api_key_rotate(key, grace_s=3600, actor="anna")
    text = repr(ApiKey.objects.values().get()) + repr(list(AuditEntry.objects.values()))
    assert new not in text
    assert old not in text


def test_digest_of_a_secret_whose_grace_is_over_is_forgotten() -> None:
    key, _ = make_key()
    api_key_rotate(key, grace_s=3600, actor="anna")
    assert graces_end() == 0
    ApiKey.objects.update(previous_until=timezone.now() - timedelta(seconds=1))
    assert graces_end() == 1
    assert ApiKey.objects.get().previous_digest is None


# --- changing --------------------------------------------------------------------------------------


def test_limits_models_and_priority_are_changed_from_the_next_request_on() -> None:
    key, token = make_key(requests_per_minute=5)
    model = make_model(served_model_name="a")
    api_key_update(key, actor="anna", changes={"requests_per_minute": None, "priority": 90}, models=[model])
    entry = _in_routes(token)
    assert entry is not None
    assert (entry["rpm"], entry["priority"], entry["models"]) == (None, 90, ["a"])
    detail = AuditEntry.objects.get(action="key.update").detail
    assert detail == "requests_per_minute 5 → None; priority 50 → 90; models → a"


def test_change_of_nothing_is_not_on_record() -> None:
    key, _ = make_key(requests_per_minute=5)
    api_key_update(key, actor="anna", changes={"requests_per_minute": 5})
    assert not AuditEntry.objects.filter(action="key.update").exists()


def test_key_that_may_capture_stays_one_of_an_admin() -> None:
    key, _ = make_key(role="admin", may_capture=True)
    with pytest.raises(InvalidInput) as caught:
        api_key_update(key, actor="anna", changes={"role": "viewer"})
    assert set(caught.value.fields) == {"may_capture"}
    assert ApiKey.objects.get().role == "admin"


def test_expired_key_lives_again_with_a_later_end_and_a_revoked_one_does_not() -> None:
    key, token = make_key()
    ApiKey.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    api_key_update(key, actor="anna", changes={"priority": 60})
    assert api_key_check(token) is None
    api_key_update(key, actor="anna", changes={"expires_at": timezone.now() + timedelta(days=1)})
    assert api_key_check(token) == key
    api_key_revoke(key, actor="anna")
    with pytest.raises(Conflict):
        api_key_update(key, actor="anna", changes={"expires_at": None})


def test_what_is_no_field_of_a_key_is_refused() -> None:
    key, _ = make_key()
    with pytest.raises(InvalidInput, match="cannot be changed"):
        api_key_update(key, actor="anna", changes={"digest": "x"})
