"""Leftovers on the pages: in the GPU's picture with owner, age and bytes, and ended on whichever host they live."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import orjson
import pytest

from gpus_app import broker as gpu_broker
from gpus_app.models import Gpu, Host
from models_app import broker, dispatch
from models_app.services.lifecycle import leftovers
from models_app.services.lifecycle.leftovers import Orphan
from tests.builders import GIB, make_gpu, make_host, make_instance
from tests.models_app.pages import client_of, read

pytestmark = pytest.mark.django_db


@pytest.fixture
def gpu(valkey: str) -> Gpu:
    return make_gpu(host=make_host(name="gpu-b"))


def _orphan(gpu: Gpu, **fields: Any) -> Orphan:
    given: dict[str, Any] = {
        "host": gpu.host.name,
        "instance_id": 901,
        "attempt_id": 902,
        "pids": [4711, 4712],
        "name": "vllm",
        "started_at": time.time() - 7200,
        "served_model_name": "old-model",
    }
    one = Orphan(**(given | fields))
    connection = broker.client()
    assert connection is not None
    connection.set(leftovers._key(gpu.host.name), orjson.dumps([asdict(one)]))
    return one


def _read(gpu: Gpu, **parts: Any) -> None:
    record = read(gpu.host)
    record["gpus"][0] |= parts
    gpu_broker.client().set(gpu_broker.host_latest_key(gpu.host.name), orjson.dumps(record))


def test_leftover_is_in_its_gpus_picture_with_age_and_bytes(gpu: Gpu) -> None:
    """By the start in its segment's name; its bytes are part of the bar although no row claims them."""
    _orphan(gpu)
    part = {"id": 901, "name": "old-model", "ipc": "sz-test0000-i901-a902", "resident": 5 * GIB}
    _read(gpu, instances=[part], used=5 * GIB, free=gpu.total_bytes - 5 * GIB)
    text = client_of().get("/gpus/").content.decode()
    assert "leftover of old-model, start 902: 5.0 GiB" in text
    assert "and hold 5.0 GiB: vllm, pid 4711, 4712, for" in text
    assert 'title="since' in text
    text = client_of().get(f"/gpus/{gpu.pk}/").content.decode()
    assert "leftover that no instance claims" in text


def test_leftover_without_a_run_directory_is_found_by_its_pids(gpu: Gpu) -> None:
    _orphan(gpu)
    others = [{"pid": 4712, "name": "VLLM::EngineCore", "bytes": 3 * GIB}, {"pid": 1, "name": "other", "bytes": GIB}]
    _read(gpu, other_processes=others, other=4 * GIB, used=4 * GIB, free=gpu.total_bytes - 4 * GIB)
    assert "leftover of old-model, start 902: 3.0 GiB" in client_of().get("/gpus/").content.decode()


def test_segments_without_owner_are_named(gpu: Gpu) -> None:
    record = read(gpu.host) | {"stale_segments": ["sz-test0000-i1-a2"]}
    gpu_broker.client().set(gpu_broker.host_latest_key(gpu.host.name), orjson.dumps(record))
    assert "sz-test0000-i1-a2" in client_of().get("/gpus/").content.decode()


def test_reap_button_reaches_another_host(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dispatch, "send", lambda name, *args, queue, **_: sent.append((name, *args, queue)))
    _orphan(gpu)
    client = client_of(name="anna")
    address = f"/hosts/{gpu.host_id}/leftovers/902/end/"
    assert address in client.get("/gpus/").content.decode()
    text = client.post(address, follow=True).content.decode()
    assert "Host gpu-b is asked to end what is left of start 902" in text
    assert sent == [(dispatch.REAP, 902, "anna", "host.gpu-b")]


def test_reap_of_what_no_sweep_has_seen_is_refused(gpu: Gpu) -> None:
    text = client_of().post(f"/hosts/{gpu.host_id}/leftovers/902/end/", follow=True).content.decode()
    assert "shows no leftover of start 902" in text


def test_reap_of_what_an_instance_claims_is_refused(gpu: Gpu) -> None:
    row = make_instance(gpus=[gpu])
    _orphan(gpu, attempt_id=row.attempt_id, instance_id=row.pk)
    text = client_of().post(f"/hosts/{gpu.host_id}/leftovers/{row.attempt_id}/end/", follow=True).content.decode()
    assert "An instance claims it" in text


def test_viewer_sees_leftovers_and_ends_none(gpu: Gpu) -> None:
    _orphan(gpu)
    client = client_of("viewer")
    text = client.get("/gpus/").content.decode()
    assert "Leftover processes of start 902" in text
    assert "/leftovers/902/end/" not in text
    assert client.post(f"/hosts/{Host.objects.get().pk}/leftovers/902/end/").status_code == 403


def test_leftover_is_not_counted_to_strangers_too(gpu: Gpu) -> None:
    _orphan(gpu)
    part = {"id": 901, "name": "old-model", "ipc": "sz-test0000-i901-a902", "resident": 5 * GIB}
    _read(gpu, instances=[part], other=2 * GIB, used=7 * GIB, free=gpu.total_bytes - 7 * GIB)
    text = client_of().get("/gpus/").content.decode()
    assert 'other processes <span data-f="other">2.0</span>' in text
