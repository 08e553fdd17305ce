"""The documented calls, as scripts use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from models_app.models import IdempotencyRecord, Instance, LaunchAttempt, Model
from models_app.states import InstanceState
from tests.builders import make_gpu, make_host, make_instance, make_model
from tests.models_app.api.conftest import MODEL, Api

GIB = 1024**3


@pytest.fixture
def card(db: None) -> None:
    make_gpu(host=make_host(engine_kind="simulated"))


def test_model_is_made_with_201_and_its_facts(api: Api, card: None) -> None:
    status, body = api("POST", "/models", MODEL)
    assert status == 201
    assert body["served_model_name"] == "a"
    assert body["facts"]["num_layers"] == 28


def test_name_taken_is_named_at_its_field(api: Api, card: None) -> None:
    """SZ-078 for models: the second is refused, the first stays."""
    api("POST", "/models", MODEL)
    status, body = api("POST", "/models", MODEL)
    assert status in (409, 422)
    assert "served_model_name" in str(body)
    assert Model.objects.count() == 1


def test_launch_answers_202_pending(api: Api, card: None) -> None:
    api("POST", "/models", MODEL)
    status, body = api("POST", "/models/a/launch", {})
    assert status == 202
    assert body["state"] == "pending"
    assert body["instances"][0]["id"] == body["id"]


def test_two_launches_make_one_instance(api: Api, card: None) -> None:
    api("POST", "/models", MODEL)
    first, second = (api("POST", "/models/a/launch", {})[1]["id"] for _ in range(2))
    assert first == second
    assert Instance.objects.count() == 1


def test_the_same_idempotency_key_gets_the_same_words(api: Api, card: None) -> None:
    api("POST", "/models", MODEL)
    first = api("POST", "/models/a/launch", {}, Idempotency_Key="k1")
    Instance.objects.update(state=InstanceState.STOPPED)
    assert api("POST", "/models/a/launch", {}, Idempotency_Key="k1") == first
    assert Instance.objects.get().state == InstanceState.STOPPED


def test_an_idempotency_key_means_one_thing(api: Api, card: None) -> None:
    api("POST", "/models", MODEL)
    api("POST", "/models/a/launch", {}, Idempotency_Key="k1")
    status, body = api("POST", "/models/a/launch", {"replicas": 2}, Idempotency_Key="k1")
    assert status == 422
    assert "Idempotency-Key" in body["error"]["fields"]


def test_a_failed_launch_frees_its_idempotency_key(api: Api, db: None) -> None:
    make_model(served_model_name="a", facts={"weights_bytes": 10 * GIB})
    assert api("POST", "/models/a/launch", {}, Idempotency_Key="k1")[0] == 409
    assert not IdempotencyRecord.objects.exists()


def test_what_does_not_fit_is_409_with_numbers(api: Api, db: None) -> None:
    """SZ-016."""
    make_gpu(total_bytes=8 * GIB)
    make_model(served_model_name="big", facts={"weights_bytes": 60 * GIB})
    status, body = api("POST", "/models/big/launch", {})
    assert (status, body["error"]["code"]) == (409, "does_not_fit")
    assert body["error"]["facts"]["need_bytes"] > 60 * GIB


def test_stop_answers_202(api: Api, db: None) -> None:
    instance = make_instance(state=InstanceState.READY)
    status, body = api("POST", f"/instances/{instance.pk}/stop", {})
    assert status == 202
    assert body["state"] == "draining"
    assert body["desired_state"] == "stopped"


@pytest.mark.parametrize("size", ["NaN", "-1G", 0, "1e400", "twelve", "5 bananas"])
def test_a_size_that_is_none_writes_nothing(api: Api, db: None, size: Any) -> None:
    instance = make_instance(state=InstanceState.READY)
    status, body = api("POST", f"/instances/{instance.pk}/limit", {"size": size})
    assert status == 422
    assert "size" in body["error"]["fields"]
    instance.refresh_from_db()
    assert instance.limit_revision == 0


@pytest.mark.parametrize("force", ["false", 1, None])
def test_force_is_true_or_false_and_nothing_else(api: Api, db: None, force: Any) -> None:
    instance = make_instance(state=InstanceState.READY)
    assert api("POST", f"/instances/{instance.pk}/limit", {"size": "3G", "force": force})[0] == 422


def test_size_and_percent_exclude_each_other(api: Api, db: None) -> None:
    instance = make_instance(state=InstanceState.READY)
    assert api("POST", f"/instances/{instance.pk}/limit", {"size": "3G", "percent": 10})[0] == 422
    assert api("POST", f"/instances/{instance.pk}/limit", {})[0] == 422


def test_limit_of_a_starting_instance_is_kept_for_later(api: Api, db: None) -> None:
    instance = make_instance(state=InstanceState.STARTING)
    status, body = api("POST", f"/instances/{instance.pk}/limit", {"size": "3G"})
    assert (status, body["status"]) == (202, "pending")
    assert body["limit_bytes"] == 3 * GIB
    assert "ready" in body["message"]


def test_a_limit_by_hand_leaves_the_controller_out_until_it_is_given_back(api: Api, db: None) -> None:
    instance = make_instance(state=InstanceState.STARTING)
    api("POST", f"/instances/{instance.pk}/limit", {"size": "3G"})
    assert api("GET", f"/instances/{instance.pk}")[1]["limit"]["automatic"] is False
    assert api("POST", f"/instances/{instance.pk}/limit/automatic", {})[1]["limit"]["automatic"] is True


def test_logs_give_as_many_lines_as_asked(api: Api, db: None, tmp_path: Any, settings: Any) -> None:
    """SZ-037."""
    instance = make_instance(state=InstanceState.READY)
    settings.SARDEENZ_HOST_NAME = instance.host.name if instance.host else ""
    (tmp_path / "engine.log").write_text("\n".join(f"line {n}" for n in range(50)) + "\n")
    LaunchAttempt.objects.filter(pk=instance.attempt_id).update(run_dir=str(tmp_path))
    status, body = api("GET", f"/instances/{instance.pk}/logs?lines=10")
    assert status == 200
    assert body["lines"] == [f"line {n}" for n in range(40, 50)]
    assert body["truncated"] is True


def test_keys_are_shown_once(api_as: Callable[[str], Api]) -> None:
    admin = api_as("admin")
    status, body = admin("POST", "/keys", {"name": "ci", "role": "viewer"})
    assert status == 201
    assert Api(body["key"])("GET", "/models")[0] == 200
    assert body["key"] not in str(admin("GET", "/keys")[1])
    assert admin("DELETE", "/keys/ci")[0] == 204
    assert Api(body["key"])("GET", "/models")[0] == 401


def test_models_by_alias(api: Api, card: None) -> None:
    api("POST", "/models", {**MODEL, "aliases": ["org/a"]})
    assert api("GET", "/models/org/a")[1]["served_model_name"] == "a"


def test_reserve_that_no_card_can_keep_is_refused_with_numbers(api: Api, db: None) -> None:
    gpu = make_gpu(total_bytes=8 * GIB)
    status, body = api("PATCH", f"/gpus/{gpu.uuid}/policy", {"reserve_bytes": 9 * GIB})
    assert status == 422
    assert "8.0 GiB" in body["error"]["fields"]["reserve_bytes"][0]


def test_gpu_policy_is_changed_and_shown(api: Api, db: None) -> None:
    gpu = make_gpu()
    assert api("PATCH", f"/gpus/{gpu.uuid}/policy", {"reserve_bytes": GIB, "rebalance": "dry_run"})[0] == 200
    shown = api("GET", f"/gpus/{gpu.uuid}")[1]["policy"]
    assert (shown["reserve_bytes"], shown["rebalance"]) == (GIB, "dry_run")


def test_an_empty_preset_is_refused_and_a_name_is_taken_once(api: Api, card: None) -> None:
    """SZ-078."""
    assert api("POST", "/presets", {"name": "day"})[0] == 409
    api("POST", "/models", MODEL)
    api("POST", "/models/a/launch", {})
    assert api("POST", "/presets", {"name": "day"})[0] == 201
    assert api("POST", "/presets", {"name": "day"})[0] == 409
    assert [one["act"] for one in api("GET", "/presets/day/diff")[1]] == ["kept"]
