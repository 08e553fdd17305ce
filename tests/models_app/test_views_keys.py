"""Changing and rotating keys on the pages; capture with its banner, its permission and its end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.utils import timezone
from redis import Redis

from models_app.models import ApiKey, AuditEntry
from models_app.services.capture import RING
from models_app.services.keys import api_key_check, api_key_rotate
from tests.builders import make_key, make_model, make_user
from tests.models_app.pages import client_of, htmx
from tests.models_app.test_capture import captured

pytestmark = pytest.mark.django_db


@pytest.fixture
def reader(valkey: str) -> Client:
    """An admin who may capture."""
    user = make_user(role="admin", name="reader")
    user.user_permissions.add(Permission.objects.get(codename="capture_prompts"))
    client = Client()
    client.force_login(User.objects.get(pk=user.pk))
    return client


@pytest.fixture
def ring(valkey: str) -> Callable[..., None]:
    def push(key: ApiKey, *entries: dict[str, Any]) -> None:
        with Redis.from_url(valkey) as client:
            client.lpush(f"{RING}{key.pk}", *map(json.dumps, entries))

    return push


# --- rotating --------------------------------------------------------------------------------------


def test_rotating_asks_for_the_grace_and_shows_the_new_secret_once() -> None:
    key, old = make_key(name="ci")
    client = client_of("admin")
    path = f"/keys/{key.pk}/rotate/"
    assert "For a day" in client.get(path).content.decode()
    response = client.post(path, {"grace_s": "3600"})
    assert response.headers["Cache-Control"] == "no-store"
    text = response.content.decode()
    token = text.split('id="rotated-key">')[1].split("<")[0]
    assert api_key_check(token) == api_key_check(old) == key
    assert f"{old[:8]}…" in text
    listed = client.get("/keys/").content.decode()
    assert token not in listed
    assert f"{old[:8]}…</span> too, until" in listed


def test_rotating_in_the_dialog_shows_it_there() -> None:
    key, _ = make_key()
    response = client_of("admin").post(f"/keys/{key.pk}/rotate/", {"grace_s": "0"}, **htmx("dialog"))
    text = response.content.decode()
    assert "<html" not in text
    assert 'id="rotated-key">sz-' in text
    assert "The secret before has ended." in text


def test_what_a_second_rotation_ends_is_said_first() -> None:
    key, old = make_key()
    api_key_rotate(key, grace_s=3600, actor="anna")
    text = client_of("admin").get(f"/keys/{key.pk}/rotate/").content.decode()
    assert f"{old[:8]}…" in text
    assert "ends now" in text


@pytest.mark.parametrize("grace", ["", "5", "soon"])
def test_a_grace_that_is_not_offered_changes_nothing(grace: str) -> None:
    key, old = make_key()
    assert client_of("admin").post(f"/keys/{key.pk}/rotate/", {"grace_s": grace}).status_code == 422
    assert ApiKey.objects.get().prefix == old[:8]


def test_a_revoked_key_is_not_rotated() -> None:
    key, _ = make_key()
    ApiKey.objects.update(revoked_at=timezone.now())
    response = client_of("admin").post(f"/keys/{key.pk}/rotate/", {"grace_s": "0"}, follow=True)
    assert "is revoked" in response.content.decode()


# --- changing --------------------------------------------------------------------------------------


def test_change_shows_what_is_and_saves_what_is_sent() -> None:
    model = make_model(served_model_name="a")
    key, _ = make_key(role="viewer", requests_per_minute=7, models=[model])
    client = client_of("admin")
    path = f"/keys/{key.pk}/edit/"
    text = client.get(path).content.decode()
    assert 'name="requests_per_minute" type="number" value="7"' in text
    assert "As it is" in text
    data = {"role": "operator", "expires": "keep", "priority": "80", "requests_per_minute": "", "models": []}
    assert client.post(path, data).status_code == 302
    row = ApiKey.objects.get()
    assert (row.role, row.priority, row.requests_per_minute, row.allowed_models.count()) == ("operator", 80, None, 0)
    assert row.expires_at is None
    assert client.post(path, data | {"expires": "30"}, **htmx("dialog")).status_code == 204
    assert ApiKey.objects.get().expires_at is not None


def test_a_wrong_value_is_told_at_its_field() -> None:
    key, _ = make_key()
    response = client_of("admin").post(f"/keys/{key.pk}/edit/", {"role": "viewer", "priority": "101"})
    assert response.status_code == 422
    assert 'id="id_priority-errors"' in response.content.decode()


def test_only_who_may_capture_can_let_a_key_do_so(reader: Client) -> None:
    data = {"name": "a", "role": "admin", "may_capture": "on"}
    plain = client_of("admin")
    assert 'name="may_capture"' not in plain.get("/keys/").content.decode()
    plain.post("/keys/", data)
    assert not ApiKey.objects.get(name="a").may_capture
    reader.post("/keys/", data | {"name": "b"})
    assert ApiKey.objects.get(name="b").may_capture


# --- capture ---------------------------------------------------------------------------------------


def test_capture_is_switched_on_read_and_off_again(reader: Client, ring: Callable[..., None]) -> None:
    key, _ = make_key(name="ci")
    page = f"/keys/{key.pk}/capture/"
    assert "Capture is on" not in reader.get(page).content.decode()
    reader.post(f"{page}on/", {"minutes": "30"})
    ring(key, captured(request='{"prompt": "<b>hi</b>"}', answer="hello there", status=200, streamed=True))
    response = reader.get(page)
    assert response.headers["Cache-Control"] == "no-store"
    text = response.content.decode()
    assert "Capture is on." in text
    assert "hello there" in text
    assert "&lt;b&gt;hi&lt;/b&gt;" in text
    assert "the text of the stream" in text
    reader.post(f"{page}off/")
    text = reader.get(page).content.decode()
    assert "hello there" not in text
    assert "Capture is on." not in text
    acts = AuditEntry.objects.filter(action__startswith="capture.").order_by("pk")
    assert list(acts.values_list("actor", "action")) == [
        ("reader", "capture.on"),
        ("reader", "capture.read"),
        ("reader", "capture.off"),
    ]


def test_every_page_of_an_admin_says_that_capture_is_on(reader: Client) -> None:
    key, _ = make_key(name="ci")
    reader.post(f"/keys/{key.pk}/capture/on/", {"minutes": "30"})
    assert f'<a href="/keys/{key.pk}/capture/">ci</a>' in reader.get("/models/").content.decode()
    plain = client_of("admin").get("/models/").content.decode()
    assert "Capture is on." in plain
    assert f"/keys/{key.pk}/capture/" not in plain
    assert "Capture is on." not in client_of("operator").get("/models/").content.decode()


@pytest.mark.parametrize("part", ["", "on/", "off/"])
@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
def test_no_role_alone_opens_capture(role: str, part: str) -> None:
    key, _ = make_key()
    client = client_of(role)
    path = f"/keys/{key.pk}/capture/{part}"
    response = client.post(path, {"minutes": "5"}) if part else client.get(path)
    assert response.status_code == 403
    assert ApiKey.objects.get().capture_until is None


def test_the_permission_without_the_role_opens_nothing(valkey: str) -> None:
    key, _ = make_key()
    user = make_user(role="operator")
    user.user_permissions.add(Permission.objects.get(codename="capture_prompts"))
    client = Client()
    client.force_login(User.objects.get(pk=user.pk))
    assert client.get(f"/keys/{key.pk}/capture/").status_code == 403


@pytest.mark.parametrize(
    ("minutes", "sentence"), [("", "whole number of minutes"), ("0", "whole number"), ("99999", "1 to 86400 seconds")]
)
def test_a_time_that_cannot_be_is_said(reader: Client, minutes: str, sentence: str) -> None:
    key, _ = make_key()
    response = reader.post(f"/keys/{key.pk}/capture/on/", {"minutes": minutes}, follow=True)
    assert sentence in response.content.decode()
    assert not ApiKey.objects.get().is_captured


def test_redis_away_is_said_on_the_page(reader: Client, settings: Any) -> None:
    key, _ = make_key()
    reader.post(f"/keys/{key.pk}/capture/on/", {"minutes": "5"})
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    text = reader.get(f"/keys/{key.pk}/capture/").content.decode()
    assert "does not answer" in text
    assert "Nothing yet" not in text


def test_captured_requests_are_paged(reader: Client, ring: Callable[..., None]) -> None:
    key, _ = make_key()
    reader.post(f"/keys/{key.pk}/capture/on/", {"minutes": "5"})
    ring(key, *[captured(answer=f"answer-{number:02}") for number in range(30)])
    text = reader.get(f"/keys/{key.pk}/capture/").content.decode()
    assert "answer-29" in text
    assert "answer-05" not in text
    assert "answer-05" in reader.get(f"/keys/{key.pk}/capture/?page=2").content.decode()
