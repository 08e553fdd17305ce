"""Presets: what is kept, what the difference is, and that only the difference is done."""

from __future__ import annotations

from typing import Any

import pytest

from gpus_app.models import Host
from models_app import dispatch
from models_app.errors import Conflict, InvalidInput
from models_app.models import Instance, Model, Operation, Preset
from models_app.services import specs
from models_app.services.lifecycle.launch import model_launch
from models_app.services.lifecycle.stop import instance_stop
from models_app.services.model_fields import POLICY_READERS, READERS
from models_app.services.models import model_create, model_update
from models_app.services.plans import presets
from models_app.services.plans.operations import operation_cancel, operation_step
from models_app.services.plans.presets import preset_apply, preset_diff, preset_save
from models_app.states import DesiredState, InstanceState
from tests.builders import GIB, make_gpu, make_host, make_instance

S = InstanceState
pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    messages: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dispatch, "send", lambda name, *args, **_: messages.append((name, *args)))
    return messages


@pytest.fixture(autouse=True)
def host(settings: Any, tmp_path: Any) -> Host:
    settings.SARDEENZ_HOME = tmp_path
    host = make_host(name=settings.SARDEENZ_HOST_NAME)
    make_gpu(host=host, index=0)
    make_gpu(host=host, index=1)
    return host


def _model(name: str = "a", **fields: Any) -> Model:
    given: dict[str, Any] = {"served_model_name": name, "source": "catalogue", "model": "Qwen/Qwen3-0.6B"}
    return model_create(actor="anna", allow_risky=True, **(given | fields))


def _running(name: str = "a", *, state: InstanceState = S.READY, wanted: str = "running", **fields: Any) -> Instance:
    """A deployed model with one instance."""
    model = _model(name, **fields)
    Model.objects.filter(pk=model.pk).update(deployed=True)
    model.refresh_from_db()
    return make_instance(model=model, state=state, desired_state=DesiredState(wanted))


def _look(operation: Operation, times: int = 1) -> Operation:
    for _ in range(times):
        operation_step(operation.pk)
    operation.refresh_from_db()
    return operation


def _acts(preset: Preset) -> dict[str, str]:
    return {one["name"]: one["act"] for one in preset_diff(preset)}


def _rows(name: str) -> list[Instance]:
    return list(Instance.objects.filter(model__served_model_name=name))


def _set(name: str, state: InstanceState, **fields: Any) -> None:
    host = Host.objects.get(name="testhost")
    for row in Instance.objects.filter(model__served_model_name=name).select_related("model"):
        row.state, row.host, row.spec_revision = state, host, row.model.spec_revision
        for key, value in fields.items():
            setattr(row, key, value)
        row.save()


def test_saved_and_restored_command_lines_are_identical() -> None:
    """SZ-072: extra arguments, source and every other option."""
    row = _running(
        extra_args="--trust-remote-code --seed 7",
        max_model_len=4096,
        quantization="fp8",
        enable_sleep_mode=True,
        initial_limit_bytes="3G",
        aliases=["b"],
        priority=80,
    )
    before = specs.spec_of(row.model).to_json()
    preset = preset_save("one", actor="anna")
    Instance.objects.all().delete()
    row.model.delete()
    operation = _look(preset_apply(preset, actor="anna"))
    model = Model.objects.get(served_model_name="a")
    assert specs.spec_of(model).to_json() | {"spec_revision": 0} == before | {"spec_revision": 0}
    assert (model.aliases.get().name, model.memory_policy.priority, model.initial_limit_bytes) == ("b", 80, 3 * GIB)
    assert (operation.is_open, [row.state for row in _rows("a")]) == (True, [S.PENDING])
    _set("a", S.READY)
    assert _look(operation).state == "succeeded"


def test_preset_that_equals_what_runs_restarts_nothing() -> None:
    """SZ-073"""
    _running()
    preset = preset_save("one", actor="anna")
    assert _acts(preset) == {"a": "kept"}
    with pytest.raises(Conflict, match="nothing is restarted"):
        preset_apply(preset, actor="anna")
    assert not Operation.objects.exists()


def test_what_is_kept_is_left_alone_beside_what_changes() -> None:
    kept = _running("a")
    preset = preset_save("one", actor="anna")
    other = _running("b")
    operation = _look(preset_apply(preset, actor="anna"))
    kept.refresh_from_db()
    other.refresh_from_db()
    assert (kept.state, other.state) == (S.READY, S.DRAINING)
    _set("b", S.STOPPED)
    assert _look(operation).state == "succeeded"
    assert not Model.objects.get(pk=other.model_id).deployed


