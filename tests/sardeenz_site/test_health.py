"""Probes and metrics."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from gpus_app.models import Gpu, Host
from models_app.models import UsageRecord
from models_app.services.keys import api_key_create
from sardeenz_site import metrics


def test_healthz_needs_neither_database_nor_login(client: Client) -> None:
    answer = client.get("/healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.django_db
def test_readyz_asks_database_and_broker(client: Client, valkey: str) -> None:
    answer = client.get("/readyz")
    assert answer.status_code == 200
    assert answer.json()["checks"] == {"database": "ok", "broker": "ok"}


@pytest.mark.django_db
def test_readyz_names_what_does_not_answer_without_its_address(client: Client, settings: Any) -> None:
    settings.REDIS_URL = "redis://:geheim@127.0.0.1:1/0"
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["checks"] == {"database": "ok", "broker": "does not answer"}
    assert "geheim" not in answer.content.decode()


@pytest.mark.django_db
@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer sz-wrong"}, {"Authorization": "Basic eDp5"}])
def test_metrics_are_not_for_strangers(client: Client, header: dict[str, str]) -> None:
    answer = client.get("/metrics", headers=header)
    assert answer.status_code == 401
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")


@pytest.mark.django_db
def test_metrics_are_for_keys_users_and_where_they_are_public(client: Client, settings: Any) -> None:
    _key, token = api_key_create("prometheus", role="viewer", actor="test")
    assert client.get("/metrics", headers={"Authorization": f"Bearer {token}"}).status_code == 200
    client.force_login(User.objects.create_user("ada"))
    assert client.get("/metrics").status_code == 200
    client.logout()
    settings.METRICS_PUBLIC = True
    assert client.get("/metrics").status_code == 200


RECORD = {
    "type": "sample",
    "host": "h1",
    "t": 1000.0,
    "seq": 7,
    "gpus": [
        {
            "uuid": "GPU-1", "index": 0, "name": "Big", "total": 80, "used": 50, "free": 30, "util": 42, "temp": 61,
            "power": 300.0, "power_limit": 700.0, "error": None, "other": 5, "other_processes": [],
            "instances": [
                {
                    "id": 3, "name": "qwen", "replica": 0, "resident": 45, "used": 20, "prealloc": 1, "limit": 64,
                    "capacity": 70, "running": 2, "waiting": 1, "preemptions": 9, "gen_tokens": 1234, "state": "ok",
                }
            ],
        }
    ],
}  # fmt: skip


@pytest.mark.django_db
def test_metrics_show_the_newest_reading_and_rows(client: Client, settings: Any, monkeypatch: Any) -> None:
    settings.METRICS_PUBLIC = True
    host = Host.objects.create(name="h1", sampler_seen_at=timezone.now())
    Gpu.objects.create(uuid="GPU-1", host=host, index=0, name="Big", total_bytes=80)
    UsageRecord.objects.create(day=timezone.now().date(), served_model_name="qwen", requests=4, completion_tokens=99)
    monkeypatch.setattr(metrics, "latest", lambda name: RECORD if name == "h1" else None)
    text = client.get("/metrics").content.decode()
    gpu = 'gpu="GPU-1",host="h1",index="0",name="Big"'
    instance = 'gpu="GPU-1",host="h1",instance="3",model="qwen",replica="0"'
    for line in (
        'sardeenz_host_up{host="h1"} 1.0',
        f"sardeenz_gpu_memory_used_bytes{{{gpu}}} 50.0",
        f"sardeenz_gpu_utilization_ratio{{{gpu}}} 0.42",
        f"sardeenz_gpu_faulty{{{gpu}}} 0.0",
        f"sardeenz_instance_kv_used_bytes{{{instance}}} 20.0",
        f"sardeenz_instance_preemptions_total{{{instance}}} 9.0",
        'sardeenz_router_requests_total{model="qwen"} 4.0',
        'sardeenz_router_completion_tokens_total{model="qwen"} 99.0',
    ):
        assert line in text


@pytest.mark.django_db
def test_silent_host_gives_no_stale_numbers(client: Client, settings: Any, monkeypatch: Any) -> None:
    settings.METRICS_PUBLIC = True
    Host.objects.create(name="h1")
    monkeypatch.setattr(metrics, "latest", lambda _name: RECORD)
    text = client.get("/metrics").content.decode()
    assert 'sardeenz_host_up{host="h1"} 0.0' in text
    assert "GPU-1" not in text
