"""Adding, changing, launching, stopping and deleting models in the browser; policies, presets, operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from gpus_app.models import GpuPolicy, Host
from models_app.models import AuditEntry, Instance, Model, Operation, Preset
from tests.broker import celery_broker
from tests.builders import GIB, make_gpu, make_host, make_instance, make_model, make_user
from tests.models_app.pages import client_of, htmx, read

pytestmark = pytest.mark.django_db

#: What a browser sends for the untouched form with a model of the catalogue chosen.
FORM = {
    "source": "catalogue",
    "catalogue_model": "Qwen/Qwen3-0.6B",
    "served_model_name": "small",
    "dtype": "auto",
    "tensor_parallel_size": "1",
    "enable_prefix_caching": "on",
    "kvcached": "on",
    "kv_layout": "default",
    "sleep_level": "1",
    "replicas": "1",
    "priority": "50",
    "reclaim": "wait",
    "restart_policy": "on_failure",
}


@pytest.fixture
def gpu() -> Any:
    return make_gpu(host=make_host())


def errors_at(response: Any, field: str) -> str:
    """The sentences beside a field; fails when there are none."""
    text = response.content.decode()
    assert f'id="id_{field}-errors"' in text, f"no error at {field}"
    return text.split(f'id="id_{field}-errors"')[1].split("</ul>")[0]


# --- adding ----------------------------------------------------------------------------------------


def test_the_form_offers_the_catalogue_and_needs_no_script(gpu: Any) -> None:
    text = client_of().get("/models/new/").content.decode()
    assert text.count('name="catalogue_model"') >= 12
    assert 'name="hub_model"' in text
    assert 'name="local_model"' in text
    assert 'action="/models/new/"' in text


def test_a_model_is_added_with_its_policy_and_aliases(gpu: Any) -> None:
    data = FORM | {"aliases": "chat, default", "guarantee_bytes": "2G", "initial_limit_bytes": "4G"}
    response = client_of().post("/models/new/", data)
    model = Model.objects.get()
    assert response.headers["Location"] == f"/models/{model.pk}/"
    assert sorted(model.aliases.values_list("name", flat=True)) == ["chat", "default"]
    assert model.memory_policy.guarantee_bytes == 2 * GIB
    assert model.initial_limit_bytes == 4 * GIB


@pytest.mark.parametrize(
    ("field", "shown", "value"),
    [
        ("served_model_name", "served_model_name", ""),
        ("served_model_name", "served_model_name", "no spaces"),
        ("catalogue_model", "catalogue_model", "Nobody/Nothing"),
        ("max_model_len", "max_model_len", "99999999"),
        ("tensor_parallel_size", "tensor_parallel_size", "0"),
        ("extra_args", "extra_args", "--port 1234"),
        ("extra_args", "extra_args", "--gpu_memory_utilization=0.5"),
        ("extra_args", "extra_args", "--no-such-flag"),
        ("initial_limit_bytes", "initial_limit_bytes", "plenty"),
        ("guarantee_bytes", "guarantee_bytes", "-1G"),
        ("priority", "priority", "101"),
        ("replicas", "replicas", "x"),
        ("request_defaults", "request_defaults", "{"),
    ],
)
def test_a_bad_value_is_told_at_its_field(gpu: Any, field: str, shown: str, value: str) -> None:
    response = client_of().post("/models/new/", FORM | {field: value})
    assert response.status_code == 422
    if shown != "catalogue_model":
        assert "<li>" in errors_at(response, shown)
    assert not Model.objects.exists()


def test_a_taken_name_is_told_at_its_field(gpu: Any) -> None:
    make_model(served_model_name="small")
    assert "already" in errors_at(client_of().post("/models/new/", FORM), "served_model_name")


def test_what_was_typed_stays_in_a_form_with_errors(gpu: Any) -> None:
    text = client_of().post("/models/new/", FORM | {"max_model_len": "abc", "aliases": "kept-one"}).content.decode()
    assert 'value="abc"' in text
    assert 'value="kept-one"' in text


def test_errors_for_htmx_are_the_form_alone(gpu: Any) -> None:
    response = client_of().post("/models/new/", FORM | {"replicas": "x"}, **htmx("model-form"))
    assert response.status_code == 422
    assert response.content.decode().strip().startswith("<form")


def test_a_folder_outside_the_roots_is_refused_at_its_field(gpu: Any, tmp_path: Path, settings: Any) -> None:
    settings.SARDEENZ_MODEL_ROOTS = [tmp_path / "models"]
    (tmp_path / "models").mkdir()
    response = client_of().post("/models/new/", FORM | {"source": "local", "local_model": "/etc"})
    assert "outside" in errors_at(response, "local_model")


def test_checking_shows_verdict_and_command_and_saves_nothing(valkey: str, gpu: Any) -> None:
    read(Host.objects.get())
    text = client_of().post("/models/check/", FORM, **htmx("check")).content.decode()
    assert "Fits now" in text
    assert "--served-model-name small" in text
    assert not Model.objects.exists()


def test_checking_says_what_is_to_be_mended(gpu: Any) -> None:
    text = client_of().post("/models/check/", FORM | {"tensor_parallel_size": "3"}, **htmx("check")).content.decode()
    assert "Tensor parallel size:" in text


def test_an_empty_form_is_not_scolded_before_anything_is_typed(gpu: Any) -> None:
    text = client_of().post("/models/check/", {"source": "catalogue"}, **htmx("check")).content.decode()
    assert "To mend" not in text


def test_without_script_the_check_button_answers_with_the_form(valkey: str, gpu: Any) -> None:
    read(Host.objects.get())
    text = client_of().post("/models/new/", FORM | {"check": "1"}).content.decode()
    assert "Fits now" in text
    assert not Model.objects.exists()


# --- changing --------------------------------------------------------------------------------------


def saved(client: Client) -> Model:
    client.post("/models/new/", FORM)
    return Model.objects.get()


def test_an_engine_option_raises_the_revision(gpu: Any) -> None:
    client = client_of()
    model = saved(client)
    client.post(f"/models/{model.pk}/edit/", FORM | {"max_model_len": "2048", "revision": "1"})
    model.refresh_from_db()
    assert (model.max_model_len, model.spec_revision) == (2048, 2)


def test_saving_an_untouched_form_changes_nothing(gpu: Any) -> None:
    client = client_of()
    model = saved(client)
    client.post(f"/models/{model.pk}/edit/", FORM | {"revision": "1"})
    model.refresh_from_db()
    assert model.spec_revision == 1


def test_a_form_that_is_older_than_the_model_is_refused_with_a_sentence(gpu: Any) -> None:
    client = client_of()
    model = saved(client)
    Model.objects.update(spec_revision=4)
    response = client.post(f"/models/{model.pk}/edit/", FORM | {"max_model_len": "2048", "revision": "1"})
    assert response.status_code == 422
    assert "was changed in the meantime" in response.content.decode()


def test_running_older_options_than_saved_is_shown(gpu: Any) -> None:
    model = make_model(served_model_name="old", spec_revision=3)
    make_instance(model=model, gpus=[gpu], spec_revision=1)
    client = client_of()
    assert "runs older options" in client.get("/models/").content.decode()
    assert "Apply without downtime" in client.get(f"/models/{model.pk}/").content.decode()


# --- the list --------------------------------------------------------------------------------------


def test_the_list_costs_few_queries_however_long(gpu: Any, django_assert_max_num_queries: Any) -> None:
    for number in range(60):
        make_instance(model=make_model(served_model_name=f"m{number:02d}"), gpus=[gpu])
    client = client_of()
    with django_assert_max_num_queries(14):
        text = client.get("/models/").content.decode()
    assert "Page 1 of 2" in text


def test_the_list_is_searched_by_name_alias_and_weights(gpu: Any) -> None:
    make_model(served_model_name="alpha", aliases=["chat"])
    make_model(served_model_name="beta", model="Org/Special")
    client = client_of()
    assert "beta" not in client.get("/models/?q=chat").content.decode()
    assert "alpha" not in client.get("/models/?q=special").content.decode()


def test_a_failed_replica_is_not_hidden_by_one_that_is_ready(gpu: Any) -> None:
    model = make_model(served_model_name="half", replicas=2)
    make_instance(model=model, gpus=[gpu], replica_index=0)
    make_instance(model=model, gpus=[gpu], replica_index=1, state="failed", first_cause="No room.")
    text = client_of().get("/models/").content.decode()
    assert text.index("Failed") < text.index("Ready")
    assert "No room." in text


def test_a_failure_that_a_newer_start_replaced_is_history(gpu: Any) -> None:
    model = make_model()
    make_instance(model=model, gpus=[gpu], state="failed", first_cause="Once.")
    make_instance(model=model, gpus=[gpu])
    assert "Once." not in client_of().get("/models/").content.decode()


# --- launching, stopping, deleting -----------------------------------------------------------------


def test_the_launch_page_says_whether_it_fits_and_where(valkey: str, gpu: Any) -> None:
    read(Host.objects.get())
    model = make_model(served_model_name="new")
    text = client_of().get(f"/models/{model.pk}/launch/").content.decode()
    assert "Fits now" in text
    assert "GPU 0 of gpu-a, after" in text


def test_two_clicks_on_launch_make_one_instance(valkey: str, gpu: Any) -> None:
    read(Host.objects.get())
    model = make_model()
    client = client_of()
    for _ in range(2):
        assert client.post(f"/models/{model.pk}/launch/", {"replicas": "1"}).status_code == 302
    assert Instance.objects.count() == 1


def test_a_launch_with_the_broker_away_fails_in_a_sentence(gpu: Any, settings: Any) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    with celery_broker(settings.REDIS_URL):
        response = client_of().post(f"/models/{make_model().pk}/launch/", **htmx("dialog"))
    assert response.status_code in (422, 503)
    assert "does not answer" in response.content.decode()
    assert not Instance.objects.exists()


def test_only_an_admin_may_launch_anyway(valkey: str, gpu: Any) -> None:
    read(Host.objects.get())
    model = make_model(facts={**make_model().facts, "weights_bytes": 500 * GIB})
    text = client_of().get(f"/models/{model.pk}/launch/").content.decode()
    assert "Does not fit" in text
    assert "Launch anyway" not in text
    assert "Launch anyway" in client_of("admin").get(f"/models/{model.pk}/launch/").content.decode()


def test_stopping_a_model_stops_all_its_replicas(valkey: str, gpu: Any) -> None:
    model = make_model(replicas=2)
    rows = [make_instance(model=model, gpus=[gpu], replica_index=n) for n in range(2)]
    client = client_of()
    assert "2 instances are drained" in client.get(f"/models/{model.pk}/stop/").content.decode()
    client.post(f"/models/{model.pk}/stop/")
    for row in rows:
        row.refresh_from_db()
        assert row.desired_state == "stopped"


def test_deleting_needs_the_name_typed() -> None:
    model = make_model(served_model_name="old")
    client = client_of()
    assert client.post(f"/models/{model.pk}/delete/", {"name": "other"}).status_code == 422
    assert Model.objects.exists()
    client.post(f"/models/{model.pk}/delete/", {"name": "old"})
    assert not Model.objects.exists()


def test_acts_are_audited_under_the_name_of_who_did_them(gpu: Any) -> None:
    client = Client()
    client.force_login(make_user(name="anna", role="operator"))
    client.post("/models/new/", FORM)
    assert AuditEntry.objects.filter(actor="anna", action="model.create", outcome="ok").exists()


# --- policies and holds ----------------------------------------------------------------------------


def test_a_reserve_is_set_in_sizes_as_people_write_them(valkey: str, gpu: Any) -> None:
    read(Host.objects.get())
    response = client_of().post(f"/gpus/{gpu.pk}/policy/", {"reserve_bytes": "8G", "rebalance": "dry_run"})
    assert response.status_code == 302
    policy = GpuPolicy.objects.get()
    assert (policy.reserve_bytes, policy.rebalance) == (8 * GIB, "dry_run")


@pytest.mark.parametrize("size", ["90G", "lots", "-1"])
def test_an_impossible_reserve_is_refused_at_its_field(valkey: str, gpu: Any, size: str) -> None:
    read(Host.objects.get())
    response = client_of().post(f"/gpus/{gpu.pk}/policy/", {"reserve_bytes": size, "rebalance": "on"})
    assert response.status_code == 422
    assert errors_at(response, "reserve_bytes")


def test_the_memory_policy_of_a_model_is_changed_without_a_new_revision(gpu: Any) -> None:
    model = make_model()
    data = {"guarantee_bytes": "2G", "maximum_bytes": "", "priority": "80", "reclaim": "preempt"}
    client_of().post(f"/models/{model.pk}/policy/", data)
    model.refresh_from_db()
    assert (model.memory_policy.guarantee_bytes, model.memory_policy.priority) == (2 * GIB, 80)
    assert model.spec_revision == 1


def test_the_controller_is_held_for_all_gpus_and_let_go(gpu: Any) -> None:
    client = client_of()
    client.post("/policies/hold/", {"seconds": "3600"})
    assert "held by" in client.get("/policies/").content.decode()
    client.post("/policies/hold/", {"seconds": "0"})
    assert "held by" not in client.get("/policies/").content.decode()


def test_a_host_is_cordoned_with_a_note_and_opened_again(gpu: Any) -> None:
    client = client_of()
    client.post(f"/hosts/{gpu.host_id}/cordon/", {"note": "new firmware"})
    text = client.get("/gpus/").content.decode()
    assert "cordoned" in text
    assert "new firmware" in text
    client.post(f"/hosts/{gpu.host_id}/uncordon/")
    assert not Host.objects.get().cordoned


# --- operations and presets ------------------------------------------------------------------------


def test_operations_survive_a_reload_and_can_be_cancelled() -> None:
    row = Operation.objects.create(kind="make_room", title="Make room for small", state="running", progress=0.4)
    client = client_of()
    assert "Make room for small" in client.get("/operations/tray/").content.decode()
    assert "1" in client.get("/operations/count/").content.decode()
    assert "Make room for small" in client.get(f"/operations/{row.pk}/").content.decode()
    client.post(f"/operations/{row.pk}/cancel/")
    row.refresh_from_db()
    assert row.cancel_requested


def test_a_preset_keeps_what_is_deployed_and_shows_what_it_would_change(gpu: Any) -> None:
    model = make_model(served_model_name="kept", deployed=True)
    make_instance(model=model, gpus=[gpu])
    client = client_of()
    client.post("/presets/", {"name": "evening"})
    preset = Preset.objects.get()
    assert "Nothing: everything is as this preset wants it" in client.get(f"/presets/{preset.pk}/").content.decode()
    model.replicas = 2
    model.save()
    text = client.get(f"/presets/{preset.pk}/").content.decode()
    assert "is changed" in text
    assert "replicas" in text


def test_a_preset_without_a_name_is_told_so(gpu: Any) -> None:
    make_model(deployed=True)
    response = client_of().post("/presets/", {"name": ""})
    assert response.status_code == 422
    assert 'id="preset-error"' in response.content.decode()
