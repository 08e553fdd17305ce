"""Every table is in the admin; states are read-only, secrets hidden, acts go through the services."""

from __future__ import annotations

from typing import Any

import pytest
from django.apps import apps
from django.contrib import admin
from django.test import Client

from models_app.models import ApiKey, AuditEntry, Instance
from tests.builders import make_gpu, make_host, make_instance, make_key, make_model, make_user

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


def test_a_host_is_cordoned_through_the_service(client: Client) -> None:
    host = make_host()
    client.post("/admin/gpus_app/host/", {"action": "cordon", "_selected_action": [host.pk]})
    host.refresh_from_db()
    assert host.cordoned
