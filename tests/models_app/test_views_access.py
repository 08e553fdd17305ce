"""Who may see and do what in the pages; keys, audit, theme."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import URLPattern
from django.utils import timezone

from models_app.models import ApiKey, AuditEntry
from models_app.urls import urlpatterns
from tests.builders import make_key, make_model
from tests.models_app.pages import client_of, htmx

pytestmark = pytest.mark.django_db

#: Open to anybody: only a cookie of the reader's own is set.
OPEN = {"theme"}
#: Answered to scripts, which get a status and no login page.
FOR_SCRIPTS = {"live_snapshot", "playground_chat"}


def address(pattern: URLPattern) -> str:
    path = "/" + str(pattern.pattern)
    return re.sub(r"<int:\w+>", "1", path)


@pytest.mark.parametrize("pattern", [one for one in urlpatterns if one.name not in OPEN], ids=lambda one: one.name)
def test_a_stranger_sees_no_page(pattern: URLPattern) -> None:
    for method in ("get", "post"):
        response = getattr(Client(), method)(address(pattern))
        if response.status_code == 405:
            continue
        if pattern.name in FOR_SCRIPTS:
            assert response.status_code == 401
        else:
            assert response.status_code == 302
            assert response.headers["Location"].startswith("/login/?next=")


def test_a_user_made_inactive_is_out_at_the_next_request() -> None:
    client = client_of("admin")
    User.objects.update(is_active=False)
    assert client.get("/").status_code == 302


@pytest.mark.parametrize(
    "path",
    [
        "/models/new/",
        "/models/1/edit/",
        "/models/1/launch/",
        "/models/1/stop/",
        "/models/1/delete/",
        "/models/1/policy/",
        "/routes/1/delete/",
        "/instances/1/limit/",
        "/instances/1/trim/",
        "/instances/1/stop/",
        "/instances/1/restart/",
        "/instances/1/sleep/",
        "/instances/1/wake/",
        "/stop-all/",
        "/gpus/1/policy/",
        "/gpus/1/cordon/",
        "/hosts/1/cordon/",
        "/policies/hold/",
        "/keys/",
        "/keys/1/edit/",
        "/keys/1/rotate/",
        "/keys/1/revoke/",
        "/keys/1/capture/",
        "/keys/1/capture/on/",
        "/keys/1/capture/off/",
        "/usage/",
        "/usage.csv",
        "/audit/",
    ],
)
def test_a_viewer_may_not_act(path: str) -> None:
    assert client_of("viewer").post(path).status_code in (403, 405)
    assert client_of("viewer").get(path).status_code in (403, 405)


def test_an_operator_may_not_see_keys_and_audit() -> None:
    client = client_of("operator")
    assert client.get("/keys/").status_code == 403
    assert client.get("/audit/").status_code == 403
    assert "/keys/" not in client.get("/").content.decode()


def test_a_post_without_a_csrf_token_is_refused() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_superuser("root"))
    assert client.post("/stop-all/").status_code == 403


def test_a_page_that_does_not_exist_is_a_page() -> None:
    response = client_of().get("/nothing/")
    assert response.status_code == 404
    assert "There is nothing here" in response.content.decode()


# --- theme -----------------------------------------------------------------------------------------


def test_the_theme_is_remembered_and_rendered_by_the_server() -> None:
    client = client_of()
    client.post("/theme/", {"theme": "dark"})
    assert 'data-bs-theme="dark"' in client.get("/").content.decode()


def test_an_unknown_theme_is_ignored() -> None:
    client = client_of()
    client.post("/theme/", {"theme": '"><script>'})
    assert "theme" not in client.cookies
    client.cookies["theme"] = "x"
    assert 'data-theme-choice="auto"' in client.get("/").content.decode()


def test_the_theme_form_leads_to_no_foreign_site() -> None:
    response = client_of().post("/theme/", {"theme": "dark", "next": "https://elsewhere.example/"})
    assert response.headers["Location"] == "/"


# --- keys ------------------------------------------------------------------------------------------


def test_a_new_key_is_shown_once() -> None:
    client = client_of("admin")
    text = client.post("/keys/", {"name": "billing", "role": "viewer"}).content.decode()
    token = text.split('id="new-key">')[1].split("<")[0]
    assert ApiKey.objects.get().prefix == token[:8]
    assert token not in client.get("/keys/").content.decode()


def test_a_key_can_be_limited_to_models_and_days() -> None:
    model = make_model()
    client_of("admin").post("/keys/", {"name": "a", "role": "viewer", "models": [model.pk], "expires": "30"})
    key = ApiKey.objects.get()
    assert list(key.allowed_models.all()) == [model]
    assert key.expires_at is not None
    assert 29 <= (key.expires_at - timezone.now()).days <= 30


def test_a_taken_key_name_is_told_at_its_field() -> None:
    make_key(name="billing")
    response = client_of("admin").post("/keys/", {"name": "billing", "role": "viewer"})
    assert response.status_code == 422
    assert 'id="id_name-errors"' in response.content.decode()


def test_revoking_asks_first_and_then_ends_the_key() -> None:
    key, _token = make_key()
    client = client_of("admin")
    assert "cannot be undone" in client.get(f"/keys/{key.pk}/revoke/").content.decode()
    response = client.post(f"/keys/{key.pk}/revoke/", **htmx())
    assert response.status_code == 204
    key.refresh_from_db()
    assert key.revoked_at is not None


# --- audit -----------------------------------------------------------------------------------------


def test_the_audit_is_searched_and_paged_on_the_server(django_assert_max_num_queries: Any) -> None:
    AuditEntry.objects.bulk_create(AuditEntry(actor="anna", action="limit.set", target=f"m{n}") for n in range(120))
    AuditEntry.objects.create(actor="bert", action="model.launch", outcome="refused")
    client = client_of("admin")
    with django_assert_max_num_queries(8):
        first = client.get("/audit/").content.decode()
    assert "Page 1 of 3" in first
    found = client.get("/audit/?q=bert&outcome=refused").content.decode()
    assert "model.launch" in found
    assert "limit.set" not in found
