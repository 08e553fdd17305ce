"""The GPUs page, one GPU, the rows that refresh alone, and the overview."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import orjson
import pytest
from django.utils import timezone

from gpus_app import broker
from gpus_app.models import Gpu, Host
from models_app.models import Instance, InstanceEvent, Operation
from tests.builders import GIB, make_gpu, make_host, make_instance, make_model
from tests.models_app.pages import client_of, htmx, read

pytestmark = pytest.mark.django_db


def fleet_of(hosts: int, gpus: int, instances: int) -> list[Instance]:
    """``instances`` on each of ``gpus`` cards of each of ``hosts`` hosts."""
    found = []
    for number in range(hosts):
        host = make_host(name=f"host-{number}")
        for index in range(gpus):
            gpu = make_gpu(host=host, index=index)
            for _ in range(instances):
                model = make_model()
                found.append(make_instance(model=model, gpus=[gpu], limit_bytes=8 * GIB, limit_status="applied"))
    return found


def test_the_board_of_64_gpus_and_256_instances_costs_few_queries(
    valkey: str, django_assert_max_num_queries: Any
) -> None:
    rows = fleet_of(8, 8, 4)
    for host in Host.objects.all():
        read(host, [row for row in rows if row.host_id == host.pk])
    client = client_of()
    for path in ("/gpus/", "/"):
        with django_assert_max_num_queries(30):
            assert client.get(path).status_code == 200


def test_each_instance_has_its_bar_row_and_numbers(valkey: str) -> None:
    row = fleet_of(1, 1, 1)[0]
    read(Host.objects.get(), [row])
    text = client_of().get("/gpus/").content.decode()
    assert f'id="row-{row.pk}-{Gpu.objects.get().pk}"' in text
    assert '<span data-f="used">3.0</span> of 8.0 GiB' in text
    assert '<span data-f="running">4</span> running' in text


def test_two_copies_of_one_model_have_distinct_names_and_keys(valkey: str) -> None:
    model = make_model(served_model_name="twin", replicas=2)
    gpu = make_gpu(host=make_host())
    rows = [make_instance(model=model, gpus=[gpu], replica_index=n, limit_bytes=GIB) for n in range(2)]
    read(Host.objects.get(), rows)
    text = client_of().get("/gpus/").content.decode()
    assert "twin #0" in text
    assert "twin #1" in text
    assert f'data-key="i{rows[0].pk}"' in text
    assert f'data-key="i{rows[1].pk}"' in text


def test_foreign_memory_has_its_own_part(valkey: str) -> None:
    host = make_host()
    make_gpu(host=host)
    record = read(host)
    record["gpus"][0] |= {"other": 5 * GIB, "used": 5 * GIB}
    broker.client().set(broker.host_latest_key(host.name), orjson.dumps(record))
    text = client_of().get("/gpus/").content.decode()
    assert "other processes 5.0 GiB" in text


def test_a_gpu_that_vanished_is_shown_with_its_reason() -> None:
    make_gpu(host=make_host(), state="missing", state_reason="It fell off the bus.")
    text = client_of().get("/gpus/").content.decode()
    assert "It fell off the bus." in text
    assert "no reading" in text


def test_a_host_that_is_away_is_said_to_be_away() -> None:
    make_gpu(host=make_host(name="lost", seen=False, worker_seen_at=timezone.now() - timedelta(minutes=3)))
    text = client_of().get("/").content.decode()
    assert "Host lost is away" in text


def test_no_host_yet_teaches_what_to_do() -> None:
    assert "No host has reported yet" in client_of().get("/gpus/").content.decode()


def test_without_the_broker_the_board_is_read_from_the_database_and_says_so() -> None:
    from gpus_app.models import GpuSample

    gpu = make_gpu(host=make_host())
    GpuSample.objects.create(gpu=gpu, at=timezone.now(), resolution_s=10, used_bytes=7 * GIB)
    text = client_of().get("/gpus/").content.decode()
    assert "The message broker (Redis/Valkey) does not answer" in text
    assert "7.0" in text


def test_an_instance_over_two_gpus_has_a_row_of_its_own_on_each(valkey: str) -> None:
    host = make_host()
    gpus = [make_gpu(host=host, index=n) for n in range(2)]
    row = make_instance(model=make_model(tensor_parallel_size=2), gpus=gpus)
    read(host, [row])
    text = client_of().get("/gpus/").content.decode()
    assert f'id="row-{row.pk}-{gpus[0].pk}"' in text
    assert f'id="row-{row.pk}-{gpus[1].pk}"' in text


def test_a_row_alone_is_the_row_of_the_page(valkey: str) -> None:
    row = fleet_of(1, 1, 1)[0]
    read(Host.objects.get(), [row])
    text = client_of().get(f"/instances/{row.pk}/row/?gpu={Gpu.objects.get().pk}", **htmx()).content.decode()
    assert text.strip().startswith("<tr")
    assert "<html" not in text


def test_the_row_of_an_instance_that_moved_away_is_empty_and_the_board_is_asked_for() -> None:
    row = make_instance(gpus=[make_gpu(host=make_host(name="a"))])
    other = make_gpu(host=make_host(name="b"))
    response = client_of().get(f"/instances/{row.pk}/row/?gpu={other.pk}", **htmx())
    assert response.content == b""
    assert "board" in response.headers["HX-Trigger"]


def test_a_viewer_sees_no_buttons() -> None:
    row = fleet_of(1, 1, 1)[0]
    text = client_of("viewer").get("/gpus/").content.decode()
    assert f"/instances/{row.pk}/stop/" not in text
    assert f"/instances/{row.pk}/stop/" in client_of().get("/gpus/").content.decode()


def test_a_limit_that_is_not_in_force_shows_asked_in_force_and_mapped(valkey: str) -> None:
    gpu = make_gpu(host=make_host())
    row = make_instance(gpus=[gpu], limit_bytes=2 * GIB, effective_limit_bytes=3 * GIB, limit_status="deferred")
    read(Host.objects.get(), [row], limit=3 * GIB)
    text = client_of().get("/gpus/").content.decode()
    assert 'asked 2.0 · in force 3.0 · still mapped <span data-f="mapped">4.0</span> GiB' in text
    assert "2.0 GiB over its limit" in text
    assert "Reclaim now" in text


def test_a_limit_says_who_enforces_it() -> None:
    gpu = make_gpu(host=make_host())
    row = make_instance(gpus=[gpu], limit_bytes=2 * GIB, limit_status="applied", provider="shm")
    client = client_of()
    assert "at the engine&#x27;s next allocation" in client.get("/gpus/").content.decode()
    row.provider = "none"
    row.save()
    assert "Advisory" in client.get("/gpus/").content.decode()


def test_a_foreign_writer_of_the_limit_is_shown(valkey: str) -> None:
    row = fleet_of(1, 1, 1)[0]
    read(Host.objects.get(), [row], drift=5 * GIB)
    text = client_of().get("/gpus/").content.decode()
    assert "Somebody else wrote the limit 5.0 GiB" in text


# --- one GPU and its history -----------------------------------------------------------------------


def test_the_chart_is_filled_from_history_with_limits_and_events(valkey: str) -> None:
    row = fleet_of(1, 1, 1)[0]
    gpu = Gpu.objects.get()
    now = time.time()
    for ago in (3, 2, 1):
        part = {"id": row.pk, "name": "x", "used": ago * GIB, "limit": 8 * GIB}
        entry = {"t": now - ago, "total": gpu.total_bytes, "used": ago * GIB, "instances": [part]}
        stamp = f"{int((now - ago) * 1000)}-0"
        broker.client().xadd(broker.gpu_stream_key(gpu.uuid), {"d": orjson.dumps(entry)}, id=stamp)
    InstanceEvent.objects.create(instance=row, kind="limit", reason="limit lowered to 2.0 GiB")
    data = client_of("viewer").get(f"/gpus/{gpu.pk}/chart/?window=300").json()
    assert len(data["t"]) == 3
    assert data["instances"][0]["kv"] == [3 * GIB, 2 * GIB, GIB]
    assert data["instances"][0]["limit"] == [8 * GIB] * 3
    assert data["events"][0]["text"].endswith("limit lowered to 2.0 GiB")


def test_the_chart_has_a_table_twin(valkey: str) -> None:
    row = fleet_of(1, 1, 1)[0]
    gpu = Gpu.objects.get()
    part = {"id": row.pk, "name": "x", "used": 5 * GIB}
    entry = {"t": time.time() - 1, "total": gpu.total_bytes, "used": 9 * GIB, "instances": [part]}
    broker.client().xadd(broker.gpu_stream_key(gpu.uuid), {"d": orjson.dumps(entry)})
    text = client_of("viewer").get(f"/gpus/{gpu.pk}/?window=900").content.decode()
    assert '<td class="num">9.0</td><td class="num">5.0</td>' in text


def test_an_unknown_window_is_the_shortest() -> None:
    gpu = make_gpu(host=make_host())
    assert client_of().get(f"/gpus/{gpu.pk}/chart/?window=junk").json()["window"] == 300


# --- overview --------------------------------------------------------------------------------------


def test_what_needs_attention_stands_first_worst_on_top(valkey: str) -> None:
    gpu = make_gpu(host=make_host())
    make_instance(
        model=make_model(served_model_name="late"),
        gpus=[gpu],
        limit_bytes=GIB,
        limit_status="deferred",
        limit_set_at=timezone.now() - timedelta(minutes=1),
    )
    make_instance(model=make_model(served_model_name="dead"), gpus=[gpu], state="failed", first_cause="No weights.")
    Operation.objects.create(kind="x", title="Make room", state="failed", ended_at=timezone.now(), message="No.")
    text = client_of().get("/").content.decode()
    places = [text.index(words) for words in ("dead failed", "Make room failed", "late is still over its limit")]
    assert places == sorted(places)
    assert "No weights." in text


def test_one_that_waits_for_a_gpu_is_offered_room(valkey: str) -> None:
    make_gpu(host=make_host())
    model = make_model(served_model_name="late")
    row = make_instance(model=model, state="pending", reason="3.5 GiB are needed.")
    offer = f'href="/models/{model.pk}/launch/"'
    assert "late waits for a GPU" not in client_of().get("/").text  # it may be placed at the next look
    Instance.objects.filter(pk=row.pk).update(state_since=timezone.now() - timedelta(minutes=1))
    text = client_of().get("/").text
    assert "late waits for a GPU" in text
    assert "3.5 GiB are needed." in text
    assert offer in text
    assert offer not in client_of("viewer").get("/").text


def test_a_stopped_failure_needs_no_attention() -> None:
    make_instance(state="failed", desired_state="stopped", gpus=[make_gpu(host=make_host())])
    assert "failed</strong>" not in client_of().get("/").content.decode()


def test_the_snapshot_for_polling_holds_versions_and_readings(valkey: str) -> None:
    row = fleet_of(1, 1, 1)[0]
    read(Host.objects.get(), [row])
    data = client_of("viewer").get("/live/snapshot/?samples=1").json()
    assert data["broker"] is True
    assert list(data["instances"]) == [str(row.pk)]
    assert data["samples"][0]["gpus"][0]["instances"][0]["used"] == 3 * GIB
