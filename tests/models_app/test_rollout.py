"""Move and edit without downtime, one look at a time: whatever happens at whatever moment, one of the two serves on."""

from __future__ import annotations

from typing import Any

import pytest

from gpus_app.models import Gpu, Host
from models_app import broker, transitions
from models_app.errors import BrokerAway, Conflict, DoesNotFit
from models_app.models import Instance, Operation
from models_app.services.lifecycle.launch import instance_place, instance_restart, model_launch
from models_app.services.lifecycle.stop import instance_stop
from models_app.services.plans import rollout
from models_app.services.plans.control import reconcile_control, restarts_due
from models_app.services.plans.operations import operation_cancel, operation_step
from models_app.services.plans.rollout import instance_move, model_roll, successors_check
from models_app.states import TERMINAL, DesiredState, InstanceState
from tests.builders import GIB, make_gpu, make_host, make_instance, make_model

S = InstanceState
pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("sent")]


@pytest.fixture
def old(host: Host) -> Instance:
    """A ready instance on the first of two cards."""
    model = make_model(deployed=True, enable_sleep_mode=True)
    return make_instance(model=model, gpus=[host.gpus.all()[0]])


def _second(host: Host) -> Gpu:
    return host.gpus.all()[1]


def _now(row: Instance) -> Instance:
    return Instance.objects.select_related("model", "host").get(pk=row.pk)


def _new(old: Instance) -> Instance:
    return Instance.objects.exclude(pk=old.pk).select_related("model", "host").latest("pk")


def _set(row: Instance, state: InstanceState, **fields: Any) -> None:
    """What workers and engines would have brought it to."""
    if row.host is None and state not in TERMINAL:
        fields.setdefault("host", Host.objects.get(name="testhost"))
    Instance.objects.filter(pk=row.pk).update(state=state, **fields)


def _look(operation: Operation, times: int = 1) -> Operation:
    for _ in range(times):
        operation_step(operation.pk)
    operation.refresh_from_db()
    return operation


def _move(old: Instance, host: Host) -> Operation:
    return instance_move(old, actor="anna", gpu_uuids=[_second(host).uuid])


def _until_draining(old: Instance, host: Host) -> Operation:
    operation = _look(_move(old, host))
    _set(_new(old), S.READY)
    return _look(operation, 2)


# --- the way it should go ----------------------------------------------------------------------------


def test_move_ends_the_old_one_only_when_the_new_one_is_ready(old: Instance, host: Host) -> None:
    operation = _look(_move(old, host))
    new = _new(old)
    instance_place(new.pk)
    assert (_now(new).state, _now(new).gpu_uuids) == (S.SCHEDULED, [_second(host).uuid])
    _look(operation, 3)
    assert _now(old).state == S.READY
    _set(new, S.READY)
    _look(operation, 2)
    assert (_now(old).state, _now(old).desired_state) == (S.DRAINING, DesiredState.STOPPED)
    _look(operation)
    assert operation.is_open
    _set(old, S.STOPPED)
    _look(operation)
    assert operation.steps[0]["state"] == "done"
    assert _look(operation).state == "succeeded"
    assert _now(new).replaces is None
    assert _now(new).model.deployed


def test_stopping_the_old_one_again_leaves_the_model_to_its_successor(old: Instance, valkey: str) -> None:
    """A plan that wants its room, or a second click, comes while it ends already."""
    successor = make_instance(model=old.model, gpus=[_second(old.host)], replaces=old)  # type: ignore[arg-type]
    Instance.objects.filter(pk=old.pk).update(state=S.STOPPING, desired_state=DesiredState.STOPPED)
    instance_stop(_now(old), actor="room")
    assert _now(successor).model.deployed
    instance_stop(_now(successor), actor="anna")
    assert not _now(successor).model.deployed


def test_stopping_the_old_one_by_hand_before_the_change_stops_the_model(old: Instance, valkey: str) -> None:
    make_instance(model=old.model, gpus=[_second(old.host)], replaces=old, state=S.STARTING)  # type: ignore[arg-type]
    instance_stop(_now(old), actor="anna")
    assert not _now(old).model.deployed