@pytest.mark.parametrize(("field", "value"), [("max_model_len", 8192), ("replicas", 2), ("extra_args", "--seed 7")])
def test_difference_sees_every_option(field: str, value: Any) -> None:
    """SZ-076"""
    row = _running(max_model_len=4096)
    preset = preset_save("one", actor="anna")
    entry = preset.entries[0]
    was = entry[field]
    Preset.objects.filter(pk=preset.pk).update(entries=[entry | {field: value}])
    preset.refresh_from_db()
    assert preset_diff(preset) == [{"name": "a", "act": "change", "fields": {field: {"from": was, "to": value}}}]
    operation = _look(preset_apply(preset, actor="anna"))
    row.model.refresh_from_db()
    assert getattr(row.model, field) == value
    rolling = Operation.objects.filter(kind="replace").exists()
    assert rolling == (field != "replicas"), "only an option of the engine needs a new engine"
    assert operation.is_open


def test_engine_that_runs_older_options_than_those_saved_is_a_change() -> None:
    row = _running()
    model_update(row.model, actor="anna", max_model_len=4096)
    preset = preset_save("one", actor="anna")
    assert _acts(preset) == {"a": "change"}
    _look(preset_apply(preset, actor="anna"))
    assert Operation.objects.get(kind="replace").model == row.model


def test_change_whose_renewal_fails_says_so() -> None:
    row = _running()
    model_update(row.model, actor="anna", max_model_len=4096)
    operation = _look(preset_apply(preset_save("one", actor="anna"), actor="anna"))
    Operation.objects.filter(kind="replace").update(state="failed", message="Out of memory.")
    _look(operation, 2)
    assert (operation.state, operation.steps[0]["message"]) == ("failed", "Out of memory.")
    row.refresh_from_db()
    assert row.state == S.READY


def test_renewal_that_runs_already_is_joined_after_a_crash() -> None:
    row = _running()
    model_update(row.model, actor="anna", max_model_len=4096)
    operation = preset_apply(preset_save("one", actor="anna"), actor="anna")
    steps = operation.steps
    _look(operation)
    Operation.objects.filter(pk=operation.pk).update(steps=steps)
    _look(operation)
    assert operation.steps[0]["state"] == "running"
    assert Operation.objects.filter(kind="replace").count() == 1


def test_half_a_restore_that_fails_is_told_model_by_model() -> None:
    """SZ-074: the second of three cannot load; the others come up."""
    for name in ("a", "b", "c"):
        _running(name, state=S.STOPPED)
    preset = preset_save("three", actor="anna")
    Model.objects.update(deployed=False)
    operation = _look(preset_apply(preset, actor="anna"), 3)
    _set("a", S.READY)
    _set("b", S.FAILED, reason="Out of memory at load.")
    _set("c", S.READY)
    _look(operation)
    assert operation.state == "failed"
    assert {one["name"]: one["state"] for one in operation.steps} == {"a": "done", "b": "failed", "c": "done"}
    assert "b (Out of memory at load.)" in operation.message


@pytest.mark.parametrize(
    ("wanted", "deployed", "said"),
    [
        (DesiredState.STOPPED, False, "It was stopped meanwhile."),
        (DesiredState.STOPPED, True, "One of its instances was stopped meanwhile."),
        (DesiredState.SLEEPING, True, "It sleeps, and the preset wants it awake."),
    ],
)
def test_what_somebody_asks_for_meanwhile_ends_the_step_that_waits_for_the_contrary(
    wanted: DesiredState, deployed: bool, said: str
) -> None:
    _running(state=S.STOPPED)
    preset = preset_save("one", actor="anna")
    Model.objects.update(deployed=False)
    operation = _look(preset_apply(preset, actor="anna"))
    Model.objects.update(deployed=deployed)
    Instance.objects.update(state=S.DRAINING, desired_state=wanted)
    _look(operation, 2)
    assert (operation.state, operation.steps[0]["message"]) == ("failed", said)


def test_stop_ends_when_somebody_launches_the_model_meanwhile() -> None:
    _running("a")
    preset = preset_save("one", actor="anna")
    _running("b")
    operation = _look(preset_apply(preset, actor="anna"))
    assert not Model.objects.get(served_model_name="b").deployed
    model_launch(Model.objects.get(served_model_name="b"), actor="bert")
    _look(operation)
    assert (operation.state, operation.steps[0]["message"]) == ("failed", "It was launched again meanwhile.")


