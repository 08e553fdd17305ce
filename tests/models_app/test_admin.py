"""Every table is in the admin; states are read-only, secrets hidden, acts go through the services."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest
from django.apps import apps
from django.contrib import admin
from django.test import Client

from models_app.models import ApiKey, AuditEntry, Instance
from models_app.services.capture import capture_start
from tests.builders import make_gpu, make_host, make_instance, make_key, make_model, make_usage, make_user

pytestmark = pytest.mark.django_db

TABLES = [model for app in ("models_app", "gpus_app") for model in apps.get_app_config(app).get_models()]


@pytest.fixture
def client() -> Client:
    client = Client()
    client.force_login(make_user(role="admin", is_staff=True, is_superuser=True))
    return client


@pytest.mark.parametrize("model", TABLES, ids=lambda model: model._meta.model_name)
def test_every_table_has_a_list(client: Client, model: Any) -> None:
    assert model in admin.site._registry
    make_instance(model=make_model(aliases=["a"]), gpus=[make_gpu(host=make_host())])
    make_key()
    meta = model._meta
    assert client.get(f"/admin/{meta.app_label}/{meta.model_name}/?q=a").status_code == 200


def test_the_state_of_an_instance_cannot_be_typed_in(client: Client) -> None:
    row = make_instance(gpus=[make_gpu(host=make_host())])
    address = f"/admin/models_app/instance/{row.pk}/change/"
    assert 'name="state"' not in client.get(address).content.decode()
    client.post(address, {"state": "stopped"})
    row.refresh_from_db()
    assert row.state == "ready"


def test_secrets_are_not_shown(client: Client) -> None:
    row = make_instance(gpus=[make_gpu(host=make_host())])
    key, _token = make_key()
    assert row.engine_token not in client.get(f"/admin/models_app/instance/{row.pk}/change/").content.decode()
    assert key.digest not in client.get(f"/admin/models_app/apikey/{key.pk}/change/").content.decode()


def test_stopping_in_the_admin_goes_through_the_service(valkey: str, client: Client) -> None:
    row = make_instance(gpus=[make_gpu(host=make_host())])
    client.post("/admin/models_app/instance/", {"action": "stop", "_selected_action": [row.pk]})
    row.refresh_from_db()
    assert row.desired_state == "stopped"
    assert AuditEntry.objects.filter(action__contains="stop").exists()


def test_a_refusal_in_the_admin_is_a_message(valkey: str, client: Client) -> None:
    row = make_instance(state="failed", gpus=[make_gpu(host=make_host())])
    data = {"action": "sleep", "_selected_action": [row.pk]}
    text = client.post("/admin/models_app/instance/", data, follow=True).content.decode()
    assert 'class="error"' in text
    assert Instance.objects.get().state == "failed"


def test_a_key_is_revoked_and_not_deleted(client: Client) -> None:
    key, _token = make_key()
    client.post("/admin/models_app/apikey/", {"action": "revoke", "_selected_action": [key.pk]})
    assert ApiKey.objects.get().revoked_at is not None
    assert client.get(f"/admin/models_app/apikey/{key.pk}/delete/").status_code == 403


def test_rotating_a_key_in_the_admin_leads_to_the_page_that_shows_its_secret_once(client: Client) -> None:
    first, second = make_key()[0], make_key()[0]
    address = "/admin/models_app/apikey/"
    response = client.post(address, {"action": "rotate", "_selected_action": [first.pk]})
    assert response.headers["Location"] == f"/keys/{first.pk}/rotate/"
    text = client.post(address, {"action": "rotate", "_selected_action": [first.pk, second.pk]}, follow=True).content
    assert b"Choose one key" in text
    assert not ApiKey.objects.exclude(rotated_at=None).exists()


def test_capture_is_ended_in_the_admin_and_its_permission_is_there_to_give(client: Client) -> None:
    key, _token = make_key()
    capture_start(key, actor="anna")
    client.post("/admin/models_app/apikey/", {"action": "end_capture", "_selected_action": [key.pk]})
    assert not ApiKey.objects.get().is_captured
    user = make_user(role="admin")
    assert "Can capture the requests of a key" in client.get(f"/admin/auth/user/{user.pk}/change/").content.decode()


def test_usage_cannot_be_typed_in(client: Client) -> None:
    row = make_usage(day=date(2026, 11, 30), key="ci", model="a")
    assert client.get("/admin/models_app/usagerecord/add/").status_code == 403
    client.post(f"/admin/models_app/usagerecord/{row.pk}/change/", {"requests": 0})
    row.refresh_from_db()
    assert row.requests == 1
    assert client.get(f"/admin/models_app/usagerecord/{row.pk}/delete/").status_code == 403


def test_a_host_is_cordoned_through_the_service(client: Client) -> None:
    host = make_host()
    client.post("/admin/gpus_app/host/", {"action": "cordon", "_selected_action": [host.pk]})
    host.refresh_from_db()
    assert host.cordoned