def test_successor_has_the_models_whole_configuration(old: Instance, host: Host) -> None:
    """SZ-061: the engine is started from the same row as the old one, extra arguments and all."""
    _look(_move(old, host))
    new = _new(old)
    assert (new.model_id, new.replica_index, new.placement_wish["gpu_uuids"]) == (
        old.model_id,
        old.replica_index,
        [_second(host).uuid],
    )


def test_limit_set_by_hand_goes_along(old: Instance, host: Host) -> None:
    Instance.objects.filter(pk=old.pk).update(
        limit_bytes=3 * GIB, limit_automatic=False, limit_set_by="bert", limit_reclaim="preempt"
    )
    _look(_move(old, host))
    new = _new(old)
    assert (new.limit_bytes, new.limit_automatic, new.limit_set_by, new.limit_reclaim, new.limit_revision) == (
        3 * GIB,
        False,
        "bert",
        "preempt",
        1,
    )


def test_automatic_limit_is_shared_out_anew(old: Instance, host: Host) -> None:
    Instance.objects.filter(pk=old.pk).update(limit_bytes=3 * GIB, limit_revision=7)
    _look(_move(old, host))
    assert (_new(old).limit_bytes, _new(old).limit_automatic, _new(old).limit_revision) == (None, True, 0)


def test_sleeper_stays_a_sleeper(old: Instance, host: Host) -> None:
    """SZ-059"""
    _set(old, S.SLEEPING, desired_state=DesiredState.SLEEPING, sleep_level=1)
    operation = _look(_move(old, host))
    new = _new(old)
    _set(new, S.READY)
    _look(operation)
    assert (_now(new).state, _now(new).desired_state) == (S.DRAINING, DesiredState.SLEEPING)
    assert _now(old).state == S.SLEEPING
    _set(new, S.SLEEPING)
    _look(operation, 2)
    assert _now(old).state == S.STOPPING
    _set(old, S.STOPPED)
    _look(operation, 2)
    assert (operation.state, _now(new).desired_state) == ("succeeded", DesiredState.SLEEPING)


def test_sleeper_that_was_woken_meanwhile_is_awake_afterwards(old: Instance, host: Host) -> None:
    _set(old, S.SLEEPING, desired_state=DesiredState.SLEEPING)
    operation = _look(_move(old, host))
    _set(old, S.READY, desired_state=DesiredState.RUNNING)
    _set(_new(old), S.READY)
    _look(operation, 2)
    assert (_now(_new(old)).state, _now(old).state) == (S.READY, S.DRAINING)


def test_roll_renews_one_replica_after_the_other(host: Host) -> None:
    model = make_model(deployed=True, replicas=2, spec_revision=2)
    rows = [make_instance(model=model, replica_index=index, spec_revision=1) for index in range(2)]
    operation = _look(model_roll(model, actor="anna"))
    assert Instance.objects.count() == 3
    _set(_new(rows[0]), S.READY)
    _look(operation, 2)
    _set(rows[0], S.STOPPED)
    _look(operation, 2)
    assert Instance.objects.exclude(replaces=None).get().replaces_id == rows[1].pk
    assert operation.progress == 0.5


def test_roll_keeps_where_the_launch_wanted_it(old: Instance, host: Host) -> None:
    wish = {"host": host.name, "gpu_uuids": [host.gpus.all()[0].uuid], "anyway": False}
    old.model.__class__.objects.filter(pk=old.model_id).update(spec_revision=2)
    Instance.objects.filter(pk=old.pk).update(placement_wish=wish)
    _look(model_roll(_now(old).model, actor="anna"))
    assert _new(old).placement_wish == wish


def test_nothing_to_roll_is_said(old: Instance) -> None:
    with pytest.raises(Conflict, match="has its saved options"):
        model_roll(old.model, actor="anna")


def test_model_bound_to_gpus_can_be_moved_to_another_host(old: Instance, host: Host) -> None:
    other = make_host(name="gpu-b")
    make_gpu(host=other)
    old.model.__class__.objects.filter(pk=old.model_id).update(gpu_uuids=old.gpu_uuids)
    _look(instance_move(_now(old), actor="anna", host="gpu-b"))
    instance_place(_new(old).pk)
    assert _now(_new(old)).gpu_uuids == ["GPU-gpu-b-0"]


