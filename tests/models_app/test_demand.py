"""A request asks for a model: who makes room for it, who never does, what those who ask are told, and no thrash."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from gpus_app.models import Gpu
from models_app import transitions
from models_app.models import AuditEntry, Instance, InstanceEvent, Model, Operation
from models_app.router.table import RouteTable
from models_app.selectors import routes_snapshot
from models_app.services.memory.placement import claim_waive
from models_app.services.plans.demand import ACTOR, model_demand
from models_app.services.plans.operations import operation_cancel, operation_step
from models_app.services.plans.room_wake import PLACED_LIMIT_S
from models_app.services.plans.thrash import residence_s, thrash_pairs
from models_app.states import DesiredState, InstanceState
from tests.builders import GIB, SMALL_FACTS, make_gpu, make_instance, make_model
from tests.models_app.pages import client_of
from tests.models_app.readings import BUNDLE, Readings, whole

S = InstanceState
pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("sent")]
NEED = 36 * GIB  # of weights, so that the newcomer needs about 40 GiB


@pytest.fixture
def gpu() -> Gpu:
    return make_gpu()


def _newcomer(name: str = "new", *, weights: int = NEED, **fields: Any) -> Model:
    facts = SMALL_FACTS | {"weights_bytes": weights, "bundle_bytes": BUNDLE, "safety_floor_bytes": 9 * BUNDLE}
    return make_model(served_model_name=name, on_demand=True, facts=facts, **fields)


def _neighbour(
    gpu: Gpu,
    readings: Readings,
    name: str,
    *,
    size: int = 60 * GIB,
    ago_s: float = 3600,
    part: Any = None,
    **rules: Any,
) -> Instance:
    """One who serves and holds ``size`` in weights, so that only its going gives room."""
    model = make_model(served_model_name=name, **({"on_demand": True, "enable_sleep_mode": True} | rules))
    row = make_instance(
        model=model,
        gpus=[gpu],
        limit_bytes=whole(2 * GIB),
        effective_limit_bytes=whole(2 * GIB),
        capacity_bytes=whole(2 * GIB),
        safety_floor_bytes=whole(2 * GIB),
        reserved_bytes=size + 2 * GIB,
        ready_at=timezone.now() - timedelta(seconds=ago_s),
    )
    Model.objects.filter(pk=model.pk).update(deployed=True)
    readings.part(row, baseline=size, **(part or {}))
    return row


def _falls_asleep(row: Instance, readings: Readings) -> None:
    transitions.move(row.pk, S.SLEEPING, expected=S.DRAINING, reason="asleep", desired_state=DesiredState.SLEEPING)
    row.refresh_from_db()
    assert row.attempt is not None
    row.attempt.memory["asleep_bytes"] = GIB
    row.attempt.save()
    readings.part(row, baseline=GIB)


def _sleeper(gpu: Gpu, readings: Readings) -> Instance:
    """One who was put to sleep to make room: it has no claim to come back at once."""
    row = _neighbour(gpu, readings, "sleeper", size=40 * GIB)
    transitions.move(row.pk, S.DRAINING, expected=S.READY, reason="room")
    _falls_asleep(row, readings)
    claim_waive(row)
    return row


def _neighbour_gives_way(old: Instance, readings: Readings) -> Operation:
    """The plan puts it to sleep, and its bytes are seen to be back."""
    operation = Operation.objects.get()
    operation_step(operation.pk)
    _falls_asleep(old, readings)
    for _ in range(3):
        operation_step(operation.pk)
    operation.refresh_from_db()
    return operation


def _comes_up(row: Instance, *states: InstanceState) -> None:
    for state in states or (S.STARTING, S.READY):
        assert transitions.move(row.pk, state, expected=S(Instance.objects.get(pk=row.pk).state), reason="up")


def _plan() -> list[tuple[str, str]]:
    operation = Operation.objects.get()
    assert operation.created_by == ACTOR
    return [(step["kind"], step["name"]) for step in operation.steps]


def _facts(model: Model) -> dict[str, Any]:
    model.refresh_from_db()
    return dict(model.demand_facts)


# --- who makes room --------------------------------------------------------------------------------


def test_idle_neighbour_goes_to_sleep_and_the_model_is_launched(gpu: Gpu, readings: Readings) -> None:
    _neighbour(gpu, readings, "old")
    model = _newcomer()
    model_demand("new")
    assert _plan() == [("sleep", "old"), ("launch", "new")]
    assert _facts(model) == {}


def test_neighbour_without_sleep_mode_is_stopped(gpu: Gpu, readings: Readings) -> None:
    _neighbour(gpu, readings, "old", enable_sleep_mode=False)
    _newcomer()
    model_demand("new")
    assert _plan() == [("stop", "old"), ("launch", "new")]


def test_wish_that_is_repeated_joins_the_room_that_is_being_made(gpu: Gpu, readings: Readings) -> None:
    _neighbour(gpu, readings, "old")
    _newcomer(aliases=["nick"])
    for name in ("new", "nick", "new"):
        model_demand(name)
    assert Operation.objects.count() == 1


def test_victims_are_chosen_by_the_memory_that_is_needed(gpu: Gpu, readings: Readings) -> None:
    """E14: the one that was used longest ago is small, and its going would not be enough."""
    _neighbour(gpu, readings, "small", size=8 * GIB, ago_s=90_000)
    _neighbour(gpu, readings, "large", size=50 * GIB)
    _newcomer()
    model_demand("new")
    assert _plan() == [("sleep", "large"), ("launch", "new")]


def test_least_important_goes_first(gpu: Gpu, readings: Readings) -> None:
    for name, priority in (("dear", 90), ("cheap", 10), ("plain", 50)):
        row = _neighbour(gpu, readings, name, size=22 * GIB)
        row.model.memory_policy.priority = priority
        row.model.memory_policy.save()
    _newcomer(weights=14 * GIB)
    model_demand("new")
    assert _plan() == [("sleep", "cheap"), ("launch", "new")]


def test_sleeper_wakes_in_the_room_of_another(gpu: Gpu, readings: Readings) -> None:
    old = _neighbour(gpu, readings, "old")
    sleeper = _sleeper(gpu, readings)
    model_demand("sleeper")
    assert _plan() == [("sleep", "old"), ("wake", "sleeper")]
    operation = Operation.objects.get()
    operation_step(operation.pk)
    old.refresh_from_db()
    assert (old.state, old.desired_state) == (S.DRAINING, DesiredState.SLEEPING)
    _falls_asleep(old, readings)
    for _ in range(3):
        operation_step(operation.pk)
    sleeper.refresh_from_db()
    operation.refresh_from_db()
    assert sleeper.desired_state == DesiredState.RUNNING, operation.message
    _comes_up(sleeper)
    operation_step(operation.pk)
    operation.refresh_from_db()
    assert operation.state == Operation.State.SUCCEEDED
    assert operation.message == "sleeper is awake."


def test_wake_that_fails_puts_the_neighbour_back(gpu: Gpu, readings: Readings) -> None:
    old = _neighbour(gpu, readings, "old")
    sleeper = _sleeper(gpu, readings)
    model_demand("sleeper")
    operation = _neighbour_gives_way(old, readings)
    transitions.move(sleeper.pk, S.STARTING, expected=S.SLEEPING, reason="Waking.")
    operation_step(operation.pk)
    asleep: dict[str, Any] = {"reason": "Still asleep: waking failed.", "desired_state": DesiredState.SLEEPING}
    transitions.move(sleeper.pk, S.SLEEPING, expected=S.STARTING, **asleep)
    for _ in range(4):
        operation_step(operation.pk)
    old.refresh_from_db()
    operation.refresh_from_db()
    assert old.desired_state == DesiredState.RUNNING, operation.message
    assert "waking failed" in operation.message
    transitions.move(old.pk, S.STARTING, expected=S.SLEEPING, reason="up")
    operation_step(operation.pk)
    operation_step(operation.pk)
    operation.refresh_from_db()
    assert operation.state == Operation.State.FAILED
    model_demand("sleeper")  # not again at once: its neighbour would pay for every request
    assert Operation.objects.count() == 1
    assert "waking failed" in _facts(sleeper.model)["reason"]


def test_one_that_waits_to_be_placed_gets_room_as_well(gpu: Gpu, readings: Readings) -> None:
    """After a crash its bytes had gone to a neighbour, and it waited beside it until its time was over."""
    old = _neighbour(gpu, readings, "old")
    model = _newcomer()
    waits = make_instance(model=model, state=S.PENDING, placement_wish={"host": None, "gpu_uuids": []})
    model_demand("new")
    assert _plan() == [("sleep", "old"), ("launch", "new")]
    operation = _neighbour_gives_way(old, readings)
    waits.refresh_from_db()
    operation.refresh_from_db()
    assert (waits.state, waits.gpu_uuids) == (S.SCHEDULED, [gpu.uuid]), operation.message
    _comes_up(waits)
    operation_step(operation.pk)
    operation.refresh_from_db()
    assert operation.state == Operation.State.SUCCEEDED, operation.message
    assert Instance.objects.filter(model=model).count() == 1


def test_one_that_waits_and_fits_is_placed_at_once(gpu: Gpu, readings: Readings) -> None:
    model = _newcomer()
    waits = make_instance(model=model, state=S.PENDING)
    model_demand("new")
    waits.refresh_from_db()
    assert waits.state == S.SCHEDULED
    assert not Operation.objects.exists()


@pytest.mark.parametrize("ends", [(S.FAILED,), (S.FAILED, S.PENDING)])
def test_one_that_woke_and_died_at_once_keeps_its_room(
    gpu: Gpu, readings: Readings, ends: tuple[InstanceState, ...]
) -> None:
    """What it died of is a matter of its restart policy: its neighbour is not woken into the bytes that it needs."""
    old = _neighbour(gpu, readings, "old")
    sleeper = _sleeper(gpu, readings)
    model_demand("sleeper")
    operation = _neighbour_gives_way(old, readings)
    _comes_up(sleeper, S.STARTING, S.READY, *ends)
    operation_step(operation.pk)
    operation.refresh_from_db()
    old.refresh_from_db()
    assert operation.state == Operation.State.SUCCEEDED, operation.message
    assert old.state == S.SLEEPING


def test_one_that_starts_anew_to_sleep_again_stays_awake_for_those_who_ask(gpu: Gpu, readings: Readings) -> None:
    row = make_instance(
        model=_newcomer(), gpus=[gpu], state=S.STARTING, desired_state=DesiredState.SLEEPING, reserved_bytes=GIB
    )
    model_demand("new")
    row.refresh_from_db()
    assert row.desired_state == DesiredState.RUNNING


def test_one_that_came_up_before_the_plan_saw_it_has_come_up(gpu: Gpu, readings: Readings) -> None:
    """Placed by the reconciler, ready, and put to sleep by hand between two looks of the plan."""
    old = _neighbour(gpu, readings, "old")
    waits = make_instance(model=_newcomer(), state=S.PENDING)
    model_demand("new")
    operation = Operation.objects.get()
    operation_step(operation.pk)
    _falls_asleep(old, readings)
    Instance.objects.filter(pk=waits.pk).update(gpu_uuids=[gpu.uuid], host=gpu.host)
    _comes_up(waits, S.SCHEDULED, S.STARTING, S.READY, S.DRAINING, S.SLEEPING)
    for _ in range(3):
        operation_step(operation.pk)
    operation.refresh_from_db()
    assert operation.state == Operation.State.SUCCEEDED, operation.message


def test_one_that_died_waking_and_finds_no_place_ends_the_plan(gpu: Gpu, readings: Readings) -> None:
    """Its bytes went to somebody else while it started anew: the card is not held for it for half an hour."""
    old = _neighbour(gpu, readings, "old")
    sleeper = _sleeper(gpu, readings)
    model_demand("sleeper")
    operation = _neighbour_gives_way(old, readings)
    _comes_up(sleeper, S.STARTING, S.FAILED, S.PENDING)
    operation_step(operation.pk)
    operation.refresh_from_db()
    assert operation.is_open and not operation.facts.get("undoing")
    Instance.objects.filter(pk=sleeper.pk).update(state_since=timezone.now() - timedelta(seconds=PLACED_LIMIT_S + 1))
    operation_step(operation.pk)
    operation.refresh_from_db()
    assert operation.facts["undoing"].startswith("It did not wake")


def test_wake_that_is_cancelled_on_its_way_ends_asleep_and_the_neighbour_comes_back(
    gpu: Gpu, readings: Readings
) -> None:
    old = _neighbour(gpu, readings, "old")
    sleeper = _sleeper(gpu, readings)
    model_demand("sleeper")
    operation = _neighbour_gives_way(old, readings)
    _comes_up(sleeper, S.STARTING)
    operation_cancel(operation, actor="anna")
    for _ in range(3):
        operation_step(operation.pk)
    old.refresh_from_db()
    assert old.desired_state == DesiredState.SLEEPING, "the newcomer holds the bytes"
    _comes_up(sleeper, S.READY)
    operation_step(operation.pk)
    sleeper.refresh_from_db()
    assert (sleeper.state, sleeper.desired_state) == (S.DRAINING, DesiredState.SLEEPING)
    _falls_asleep(sleeper, readings)
    for _ in range(3):
        operation_step(operation.pk)
    old.refresh_from_db()
    operation.refresh_from_db()
    assert old.desired_state == DesiredState.RUNNING, (operation.message, operation.steps)
    _comes_up(old)
    for _ in range(2):
        operation_step(operation.pk)
    operation.refresh_from_db()
    assert operation.state == Operation.State.CANCELLED, operation.message
    assert "sleeper sleeps again." in operation.message
    assert "old is awake." in operation.message


def test_one_that_dies_while_its_wake_is_cancelled_sleeps_after_its_next_start(gpu: Gpu, readings: Readings) -> None:
    old = _neighbour(gpu, readings, "old")
    sleeper = _sleeper(gpu, readings)
    model_demand("sleeper")
    operation = _neighbour_gives_way(old, readings)
    _comes_up(sleeper, S.STARTING, S.FAILED)
    operation_cancel(operation, actor="anna")
    for _ in range(3):
        operation_step(operation.pk)
    sleeper.refresh_from_db()
    assert sleeper.desired_state == DesiredState.SLEEPING


def test_cancelled_too_late_is_done(gpu: Gpu, readings: Readings) -> None:
    old = _neighbour(gpu, readings, "old")
    sleeper = _sleeper(gpu, readings)
    model_demand("sleeper")
    operation = _neighbour_gives_way(old, readings)
    _comes_up(sleeper)
    operation_cancel(operation, actor="anna")
    operation_step(operation.pk)
    operation.refresh_from_db()
    assert (operation.state, operation.message) == (Operation.State.SUCCEEDED, "sleeper is awake.")


# --- who never does --------------------------------------------------------------------------------


def test_pinned_neighbour_stays_and_those_who_ask_are_told_so(gpu: Gpu, readings: Readings) -> None:
    """E8."""
    _neighbour(gpu, readings, "old", pinned=True)
    model = _newcomer()
    model_demand("new")
    assert not Operation.objects.exists()
    assert _facts(model)["code"] == "refused"
    page = client_of("viewer").get(f"/models/{model.pk}/").content.decode()
    assert "by old (pinned)" in page and "Requests are turned away" in page
    refused = RouteTable.from_snapshot(routes_snapshot()).models["new"].refused
    assert "62.0 GiB by old (pinned)" in refused


def test_neighbour_that_no_request_brings_back_stays(gpu: Gpu, readings: Readings) -> None:
    _neighbour(gpu, readings, "old", on_demand=False)
    model = _newcomer()
    model_demand("new")
    assert not Operation.objects.exists()
    assert _facts(model)["code"] == "refused"
    assert "old (no request would bring it back)" in _facts(model)["reason"]


@pytest.mark.parametrize("priority", [0, 50])
def test_neighbour_at_work_is_waited_for_and_never_stopped(gpu: Gpu, readings: Readings, priority: int) -> None:
    old = _neighbour(gpu, readings, "old", part={"running": 2})
    old.model.memory_policy.priority = priority
    old.model.memory_policy.save()
    model = _newcomer()
    model_demand("new")
    assert not Operation.objects.exists()
    assert _facts(model)["code"] == "waits"
    route = RouteTable.from_snapshot(routes_snapshot()).models["new"]
    assert route.refused == ""
    assert "old (at work)" in route.reason
    readings.part(old, running=0)
    model_demand("new")
    assert _plan() == [("sleep", "old"), ("launch", "new")]


def test_neighbour_that_has_just_come_up_is_waited_for(gpu: Gpu, readings: Readings, settings: Any) -> None:
    """E11, E9: a request that comes too early queues; it neither fails nor drives the other out."""
    settings.RESIDENCE_S = 60.0
    old = _neighbour(gpu, readings, "old", ago_s=20)
    model = _newcomer()
    model_demand("new")
    assert not Operation.objects.exists()
    assert _facts(model)["code"] == "waits"
    assert "and stays for 60 s" in _facts(model)["reason"]
    Instance.objects.filter(pk=old.pk).update(ready_at=timezone.now() - timedelta(seconds=61))
    model_demand("new")
    assert _plan() == [("sleep", "old"), ("launch", "new")]


def test_model_that_fits_on_no_card_is_refused(gpu: Gpu, readings: Readings) -> None:
    _neighbour(gpu, readings, "old", size=8 * GIB)
    model = _newcomer(weights=900 * GIB)
    model_demand("new")
    assert not Operation.objects.exists()
    assert _facts(model)["code"] == "refused"


def test_refusal_runs_out_so_that_it_is_asked_for_again(gpu: Gpu, readings: Readings) -> None:
    _neighbour(gpu, readings, "old", pinned=True)
    model = _newcomer()
    model_demand("new")
    since = _facts(model)["since"]
    model_demand("new")
    assert _facts(model)["since"] == since
    Model.objects.filter(pk=model.pk).update(demand_facts=_facts(model) | {"at": _facts(model)["at"] - 31})
    assert RouteTable.from_snapshot(routes_snapshot()).models["new"].refused == ""


# --- one who is leaving ----------------------------------------------------------------------------


def test_one_who_is_being_stopped_starts_again_after_its_end(gpu: Gpu, readings: Readings) -> None:
    """E5."""
    row = _neighbour(gpu, readings, "old")
    transitions.move(row.pk, S.DRAINING, expected=S.READY, reason="idle", desired_state=DesiredState.STOPPED)
    model_demand("old")
    row.refresh_from_db()
    assert (row.state, row.desired_state) == (S.DRAINING, DesiredState.RUNNING)
    assert Instance.objects.count() == 1


def test_one_who_is_falling_asleep_gets_there_and_is_woken(gpu: Gpu, readings: Readings, on_commit: Any) -> None:
    """E5."""
    row = _neighbour(gpu, readings, "old")
    transitions.move(row.pk, S.DRAINING, expected=S.READY, reason="idle", desired_state=DesiredState.SLEEPING)
    model_demand("old")
    row.refresh_from_db()
    assert (row.state, row.desired_state) == (S.DRAINING, DesiredState.SLEEPING)
    assert _facts(row.model)["code"] == "waits"
    _falls_asleep(row, readings)
    model_demand("old")
    row.refresh_from_db()
    assert (row.state, row.desired_state) == (S.SLEEPING, DesiredState.RUNNING)


# --- thrash ----------------------------------------------------------------------------------------


def _turn(newcomer: Model, victim: Instance, ago_s: float) -> None:
    operation = Operation.objects.create(
        kind="make_room",
        title="t",
        model=newcomer,
        created_by=ACTOR,
        state=Operation.State.SUCCEEDED,
        steps=[{"kind": "sleep", "instance_id": victim.pk, "state": "verified"}],
    )
    Operation.objects.filter(pk=operation.pk).update(created_at=timezone.now() - timedelta(seconds=ago_s))


@pytest.fixture
def rivals(gpu: Gpu, readings: Readings) -> tuple[Instance, Model]:
    """``old`` serves, came up 100 s ago in the room of ``new``, which is asked for again."""
    old = _neighbour(gpu, readings, "old", ago_s=100)
    new = _newcomer()
    gone = make_instance(model=new, gpus=[gpu], state=S.STOPPED)
    _turn(new, old, 300)
    _turn(old.model, gone, 110)
    return old, new


def test_models_that_drive_one_another_out_are_seen_slowed_and_told(
    rivals: tuple[Instance, Model], readings: Readings, settings: Any
) -> None:
    """E9."""
    settings.RESIDENCE_S = 60.0
    old, new = rivals
    (pair,) = thrash_pairs()
    assert (pair.turns, pair.residence_s) == (2, 120.0)
    model_demand("new")
    assert _facts(new)["code"] == "waits"
    assert "and stays for 120 s" in _facts(new)["reason"]
    page = client_of("viewer").get("/").content.decode()
    assert "evict one another" in page
    assert "Pin the one that matters" in page
    assert "new is asked for and waits for room" in page
    Instance.objects.filter(pk=old.pk).update(ready_at=timezone.now() - timedelta(seconds=121))
    model_demand("new")
    assert Operation.objects.filter(created_by=ACTOR).count() == 3
    assert AuditEntry.objects.filter(action="demand.thrash").count() == 1
    assert InstanceEvent.objects.filter(instance=old, kind="thrash").exists()


def test_one_way_is_no_thrash(gpu: Gpu, readings: Readings) -> None:
    old = _neighbour(gpu, readings, "old")
    new = _newcomer()
    _turn(new, old, 300)
    _turn(new, old, 100)
    assert thrash_pairs() == []


def test_what_an_operator_did_is_no_thrash(rivals: tuple[Instance, Model]) -> None:
    Operation.objects.update(created_by="anna")
    assert thrash_pairs() == []


def test_old_turns_are_forgotten(rivals: tuple[Instance, Model]) -> None:
    Operation.objects.update(created_at=timezone.now() - timedelta(hours=1))
    assert thrash_pairs() == []


def test_residence_doubles_up_to_a_bound(settings: Any) -> None:
    settings.RESIDENCE_S = 60.0
    assert [residence_s(turns) for turns in (0, 1, 2, 3, 9)] == [60, 60, 120, 240, 600]
    settings.RESIDENCE_S = 3600.0
    assert residence_s(5) == 3600.0
