"""Room for the next model, one look at a time; what engines and the driver do is written down by the test."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from gpus_app.models import Gpu
from models_app import transitions
from models_app.errors import BrokerAway, Conflict, DoesNotFit
from models_app.models import Instance, Model, Operation
from models_app.services.lifecycle.launch import instance_place, model_launch
from models_app.services.lifecycle.sleep import room_to_wake
from models_app.services.memory import kvcache, placement
from models_app.services.plans import room_steps, room_undo
from models_app.services.plans.operations import operation_cancel, operation_step
from models_app.services.plans.plan_steps import steps_once
from models_app.services.plans.room import room_judge, room_make, tidy, tidy_plan
from models_app.services.plans.room_steps import cards_in_use
from models_app.states import DesiredState, InstanceState
from tests.builders import GIB, SMALL_FACTS, make_gpu, make_instance, make_model
from tests.models_app.pages import client_of
from tests.models_app.readings import BUNDLE, Readings, whole

S = InstanceState
pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("sent")]
#: Of the newcomer, so that its need is about 40 GiB.
WEIGHTS = 36 * GIB
LONG_AGO = timedelta(hours=1)


@pytest.fixture
def gpu() -> Gpu:
    return make_gpu()


@pytest.fixture
def newcomer() -> Model:
    return make_model(
        served_model_name="newcomer",
        facts=SMALL_FACTS | {"weights_bytes": WEIGHTS, "bundle_bytes": BUNDLE, "safety_floor_bytes": 9 * BUNDLE},
    )


def _ready(gpu: Gpu, readings: Readings, *, limit: int = 70 * GIB, name: str = "", **part: Any) -> Instance:
    model = make_model(served_model_name=name) if name else make_model()
    row = make_instance(
        model=model,
        gpus=[gpu],
        effective_limit_bytes=whole(limit),
        limit_bytes=whole(limit),
        capacity_bytes=70 * GIB,
        ready_at=timezone.now() - LONG_AGO,
    )
    Model.objects.filter(pk=model.pk).update(deployed=True)
    readings.part(row, **part)
    return row


@pytest.fixture
def full(gpu: Gpu, readings: Readings) -> Instance:
    """An idle neighbour whose prefix cache fills the card."""
    return _ready(gpu, readings, name="old", used=whole(70 * GIB))


def _engine_obeys(row: Instance, readings: Readings, *, down_to: int | None = None) -> None:
    """Its limit is in force, and its bytes are back."""
    row.refresh_from_db()
    assert row.limit_bytes is not None
    limit = whole(row.limit_bytes)
    transitions.report(
        row.pk,
        limit_acked_revision=row.limit_revision,
        limit_status="applied",
        limit_message="In force.",
        effective_limit_bytes=limit,
    )
    used = min(readings.parts[row.gpu_uuids[0], row.pk]["used"], limit if down_to is None else down_to)
    readings.part(row, limit=limit, used=used)


def _move(row: Instance, *states: InstanceState, **fields: Any) -> None:
    for state in states:
        row.refresh_from_db()
        assert transitions.move(row.pk, state, expected=S(row.state), reason="test", **fields)
    row.refresh_from_db()


def _step(operation: Operation) -> Operation:
    operation_step(operation.pk)
    operation.refresh_from_db()
    return operation


def _until(operation: Operation, done: Callable[[Operation], bool], most: int = 20) -> Operation:
    for _ in range(most):
        if done(operation):
            return operation
        _step(operation)
    raise AssertionError(f"not reached: {operation.state} {operation.phase} {operation.message} {operation.steps}")


def _room_is_there(operation: Operation, lowered: Instance, readings: Readings) -> None:
    """The neighbour gives its bytes, and the newcomer starts."""
    _until(operation, lambda one: one.phase == "lower")
    _engine_obeys(lowered, readings)
    _until(operation, lambda one: one.steps[-1]["state"] == "running")


def _ended(operation: Operation) -> bool:
    return not operation.is_open


def _kinds(operation: Operation) -> list[tuple[str, str]]:
    return [(step["kind"], step["state"]) for step in operation.steps]


def _patience(monkeypatch: pytest.MonkeyPatch, seconds: float = 0.0) -> None:
    """Nothing is waited for any more."""
    monkeypatch.setattr(room_steps, "BYTES_LIMIT_S", seconds)


def _trim(monkeypatch: pytest.MonkeyPatch, readings: Readings, *, frees: bool = True) -> None:
    def trim(row: Instance, **_: Any) -> Any:
        part = readings.parts[row.gpu_uuids[0], row.pk]
        freed = part["used"] - BUNDLE
        if frees:
            readings.part(row, used=BUNDLE)
        return kvcache._answer(row, {"status": "applied", "freed_bytes": freed})

    monkeypatch.setattr(room_steps, "kvcache_trim", trim)


# --- the verdict ----------------------------------------------------------------------------------------


def test_empty_card_fits_now(gpu: Gpu, readings: Readings, newcomer: Model) -> None:
    room = room_judge(newcomer)
    assert room.judgement.verdict == "fits"
    assert room.json()["gpus"] == [gpu.uuid]


def test_full_card_fits_after_making_room_with_the_plan(full: Instance, readings: Readings, newcomer: Model) -> None:
    answer = room_judge(newcomer).json()
    assert answer["verdict"] == "fits_after_making_room"
    assert len(answer["plans"]) == 1
    assert {step["instance_id"] for step in answer["steps"]} == {full.pk}
    assert {step["kind"] for step in answer["steps"]} <= {"lower", "trim"}
    assert answer["plans"][0]["room_bytes"] >= answer["need_bytes"]


def test_residence_of_a_victim_is_a_setting(gpu: Gpu, readings: Readings, newcomer: Model, settings: Any) -> None:
    row = _ready(gpu, readings, limit=10 * GIB, baseline=60 * GIB)
    Instance.objects.filter(pk=row.pk).update(ready_at=timezone.now() - timedelta(seconds=30))
    assert room_judge(newcomer).json()["verdict"] == "does_not_fit"
    settings.RESIDENCE_S = 10.0
    answer = room_judge(newcomer).json()
    assert [step["kind"] for step in answer["steps"]] == ["stop"]


def test_nothing_helps_against_a_pinned_neighbour_and_it_says_so(gpu: Gpu, readings: Readings, newcomer: Model) -> None:
    row = _ready(gpu, readings, limit=10 * GIB, baseline=60 * GIB)
    Model.objects.filter(pk=row.model_id).update(pinned=True)
    answer = room_judge(newcomer).json()
    assert answer["verdict"] == "does_not_fit"
    assert answer["plans"] == []
    assert 0 < answer["largest_bytes"] < answer["need_bytes"]
    with pytest.raises(DoesNotFit) as caught:
        room_make(newcomer, actor="anna")
    assert caught.value.facts["largest_bytes"] == answer["largest_bytes"]


def test_one_who_has_just_come_up_is_no_victim(gpu: Gpu, readings: Readings, newcomer: Model) -> None:
    row = _ready(gpu, readings, limit=10 * GIB, baseline=60 * GIB)
    assert room_judge(newcomer).judgement.plans[0].steps[0].kind == "stop"
    Instance.objects.filter(pk=row.pk).update(ready_at=timezone.now())
    assert room_judge(newcomer).judgement.verdict == "does_not_fit"


def test_what_fits_needs_no_room_made(gpu: Gpu, readings: Readings, newcomer: Model) -> None:
    with pytest.raises(Conflict, match="fits already"):
        room_make(newcomer, actor="anna")


def test_replica_that_waits_to_be_placed_gets_room(
    gpu: Gpu, full: Instance, readings: Readings, newcomer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = make_instance(model=newcomer, state=S.PENDING)
    _trim(monkeypatch, readings)
    operation = room_make(newcomer, actor="anna")
    _room_is_there(operation, full, readings)
    waits.refresh_from_db()
    assert (operation.steps[-1]["instance_id"], waits.state) == (waits.pk, S.SCHEDULED)


def test_model_whose_replicas_all_run_needs_none(full: Instance, readings: Readings) -> None:
    with pytest.raises(Conflict, match="more replicas"):
        room_make(full.model, actor="anna")


# --- the way it should go ---------------------------------------------------------------------------------


def test_limit_is_lowered_bytes_are_seen_newcomer_starts_and_serves(
    gpu: Gpu, full: Instance, readings: Readings, newcomer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    _trim(monkeypatch, readings)
    operation = room_make(newcomer, actor="anna")
    assert operation.steps[-1]["kind"] == "launch"
    _until(operation, lambda one: one.phase == "lower")
    full.refresh_from_db()
    assert full.limit_set_by == "anna"
    assert full.limit_automatic, "a plan does not take the limit out of the controller's hand"
    _step(operation)
    assert _kinds(operation)[-1] == ("launch", "waiting"), "the engine has not answered"
    _engine_obeys(full, readings)
    _until(operation, lambda one: one.steps[-1]["state"] == "running")
    assert all(step["state"] == "verified" for step in operation.steps[:-1])
    row = Instance.objects.get(pk=operation.steps[-1]["instance_id"])
    assert row.model == newcomer
    assert instance_place(row.pk)
    row.refresh_from_db()
    assert row.gpu_uuids == [gpu.uuid]
    _move(row, S.STARTING, S.READY)
    _step(operation)
    assert (operation.state, operation.message) == ("succeeded", "newcomer is ready.")


def test_newcomer_that_served_and_died_between_two_looks_has_come_up(
    gpu: Gpu, full: Instance, readings: Readings, newcomer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    _trim(monkeypatch, readings)
    operation = room_make(newcomer, actor="anna")
    _room_is_there(operation, full, readings)
    row = Instance.objects.get(pk=operation.steps[-1]["instance_id"])
    assert instance_place(row.pk)
    _move(row, S.STARTING, S.READY, S.FAILED)
    _step(operation)
    assert operation.state == "succeeded"


def test_room_that_was_made_binds_no_later_start(
    gpu: Gpu, full: Instance, readings: Readings, newcomer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host lost, it must start elsewhere: only what a person chose holds it there."""
    _trim(monkeypatch, readings)
    operation = room_make(newcomer, actor="anna")
    _room_is_there(operation, full, readings)
    row = Instance.objects.get(pk=operation.steps[-1]["instance_id"])
    assert row.placement_wish["gpu_uuids"] == [gpu.uuid]
    assert instance_place(row.pk)
    _move(row, S.STARTING, S.READY)
    _step(operation)
    row.refresh_from_db()
    assert placement.Wish.of(newcomer, row.placement_wish) == placement.Wish()