# --- refused before anything is started ----------------------------------------------------------------


def test_second_operation_on_the_same_model_is_refused(old: Instance, host: Host) -> None:
    _move(old, host)
    with pytest.raises(Conflict, match="wait for it, or cancel it"):
        _move(old, host)


@pytest.mark.parametrize("state", [S.STARTING, S.DRAINING, S.STOPPED, S.FAILED])
def test_what_neither_serves_nor_sleeps_is_not_moved(old: Instance, host: Host, state: InstanceState) -> None:
    _set(old, state)
    with pytest.raises(Conflict, match=f"is {state}"):
        _move(_now(old), host)


def test_move_to_where_it_is_already_is_refused(old: Instance, host: Host) -> None:
    with pytest.raises(Conflict, match="on those GPUs already"):
        instance_move(old, actor="anna", gpu_uuids=old.gpu_uuids)
    with pytest.raises(Conflict, match="say which of its GPUs"):
        instance_move(old, actor="anna", host=host.name)
    with pytest.raises(Conflict, match="Say where to"):
        instance_move(old, actor="anna")


def test_move_to_a_full_card_is_refused_with_the_way_out(old: Instance, host: Host) -> None:
    """SZ-062, SZ-071: judged before the load, also on another host."""
    other = make_host(name="gpu-b")
    full = make_gpu(host=other)
    make_instance(gpus=[full], reserved_bytes=79 * GIB)
    with pytest.raises(DoesNotFit, match="side by side: stop it and start it there"):
        instance_move(old, actor="anna", host="gpu-b")
    assert not Operation.objects.exists()


def test_overlapping_cards_are_judged_with_both_copies_in_place(host: Host) -> None:
    """SZ-067: from GPUs 0 and 1 to 1 and 2, where what it holds on 1 leaves no room for a second copy."""
    third = make_gpu(host=host, index=2)
    first, second = host.gpus.all()[:2]
    model = make_model(deployed=True, tensor_parallel_size=2)
    row = make_instance(model=model, gpus=[first, second], reserved_bytes=79 * GIB)
    with pytest.raises(DoesNotFit, match="side by side"):
        instance_move(row, actor="anna", gpu_uuids=[second.uuid, third.uuid])