def test_launch_that_falls_into_a_stop_leaves_a_model_that_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    _running("a")
    preset = preset_save("one", actor="anna")
    row = _running("b")

    def stop_and_launch(instance: Instance, *, actor: str) -> None:
        instance_stop(instance, actor=actor)
        model_launch(instance.model, actor="bert")

    monkeypatch.setattr(presets, "instance_stop", stop_and_launch)
    _look(preset_apply(preset, actor="anna"))
    row.refresh_from_db()
    assert (row.state, row.desired_state, row.model.deployed) == (S.DRAINING, DesiredState.RUNNING, True)


def test_step_that_is_refused_does_not_keep_the_next_from_being_done() -> None:
    _running("a", state=S.STOPPED)
    preset = preset_save("one", actor="anna")
    Preset.objects.filter(pk=preset.pk).update(
        entries=[preset.entries[0] | {"max_model_len": -5}, preset.entries[0] | {"served_model_name": "b"}]
    )
    preset.refresh_from_db()
    operation = _look(preset_apply(preset, actor="anna"), 2)
    assert {one["name"]: one["state"] for one in operation.steps} == {"b": "running", "a": "failed"}


def test_models_on_shared_cards_are_all_begun_and_the_claim_of_each_card_orders_them() -> None:
    """SZ-075: who shares a card waits at the start's claim, who does not starts beside them."""
    for name in ("a", "b", "c"):
        _running(name, state=S.STOPPED)
    preset = preset_save("three", actor="anna")
    Model.objects.update(deployed=False)
    operation = _look(preset_apply(preset, actor="anna"), 3)
    assert [one["state"] for one in operation.steps] == ["running"] * 3
    assert {row.state for row in Instance.objects.all()} == {S.PENDING}


def test_fallback_is_made_before_the_model_that_needs_it() -> None:
    last = _running("z")
    _running("a", fallback="z")
    preset = preset_save("two", actor="anna")
    Instance.objects.all().delete()
    Model.objects.filter(served_model_name="a").delete()
    last.model.delete()
    operation = _look(preset_apply(preset, actor="anna"), 2)
    assert [(one["name"], one["state"]) for one in operation.steps] == [("z", "running"), ("a", "running")]


def test_name_that_is_taken_is_a_conflict() -> None:
    """SZ-078"""
    _running()
    preset_save("one", actor="anna")
    with pytest.raises(Conflict, match="named 'one' already"):
        preset_save(" one ", actor="bert")
    assert preset_save("one", actor="bert", replace=True).created_by == "bert"


def test_nothing_deployed_is_nothing_to_keep() -> None:
    with pytest.raises(Conflict, match="Nothing is deployed"):
        preset_save("one", actor="anna")
    with pytest.raises(InvalidInput):
        preset_save(" ", actor="anna")


def test_sleeper_comes_back_asleep() -> None:
    """SZ-059"""
    _running(state=S.SLEEPING, wanted="sleeping", enable_sleep_mode=True)
    preset = preset_save("one", actor="anna")
    assert preset.entries[0]["asleep"]
    assert _acts(preset) == {"a": "kept"}
    Instance.objects.all().delete()
    operation = _look(preset_apply(preset, actor="anna"))
    _set("a", S.READY)
    _look(operation)
    assert [row.desired_state for row in _rows("a")] == [DesiredState.SLEEPING]
    assert operation.is_open
    _set("a", S.SLEEPING)
    assert _look(operation, 2).state == "succeeded"


def test_sleep_and_wake_are_differences_of_their_own() -> None:
    _running("a", state=S.SLEEPING, wanted="sleeping", enable_sleep_mode=True)
    _running("b", enable_sleep_mode=True)
    preset = preset_save("two", actor="anna")
    _set("a", S.READY, desired_state="running")
    _set("b", S.SLEEPING, desired_state="sleeping")
    assert _acts(preset) == {"a": "sleep", "b": "wake"}
    _look(preset_apply(preset, actor="anna"), 2)
    assert {row.model.served_model_name: row.desired_state for row in Instance.objects.all()} == {
        "a": DesiredState.SLEEPING,
        "b": DesiredState.RUNNING,
    }


def test_one_that_would_not_sleep_fails_its_step_and_is_not_asked_for_ever() -> None:
    _running("a", state=S.SLEEPING, wanted="sleeping", enable_sleep_mode=True)
    preset = preset_save("one", actor="anna")
    Instance.objects.all().delete()
    operation = _look(preset_apply(preset, actor="anna"))
    _set("a", S.READY)
    _look(operation)
    _set("a", S.READY, desired_state="running", reason="Not put to sleep: 1 request in flight after 30 s.")
    _look(operation, 2)
    assert operation.state == "failed"
    assert "Not put to sleep" in operation.message