def test_bytes_are_waited_for_after_the_engine_has_answered(
    full: Instance, readings: Readings, newcomer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    _trim(monkeypatch, readings, frees=False)
    operation = room_make(newcomer, actor="anna")
    for _ in range(4):
        _step(operation)
    assert operation.steps[0]["state"] == "running"
    readings.part(full, used=BUNDLE)
    _step(operation)
    assert operation.steps[0]["state"] == "verified"
    assert operation.steps[0]["measured_bytes"] >= operation.steps[0]["expected_bytes"]


def test_sleeper_gives_up_its_claim_to_the_newcomer(
    gpu: Gpu, readings: Readings, newcomer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = _ready(gpu, readings, limit=2 * GIB, baseline=60 * GIB, name="old")
    Model.objects.filter(pk=row.model_id).update(enable_sleep_mode=True)
    Instance.objects.filter(pk=row.pk).update(reserved_bytes=62 * GIB)
    operation = room_make(newcomer, actor="anna")
    assert [step["kind"] for step in operation.steps] == ["sleep", "launch"]
    _step(operation)
    _move(row, S.SLEEPING)
    readings.part(row, baseline=GIB, used=0, limit=None)
    _until(operation, lambda one: one.steps[-1]["state"] == "running")
    assert instance_place(operation.steps[-1]["instance_id"])
    row.refresh_from_db()
    assert "Make room first" in room_to_wake(row)


def test_stopped_neighbour_is_not_started_again_by_itself(gpu: Gpu, readings: Readings, newcomer: Model) -> None:
    row = _ready(gpu, readings, limit=2 * GIB, baseline=60 * GIB)
    operation = room_make(newcomer, actor="anna")
    assert [step["kind"] for step in operation.steps] == ["stop", "launch"]
    _step(operation)
    _move(row, S.STOPPING, S.STOPPED)
    readings.gone(row)
    _until(operation, lambda one: one.steps[-1]["state"] == "running")
    row.refresh_from_db()
    assert row.desired_state == DesiredState.STOPPED
    assert not Model.objects.get(pk=row.model_id).deployed


# --- what is promised ---------------------------------------------------------------------------------------


def test_promised_bytes_go_to_nobody_else(full: Instance, readings: Readings, newcomer: Model, gpu: Gpu) -> None:
    operation = room_make(newcomer, actor="anna")
    Instance.objects.filter(pk=full.pk).update(reserved_bytes=4 * GIB)
    readings.part(full, used=BUNDLE, limit=9 * BUNDLE)
    Instance.objects.filter(pk=full.pk).update(effective_limit_bytes=9 * BUNDLE)
    thief = make_model(served_model_name="thief", facts=SMALL_FACTS | {"weights_bytes": WEIGHTS})
    with pytest.raises(DoesNotFit):
        model_launch(thief, actor="bert")
    assert placement.place(newcomer, placement.Wish()).decision.gpus
    operation_cancel(operation, actor="anna")
    _until(operation, _ended)
    assert model_launch(thief, actor="bert")


def test_promise_ends_where_the_reservation_begins(
    full: Instance, readings: Readings, newcomer: Model, gpu: Gpu
) -> None:
    operation = room_make(newcomer, actor="anna")
    other = make_model(served_model_name="other")
    row = make_instance(model=newcomer, gpus=[gpu], state=S.SCHEDULED, reserved_bytes=operation.facts["need_bytes"])
    before = placement.gpu_states(other)[0].ledger_free_bytes
    operation.steps[-1] |= {"instance_id": row.pk, "state": "running"}
    operation.save()
    assert placement.gpu_states(other)[0].ledger_free_bytes == before + operation.facts["need_bytes"]


def test_room_is_made_once_for_a_replica_even_where_another_card_could_be_cleared(
    full: Instance, readings: Readings, newcomer: Model
) -> None:
    room_make(newcomer, actor="anna")
    other = make_gpu(host=full.host, index=1)
    _ready(other, readings, used=whole(70 * GIB))
    with pytest.raises(Conflict, match="Room for it is being made already"):
        room_make(newcomer, actor="bert", gpu_uuids=[other.uuid])


def test_two_plans_on_one_card_are_refused(full: Instance, readings: Readings, newcomer: Model, gpu: Gpu) -> None:
    room_make(newcomer, actor="anna")
    assert cards_in_use() == {gpu.uuid}
    other = make_model(served_model_name="other", facts=SMALL_FACTS | {"weights_bytes": 20 * GIB})
    with pytest.raises(Conflict, match="rearranged"):
        room_make(other, actor="bert")
    with pytest.raises(Conflict, match="rearranged"):
        tidy(gpu.uuid, how="trim", actor="bert")
    assert Operation.objects.count() == 1


# --- what goes wrong --------------------------------------------------------------------------------------


def test_bytes_that_do_not_come_back_lead_to_a_second_plan(
    full: Instance, readings: Readings, newcomer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    _trim(monkeypatch, readings, frees=False)
    _patience(monkeypatch)
    operation = room_make(newcomer, actor="anna")
    before = len(operation.steps)

    def second(one: Operation) -> bool:
        if one.phase == "lower":
            full.refresh_from_db()
            transitions.report(full.pk, limit_acked_revision=full.limit_revision, limit_status="applied")
        return bool(one.facts["round"] == 2)

    _until(operation, second)
    assert len(operation.steps) > before
    assert "short" in {step["state"] for step in operation.steps}
    assert operation.message == "Not all of it came back: a second round."


def test_plan_that_fails_twice_puts_the_limit_back(
    full: Instance, readings: Readings, newcomer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    _trim(monkeypatch, readings, frees=False)
    _patience(monkeypatch)
    operation = room_make(newcomer, actor="anna")
    before = full.effective_limit_bytes

    def ended(one: Operation) -> bool:
        full.refresh_from_db()
        if full.limit_revision != full.limit_acked_revision:
            limit = whole(full.limit_bytes or 0)
            transitions.report(
                full.pk,
                limit_acked_revision=full.limit_revision,
                limit_status="applied",
                effective_limit_bytes=limit,
            )
            readings.part(full, limit=limit)
        return _ended(one)

    _until(operation, ended, most=40)
    full.refresh_from_db()
    assert operation.state == "failed"
    assert "did not come back" in operation.message
    assert "again" in operation.message
    assert full.limit_bytes == before
    assert not Instance.objects.filter(model=newcomer).exists()


def test_newcomer_that_dies_ends_first_and_only_then_the_sleeper_wakes(
    gpu: Gpu, readings: Readings, newcomer: Model
) -> None:
    row = _ready(gpu, readings, limit=2 * GIB, baseline=60 * GIB, name="old")
    Model.objects.filter(pk=row.model_id).update(enable_sleep_mode=True)
    Instance.objects.filter(pk=row.pk).update(reserved_bytes=62 * GIB)
    operation = room_make(newcomer, actor="anna")
    _step(operation)
    _move(row, S.SLEEPING)
    readings.part(row, baseline=GIB, used=0, limit=None)
    _until(operation, lambda one: one.steps[-1]["state"] == "running")
    new = Instance.objects.get(pk=operation.steps[-1]["instance_id"])
    instance_place(new.pk)
    _move(new, S.STARTING)
    _move(new, S.FAILED, next_restart_at=timezone.now())
    readings.part(new, [gpu.uuid], resident=40 * GIB)  # the driver is late
    for _ in range(4):
        _step(operation)
    row.refresh_from_db()
    assert row.desired_state == DesiredState.SLEEPING, "no room yet"
    assert operation.is_open
    readings.gone(new)
    for _ in range(2):
        _step(operation)
    row.refresh_from_db()
    assert row.desired_state == DesiredState.RUNNING
    _move(row, S.STARTING)
    _until(operation, _ended)
    assert operation.state == "failed"
    assert "did not come up" in operation.message
    assert "old wakes" in operation.message
    new.refresh_from_db()
    assert (new.next_restart_at, new.desired_state) == (None, DesiredState.STOPPED)


def test_neighbour_that_somebody_launches_again_meanwhile_is_waited_for_no_longer(
    gpu: Gpu, readings: Readings, newcomer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = _ready(gpu, readings, limit=2 * GIB, baseline=60 * GIB)
    operation = room_make(newcomer, actor="anna")
    _step(operation)
    _move(row, S.STOPPING)
    model_launch(row.model, actor="bert")
    _move(row, S.STOPPED)
    _patience(monkeypatch)
    _until(operation, lambda one: one.steps[0]["state"] == "short", most=3)
    assert "wanted running again" in operation.steps[0]["message"]


def test_stop_is_waited_for_as_long_as_its_requests_may_drain(
    gpu: Gpu, readings: Readings, newcomer: Model, settings: Any
) -> None:
    settings.DRAIN_LIMIT_S = 600.0
    row = _ready(gpu, readings, limit=2 * GIB, baseline=60 * GIB)
    operation = room_make(newcomer, actor="anna")
    _step(operation)
    _move(row, S.STOPPING)
    operation.steps[0]["started_at"] -= 300.0
    operation.save(update_fields=["steps"])
    _step(operation)
    assert operation.steps[0]["state"] == "running"


def test_neighbour_that_was_stopped_is_started_again_when_it_is_undone(
    gpu: Gpu, readings: Readings, newcomer: Model
) -> None:
    row = _ready(gpu, readings, limit=2 * GIB, baseline=60 * GIB)
    operation = room_make(newcomer, actor="anna")
    _step(operation)
    operation_cancel(operation, actor="bert")
    for _ in range(3):
        _step(operation)
    assert operation.is_open, "it is still on its way out"
    _move(row, S.STOPPING, S.STOPPED)
    readings.gone(row)
    _until(operation, _ended)
    row.refresh_from_db()
    assert (operation.state, row.state, row.desired_state) == ("cancelled", S.PENDING, DesiredState.RUNNING)


def test_limits_lowered_twice_come_back_to_the_first(gpu: Gpu, readings: Readings) -> None:
    row = _ready(gpu, readings, limit=10 * GIB)
    high, middle, low = whole(30 * GIB), whole(20 * GIB), whole(10 * GIB)
    Instance.objects.filter(pk=row.pk).update(limit_bytes=low)
    steps = [
        {"kind": "lower", "instance_id": row.pk, "name": "x", "from_bytes": a, "to_bytes": b, "state": "verified"}
        for a, b in ((high, middle), (middle, low))
    ]
    operation = Operation.objects.create(
        kind="make_room", title="x", steps=steps, facts={"gpu_uuids": [gpu.uuid], "undoing": "Cancelled."}
    )
    _until(operation, _ended)
    row.refresh_from_db()
    assert row.limit_bytes == high


def test_limit_that_an_operator_has_set_meanwhile_stays(
    full: Instance, readings: Readings, newcomer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    _trim(monkeypatch, readings)
    operation = room_make(newcomer, actor="anna")
    _until(operation, lambda one: one.phase == "lower")
    kvcache.kvcache_limit_set(full, size="50G", actor="bert", wait_s=0)
    operation_cancel(operation, actor="anna")
    _until(operation, _ended)
    full.refresh_from_db()
    assert (full.limit_bytes, full.limit_set_by) == (50 * GIB, "bert")


def test_error_at_the_launch_is_undone_too(
    full: Instance, readings: Readings, newcomer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    _trim(monkeypatch, readings)
    before = full.limit_bytes
    operation = room_make(newcomer, actor="anna")
    _until(operation, lambda one: one.phase == "lower")
    _engine_obeys(full, readings)

    def refuse(*_: Any, **__: Any) -> None:
        raise Conflict("At most 1 instance may live at once.")

    monkeypatch.setattr(room_steps, "model_launch", refuse)
    _until(operation, _ended)
    full.refresh_from_db()
    assert operation.state == "failed"
    assert operation.message.startswith("At most 1 instance")
    assert full.limit_bytes == before


def test_broker_away_in_the_middle_only_delays(
    full: Instance, readings: Readings, newcomer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation = room_make(newcomer, actor="anna")

    def away(*_: Any, **__: Any) -> None:
        raise BrokerAway("The message broker does not answer.")

    with monkeypatch.context() as patch:
        patch.setattr(room_steps, "kvcache_trim", away)
        patch.setattr(room_steps, "limit_write", away)
        _step(operation)
        assert operation.is_open
        assert operation.steps[0]["state"] == "waiting"
    _trim(monkeypatch, readings)
    _step(operation)
    assert operation.steps[0]["state"] == "running"


def test_plan_that_takes_too_long_is_undone(full: Instance, readings: Readings, newcomer: Model) -> None:
    operation = room_make(newcomer, actor="anna")
    Operation.objects.update(created_at=timezone.now() - timedelta(seconds=1900))
    _until(operation, _ended)
    assert operation.state == "failed"
    assert "Not finished within 1800 s" in operation.message


def test_newcomer_that_is_still_loading_is_left_to_its_own_limit(
    gpu: Gpu, full: Instance, readings: Readings, newcomer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have hours for a download; the plan has half an hour until it starts."""
    _trim(monkeypatch, readings)
    operation = room_make(newcomer, actor="anna")
    _room_is_there(operation, full, readings)
    row = Instance.objects.get(pk=operation.steps[-1]["instance_id"])
    assert instance_place(row.pk)
    _move(row, S.STARTING)
    Operation.objects.update(created_at=timezone.now() - timedelta(hours=2))
    _step(operation)
    assert operation.is_open and not operation.facts.get("undoing")
    _move(row, S.READY)
    _step(operation)
    assert operation.state == "succeeded"


@pytest.mark.parametrize("written", [False, True])
def test_worker_that_died_in_the_middle_of_a_step_is_followed_by_another(
    full: Instance, readings: Readings, newcomer: Model, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """Killed before the step's start was written, and after."""
    _trim(monkeypatch, readings)
    operation = room_make(newcomer, actor="anna")
    lower = next(place for place, step in enumerate(operation.steps) if step["kind"] == "lower")
    _until(operation, lambda one: one.steps[lower]["state"] == "running")
    if not written:
        operation.steps[lower]["state"] = "waiting"
    operation.fence += 1
    operation.save()
    _step(operation)
    _engine_obeys(full, readings)
    _until(operation, lambda one: one.steps[-1]["state"] == "running")


def test_worker_that_died_after_the_launch_finds_the_newcomer(
    full: Instance, readings: Readings, newcomer: Model, monkeypatch: pytest.MonkeyPatch, gpu: Gpu
) -> None:
    _trim(monkeypatch, readings)
    operation = room_make(newcomer, actor="anna")
    _room_is_there(operation, full, readings)
    launched = operation.steps[-1].pop("instance_id")
    operation.steps[-1]["state"] = "waiting"
    operation.save()
    instance_place(launched)
    _step(operation)
    assert operation.steps[-1]["instance_id"] == launched
    assert Instance.objects.filter(model=newcomer).count() == 1


@pytest.mark.parametrize("looks", [0, 1, 3])
def test_cancelled_before_the_launch_puts_everything_back(
    full: Instance, readings: Readings, newcomer: Model, monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    _trim(monkeypatch, readings)
    before = full.limit_bytes
    operation = room_make(newcomer, actor="anna")
    for _ in range(looks):
        _step(operation)
    operation_cancel(operation, actor="bert")
    _until(operation, _ended)
    full.refresh_from_db()
    assert operation.state == "cancelled"
    assert full.limit_bytes == before
    assert cards_in_use() == frozenset()


def test_cancelled_while_the_newcomer_starts_ends_it(
    full: Instance, readings: Readings, newcomer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    _trim(monkeypatch, readings)
    before = full.limit_bytes
    operation = room_make(newcomer, actor="anna")
    _room_is_there(operation, full, readings)
    row = Instance.objects.get(pk=operation.steps[-1]["instance_id"])
    instance_place(row.pk)
    _move(row, S.STARTING)
    operation_cancel(operation, actor="bert")
    for _ in range(3):
        _step(operation)
    row.refresh_from_db()
    full.refresh_from_db()
    assert row.state == S.STOPPING
    assert full.limit_bytes != before, "not before the newcomer is gone"
    _move(row, S.STOPPED)
    _until(operation, _ended)
    full.refresh_from_db()
    assert (operation.state, full.limit_bytes) == ("cancelled", before)


def test_what_cannot_be_put_back_is_said(
    gpu: Gpu, readings: Readings, newcomer: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = _ready(gpu, readings, limit=2 * GIB, baseline=60 * GIB, name="old")
    Model.objects.filter(pk=row.model_id).update(enable_sleep_mode=True)
    Instance.objects.filter(pk=row.pk).update(reserved_bytes=62 * GIB)
    operation = room_make(newcomer, actor="anna")
    _step(operation)
    _move(row, S.SLEEPING)
    readings.part(row, baseline=GIB, used=0, limit=None)
    readings.other[gpu.uuid] = 40 * GIB  # somebody else was faster
    operation_cancel(operation, actor="anna")
    for _ in range(3):
        _step(operation)
    assert operation.is_open
    monkeypatch.setattr(room_undo, "UNDO_LIMIT_S", -1.0)
    _until(operation, _ended)
    assert operation.state == "cancelled"
    assert "old: GPU 0" in operation.message


# --- several cards ----------------------------------------------------------------------------------------


def test_instance_over_two_cards_is_lowered_once_to_the_lower_limit() -> None:
    def lower(uuid: str, to: int) -> dict[str, Any]:
        return {"kind": "lower", "instance_id": 1, "gpu_uuid": uuid, "to_bytes": to}

    assert [step["to_bytes"] for step in steps_once([lower("a", 30), lower("b", 20)])] == [20]


def test_instance_that_is_stopped_for_one_card_needs_nothing_for_the_other() -> None:
    steps = [
        {"kind": "trim", "instance_id": 1, "to_bytes": 1},
        {"kind": "sleep", "instance_id": 1, "to_bytes": 1},
        {"kind": "stop", "instance_id": 1, "to_bytes": 0},
        {"kind": "stop", "instance_id": 1, "to_bytes": 0},
        {"kind": "launch"},
    ]
    assert [step["kind"] for step in steps_once(steps)] == ["stop", "launch"]


@pytest.fixture
def split(readings: Readings, gpu: Gpu) -> Instance:
    """An idle instance over GPUs 0 and 1 whose prefix cache fills both."""
    cards = [gpu, make_gpu(index=1)]
    row = make_instance(
        model=make_model(served_model_name="split", tensor_parallel_size=2),
        gpus=cards,
        effective_limit_bytes=whole(70 * GIB),
        limit_bytes=whole(70 * GIB),
        capacity_bytes=70 * GIB,
        ready_at=timezone.now() - LONG_AGO,
    )
    readings.part(row, used=whole(70 * GIB))
    return row


@pytest.mark.parametrize("size", [1, 2])
def test_instance_over_two_gpus_has_one_step_that_says_so(
    split: Instance, newcomer: Model, readings: Readings, size: int
) -> None:
    """Whether the newcomer needs one of its GPUs or both: bytes per GPU, and of both together."""
    Model.objects.filter(pk=newcomer.pk).update(tensor_parallel_size=size)
    newcomer.refresh_from_db()
    answer = room_judge(newcomer).json()
    assert len(answer["plans"]) == size
    mine = [step for step in answer["steps"] if step["instance_id"] == split.pk]
    assert len({step["kind"] for step in mine}) == len(mine) > 0
    for step in mine:
        assert step["where"] == "on each of GPUs 0, 1"
        assert step["total_bytes"] == 2 * step["expected_bytes"]
    assert answer["sentence"].count("lower split") == 1
    text = client_of().get(f"/models/{newcomer.pk}/launch/").content.decode()
    assert text.count("on each of GPUs 0, 1") == len(mine)
    assert "in all" in text


def test_step_over_two_gpus_counts_where_the_least_came_back(
    split: Instance, newcomer: Model, readings: Readings, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    _trim(monkeypatch, readings)
    operation = room_make(newcomer, actor="anna")
    lower = next(step for step in operation.steps if step["kind"] == "lower")
    monkeypatch.setitem(room_steps.STEP_LIMIT_S, room_steps.StepKind.LOWER, 1e9)
    _until(operation, lambda row: next(one for one in row.steps if one["kind"] == "lower")["state"] == "running")
    _engine_obeys(split, readings)
    readings.part(split, [split.gpu_uuids[1]], used=readings.parts[split.gpu_uuids[1], split.pk]["used"] + BUNDLE)
    _step(operation)
    done = next(step for step in operation.steps if step["kind"] == "lower")
    both = [done["free_before"][uuid] for uuid in split.gpu_uuids]
    gained = [readings.free(one) - had for one, had in zip(Gpu.objects.order_by("index"), both, strict=True)]
    assert gained[0] > gained[1] and done["measured_bytes"] == gained[1]
    assert lower["gpu_uuids"] == split.gpu_uuids


# --- tidying ----------------------------------------------------------------------------------------------


def test_trim_all_trims_and_says_what_came_back(
    full: Instance, readings: Readings, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    _trim(monkeypatch, readings)
    operation = tidy(gpu.uuid, how="trim", actor="anna")
    _until(operation, _ended)
    assert operation.state == "succeeded"
    assert "came back" in operation.message
    full.refresh_from_db()
    assert full.limit_revision == 0, "limits stay as they are"


def test_shrink_idle_lowers_idle_instances_to_their_lowest_limit(full: Instance, readings: Readings, gpu: Gpu) -> None:
    busy = _ready(gpu, readings, limit=5 * GIB, running=1)
    operation = tidy(gpu.uuid, how="shrink", actor="anna")
    _step(operation)
    full.refresh_from_db()
    assert full.limit_bytes == 9 * BUNDLE
    _engine_obeys(full, readings)
    _until(operation, _ended)
    busy.refresh_from_db()
    assert (operation.state, busy.limit_revision) == ("succeeded", 0)


def test_nothing_to_tidy_is_said(gpu: Gpu, readings: Readings) -> None:
    with pytest.raises(Conflict, match="nothing to trim"):
        tidy(gpu.uuid, how="trim", actor="anna")
    with pytest.raises(Conflict, match="No idle instance"):
        tidy(gpu.uuid, how="shrink", actor="anna")


def test_without_a_fresh_reading_nothing_is_tidied(gpu: Gpu, readings: Readings) -> None:
    readings.age_s = 60.0
    with pytest.raises(Conflict, match="no fresh reading"):
        tidy_plan(gpu.uuid, how="trim")


def test_tidying_that_is_cancelled_keeps_what_was_done(full: Instance, readings: Readings, gpu: Gpu) -> None:
    operation = tidy(gpu.uuid, how="shrink", actor="anna")
    _step(operation)
    operation_cancel(operation, actor="anna")
    _step(operation)
    full.refresh_from_db()
    assert (operation.state, full.limit_bytes) == ("cancelled", 9 * BUNDLE)