def test_broker_that_is_away_refuses_before_anything_is_written(
    old: Instance, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> None:
        raise BrokerAway("away")

    monkeypatch.setattr(broker, "require", away)
    with pytest.raises(BrokerAway):
        _move(old, host)
    assert not Operation.objects.exists()


# --- what fails --------------------------------------------------------------------------------------


def test_target_that_fails_leaves_the_source_untouched(old: Instance, host: Host) -> None:
    """SZ-068"""
    before = _now(old).state_version
    operation = _look(_move(old, host))
    _set(_new(old), S.FAILED, reason="Out of memory at load.", next_restart_at="2026-01-01T00:00:00Z")
    _look(operation)
    assert operation.state == "failed"
    assert "Out of memory at load." in operation.message
    assert (_now(old).state, _now(old).is_routable, _now(old).state_version) == (S.READY, True, before)
    assert (_new(old).state, _new(old).desired_state, _new(old).next_restart_at) == (S.STOPPED, "stopped", None)
    restarts_due()
    assert _new(old).state == S.STOPPED


def test_target_that_dies_while_the_source_drains_gives_the_source_back(old: Instance, host: Host) -> None:
    operation = _until_draining(old, host)
    _set(_new(old), S.FAILED, reason="Killed.")
    _look(operation)
    assert (operation.state, _now(old).state, _now(old).desired_state) == ("failed", S.READY, DesiredState.RUNNING)


def test_target_that_dies_after_the_source_has_gone_comes_back_by_its_policy(old: Instance, host: Host) -> None:
    operation = _until_draining(old, host)
    new = _new(old)
    _set(old, S.STOPPED)
    _set(new, S.FAILED, next_restart_at="2026-01-01T00:00:00Z")
    _look(operation, 2)
    assert operation.state == "succeeded"
    restarts_due()
    assert (_now(new).state, _now(old).state) == (S.PENDING, S.STOPPED)


def test_source_that_dies_meanwhile_is_not_restarted_beside_the_target(old: Instance, host: Host) -> None:
    operation = _look(_move(old, host))
    _set(old, S.FAILED, next_restart_at="2026-01-01T00:00:00Z")
    new = _new(old)
    _set(new, S.READY)
    _look(operation, 4)
    restarts_due()
    assert (operation.state, _now(old).state, _now(new).replaces) == ("succeeded", S.STOPPED, None)


def test_source_that_was_stopped_by_hand_takes_the_target_along(old: Instance, host: Host) -> None:
    operation = _look(_move(old, host))
    instance_stop(_now(old), actor="bert")
    _look(operation)
    assert (operation.state, _new(old).desired_state) == ("failed", DesiredState.STOPPED)
    assert "stopped meanwhile" in operation.message


def test_broker_away_while_the_target_goes_to_sleep_is_waited_for(
    old: Instance, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set(old, S.SLEEPING, desired_state=DesiredState.SLEEPING)
    operation = _look(_move(old, host))
    _set(_new(old), S.READY)

    def away(*_: Any, **__: Any) -> None:
        raise BrokerAway("away")

    with monkeypatch.context() as patch:
        patch.setattr(rollout, "instance_sleep", away)
        assert _look(operation).is_open
    _look(operation)
    assert _new(old).desired_state == DesiredState.SLEEPING


# --- cancelled ----------------------------------------------------------------------------------------


def _cancel(operation: Operation) -> Operation:
    operation_cancel(operation, actor="bert")
    return _look(operation)


@pytest.mark.parametrize("state", [S.PENDING, S.SCHEDULED, S.STARTING, S.READY])
def test_cancelled_before_the_take_over_the_source_serves_on(old: Instance, host: Host, state: InstanceState) -> None:
    operation = _look(_move(old, host))
    _set(_new(old), state, host=host)
    _cancel(operation)
    assert (operation.state, _now(old).state) == ("cancelled", S.READY)
    assert _new(old).desired_state == DesiredState.STOPPED
    assert _now(old).model.deployed


def test_cancelled_before_it_began(old: Instance, host: Host) -> None:
    operation = _cancel(_move(old, host))
    assert (operation.state, Instance.objects.count()) == ("cancelled", 1)


def test_cancelled_while_draining_the_source_keeps_serving(old: Instance, host: Host) -> None:
    """SZ-063"""
    operation = _until_draining(old, host)
    _cancel(operation)
    assert (operation.state, _now(old).state, _now(old).desired_state) == ("cancelled", S.READY, DesiredState.RUNNING)
    assert (_new(old).state, _new(old).desired_state) == (S.DRAINING, DesiredState.STOPPED)
    assert not operation_step(operation.pk)
    assert _now(old).state == S.READY


@pytest.mark.parametrize("state", [S.STOPPING, S.STOPPED])
def test_cancelled_too_late_the_target_serves(old: Instance, host: Host, state: InstanceState) -> None:
    operation = _until_draining(old, host)
    _set(old, state)
    _cancel(operation)
    assert _new(old).desired_state == DesiredState.RUNNING
    _set(old, S.STOPPED)
    _look(operation, 2)
    assert (operation.state, _new(old).state, _new(old).replaces) == ("succeeded", S.READY, None)
    assert "Too late to cancel" in operation.message


def test_cancelled_after_the_source_died_keeps_the_target(old: Instance, host: Host) -> None:
    operation = _look(_move(old, host))
    _set(old, S.FAILED)
    _cancel(operation)
    assert _new(old).desired_state == DesiredState.RUNNING
    _set(_new(old), S.READY)
    _look(operation, 4)
    assert (operation.state, _new(old).state) == ("succeeded", S.READY)


# --- killed in the middle --------------------------------------------------------------------------------


def _forgotten(operation: Operation, steps: list[dict[str, Any]]) -> None:
    """The worker was killed between what it did and what it would have written down."""
    Operation.objects.filter(pk=operation.pk).update(steps=steps, state="running", ended_at=None)


def test_every_look_may_be_the_second_one(old: Instance, host: Host) -> None:
    operation = _move(old, host)
    for state in (None, S.READY, None, None, None, None):
        if state and _new(old).pk != old.pk:
            _set(_new(old), state)
        before = Operation.objects.get(pk=operation.pk).steps
        _look(operation)
        _forgotten(operation, before)
        _look(operation)
        serving = Instance.objects.filter(state__in=[S.READY, S.DRAINING])
        assert serving.exists()
        assert Instance.objects.count() <= 2
        if _now(old).state == S.DRAINING:
            _set(old, S.STOPPED)
    assert (operation.state, _now(old).state, _new(old).state) == ("succeeded", S.STOPPED, S.READY)


def test_every_look_at_a_sleeper_may_be_the_second_one(old: Instance, host: Host) -> None:
    _set(old, S.SLEEPING, desired_state=DesiredState.SLEEPING)
    operation = _move(old, host)
    for _ in range(8):
        before = Operation.objects.get(pk=operation.pk).steps
        _look(operation)
        if not operation.is_open:
            break
        _forgotten(operation, before)
        _look(operation)
        new = _new(old)
        _set(new, {S.PENDING: S.READY, S.DRAINING: S.SLEEPING}.get(S(new.state), S(new.state)))
        if _now(old).state == S.STOPPING:
            _set(old, S.STOPPED)
    assert (operation.state, _new(old).state, _now(old).state) == ("succeeded", S.SLEEPING, S.STOPPED)


def test_cancel_finds_a_target_whose_maker_was_killed(old: Instance, host: Host) -> None:
    operation = _move(old, host)
    before = operation.steps
    _look(operation)
    _forgotten(operation, before)
    _cancel(operation)
    assert (_new(old).state, _new(old).desired_state) == (S.STOPPED, DesiredState.STOPPED)


def test_cancel_that_was_repeated_changes_nothing_more(old: Instance, host: Host) -> None:
    operation = _until_draining(old, host)
    before = operation.steps
    _cancel(operation)
    _forgotten(operation, before)
    _look(operation)
    assert (operation.state, _now(old).state) == ("cancelled", S.READY)


# --- what an operation left behind, and others' acts meanwhile ------------------------------------------------


def test_target_without_an_operation_goes_while_the_source_serves(old: Instance, host: Host) -> None:
    operation = _look(_move(old, host))
    Operation.objects.filter(pk=operation.pk).update(state="failed")
    successors_check()
    assert (_new(old).state, _now(old).state) == (S.STOPPED, S.READY)
    assert _new(old).desired_state == DesiredState.STOPPED


def test_target_without_an_operation_stands_alone_once_the_source_is_gone(old: Instance, host: Host) -> None:
    operation = _until_draining(old, host)
    Operation.objects.filter(pk=operation.pk).update(state="failed")
    successors_check()
    assert _new(old).replaces is not None
    _set(old, S.STOPPED)
    successors_check()
    assert (_new(old).state, _new(old).replaces) == (S.READY, None)


def test_target_under_way_is_left_to_its_operation(old: Instance, host: Host) -> None:
    _look(_move(old, host))
    successors_check()
    assert _new(old).desired_state == DesiredState.RUNNING


def test_launch_during_the_take_over_makes_no_third_one(old: Instance, host: Host) -> None:
    _until_draining(old, host)
    assert [row.pk for row in model_launch(old.model, actor="bert")] == [_new(old).pk]
    _set(old, S.STOPPED)
    assert [row.pk for row in model_launch(old.model, actor="bert")] == [_new(old).pk]
    reconcile_control()
    assert (_now(old).state, Instance.objects.count()) == (S.STOPPED, 2)


def test_restart_of_what_is_being_replaced_is_refused(old: Instance, host: Host) -> None:
    _look(_move(old, host))
    with pytest.raises(Conflict, match="is taking over"):
        instance_restart(_now(old), actor="bert")


def test_events_of_both_tell_of_the_move(old: Instance, host: Host) -> None:
    operation = _until_draining(old, host)
    transitions.move(old.pk, S.STOPPING, expected=S.DRAINING, reason="No request in flight.")
    _set(old, S.STOPPED)
    _look(operation)
    assert old.events.filter(kind="move").get().reason == f"Instance {_new(old).pk} takes over."
    assert _new(old).events.filter(kind="move").count() == 2