def test_failed_instance_of_a_model_outside_the_preset_is_not_restarted_any_more() -> None:
    _running("a")
    preset = preset_save("one", actor="anna")
    _running("b", state=S.FAILED)
    Instance.objects.filter(model__served_model_name="b").update(next_restart_at="2026-01-01T00:00:00Z")
    operation = _look(preset_apply(preset, actor="anna"), 2)
    (row,) = _rows("b")
    assert (row.state, row.next_restart_at, row.desired_state) == (S.STOPPED, None, DesiredState.STOPPED)
    assert operation.state == "succeeded"


def test_failed_model_of_the_preset_is_started_again() -> None:
    _running("a")
    preset = preset_save("one", actor="anna")
    _set("a", S.FAILED)
    assert _acts(preset) == {"a": "start"}


def test_second_preset_at_the_same_time_is_refused() -> None:
    _running("a")
    preset = preset_save("one", actor="anna")
    _running("b")
    preset_apply(preset, actor="anna")
    with pytest.raises(Conflict, match="is under way"):
        preset_apply(preset, actor="bert")


def test_cancelled_preset_begins_nothing_more() -> None:
    _running("a")
    preset = preset_save("one", actor="anna")
    _running("b")
    operation = preset_apply(preset, actor="anna")
    operation_cancel(operation, actor="bert")
    _look(operation)
    assert (operation.state, operation.steps[0]["state"]) == ("cancelled", "skipped")
    assert [row.state for row in _rows("b")] == [S.READY]


def _changed_sleeper() -> Preset:
    """A preset that wants the model awake with a longer context; it sleeps with a shorter one."""
    _running("a", enable_sleep_mode=True, max_model_len=8192)
    preset = preset_save("one", actor="anna")
    row = _rows("a")[0]
    model_update(row.model, actor="anna", max_model_len=4096)
    _set("a", S.SLEEPING, desired_state="sleeping")
    return preset


def test_changed_sleeper_that_shall_be_awake_wakes_with_the_changed_options() -> None:
    preset = _changed_sleeper()
    (line,) = preset_diff(preset)
    assert line["act"] == "change"
    assert line["fields"]["asleep"] == {"from": True, "to": False}
    assert line["fields"]["max_model_len"] == {"from": 4096, "to": 8192}
    operation = _look(preset_apply(preset, actor="anna"))
    renewal = Operation.objects.get(kind="replace")
    _look(renewal)
    old, new = Instance.objects.order_by("pk")
    assert old.state == S.SLEEPING  # it is not woken with the options that it should not have
    Instance.objects.filter(pk=new.pk).update(state=S.READY, host=old.host, spec_revision=new.model.spec_revision)
    _look(renewal, 2)
    new.refresh_from_db()
    assert (new.state, new.desired_state) == (S.READY, DesiredState.RUNNING)
    Instance.objects.filter(pk=old.pk).update(state=S.STOPPED)
    _look(renewal, 2)
    _look(operation, 2)
    assert (renewal.state, operation.state) == ("succeeded", "succeeded")


def test_sleeper_whose_rules_alone_change_wakes_as_it_is() -> None:
    _running("a", enable_sleep_mode=True)
    preset = preset_save("one", actor="anna")
    row = _rows("a")[0]
    model_update(row.model, actor="anna", priority=7)
    _set("a", S.SLEEPING, desired_state="sleeping")
    operation = _look(preset_apply(preset, actor="anna"), 2)
    assert not Operation.objects.filter(kind="replace").exists()
    assert _rows("a")[0].desired_state == DesiredState.RUNNING
    _set("a", S.READY)
    assert _look(operation).state == "succeeded"


def test_sleeper_that_cannot_be_woken_ends_its_step_with_the_reason() -> None:
    _running("a", enable_sleep_mode=True)
    preset = preset_save("one", actor="anna")
    row = _rows("a")[0]
    model_update(row.model, actor="anna", priority=7)
    _set("a", S.SLEEPING, desired_state="sleeping")
    operation = _look(preset_apply(preset, actor="anna"), 2)
    _set("a", S.SLEEPING, desired_state="sleeping", reason="Still asleep: waking failed.")
    _look(operation)
    assert operation.steps[0]["message"] == "It sleeps, and the preset wants it awake. Still asleep: waking failed."


def test_every_option_that_a_model_can_be_given_is_kept() -> None:
    _running("a")
    entry = preset_save("one", actor="anna").entries[0]
    assert set(READERS) | set(POLICY_READERS) <= set(entry)
