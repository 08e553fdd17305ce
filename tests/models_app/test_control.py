from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from gpus_app.models import Host
from models_app import dispatch
from models_app.models import IdempotencyRecord, Instance, Model, Operation
from models_app.services.plans import control
from models_app.services.plans.demand import model_demand
from models_app.states import DesiredState, InstanceState
from tests.builders import GIB, make_gpu, make_host, make_instance, make_model

S = InstanceState
pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    messages: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dispatch, "send", lambda name, *args, **_: messages.append((name, *args)))
    return messages


@pytest.fixture
def host() -> Host:
    host = make_host()
    make_gpu(host=host, index=0)
    make_gpu(host=host, index=1)
    return host


def _state(row: Instance) -> str:
    return str(Instance.objects.values_list("state", flat=True).get(pk=row.pk))


def _ago(seconds: float) -> Any:
    return timezone.now() - timedelta(seconds=seconds)


def _silence(host: Host) -> None:
    Host.objects.filter(pk=host.pk).update(worker_seen_at=_ago(60), sampler_seen_at=_ago(60))


# --- hosts -----------------------------------------------------------------------------------------


def test_instances_of_a_silent_host_become_unreachable(host: Host) -> None:
    rows = [make_instance(host=host, state=state) for state in (S.READY, S.SLEEPING, S.DRAINING)]
    away = make_instance(host=host, state=S.STARTING)
    _silence(host)
    control.hosts_check()
    assert {_state(row) for row in rows} == {S.UNREACHABLE}
    assert _state(away) == S.STARTING
    assert "gpu-a has not been heard of" in Instance.objects.get(pk=rows[0].pk).reason


def test_host_whose_sampler_still_speaks_is_reachable(host: Host) -> None:
    row = make_instance(host=host)
    Host.objects.filter(pk=host.pk).update(worker_seen_at=_ago(60))
    control.hosts_check()
    assert _state(row) == S.READY


def test_host_that_speaks_again_is_asked_to_look(host: Host, sent: list[Any]) -> None:
    make_instance(host=host, state=S.UNREACHABLE)
    control.hosts_check()
    assert (dispatch.RECONCILE_HOST, "gpu-a") in sent


def test_scheduled_instance_does_not_wait_for_a_silent_worker(host: Host) -> None:
    row = make_instance(host=host, state=S.SCHEDULED, state_since=_ago(60))
    Host.objects.filter(pk=host.pk).update(worker_seen_at=_ago(60))
    control.hosts_check()
    row.refresh_from_db()
    assert (row.state, row.host, row.gpu_uuids, row.reserved_bytes) == (S.PENDING, None, [], 0)


def test_stop_on_a_silent_worker_says_what_it_waits_for(host: Host) -> None:
    row = make_instance(host=host, state=S.STOPPING, state_since=_ago(60))
    Host.objects.filter(pk=host.pk).update(worker_seen_at=_ago(60))
    control.hosts_check()
    row.refresh_from_db()
    assert (row.state, "worker of host gpu-a" in row.reason) == (S.STOPPING, True)


# --- restarts and replicas -----------------------------------------------------------------------------


def test_due_restart_begins_and_is_counted() -> None:
    row = make_instance(state=S.FAILED, next_restart_at=_ago(1), restart_count=1, first_cause="it fell over")
    control.restarts_due()
    row.refresh_from_db()
    assert (row.state, row.restart_count, row.first_cause) == (S.PENDING, 2, "it fell over")


def test_restart_waits_for_its_time() -> None:
    row = make_instance(state=S.FAILED, next_restart_at=timezone.now() + timedelta(seconds=5))
    control.restarts_due()
    assert _state(row) == S.FAILED


def test_failed_instance_that_is_not_to_be_restarted_stays() -> None:
    row = make_instance(state=S.FAILED)
    control.restarts_due()
    assert _state(row) == S.FAILED


def test_stopped_instance_of_a_deployed_model_that_is_wanted_starts_again() -> None:
    wanted = make_instance(model=make_model(deployed=True), state=S.STOPPED, desired_state=DesiredState.RUNNING)
    unwanted = make_instance(model=make_model(deployed=True), state=S.STOPPED)
    control.restarts_due()
    assert _state(wanted) == S.PENDING
    assert _state(unwanted) == S.STOPPED


def test_missing_replicas_are_made(sent: list[Any], on_commit: Any) -> None:
    model = make_model(deployed=True, replicas=3)
    make_instance(model=model)
    with on_commit():
        control.replicas_check()
    assert sorted(model.instances.values_list("replica_index", "state")) == [
        (0, "ready"),
        (1, "pending"),
        (2, "pending"),
    ]
    assert [name for name, *_ in sent] == [dispatch.PLACE, dispatch.PLACE]


def test_replica_that_is_wanted_again_since_the_look_is_no_surplus() -> None:
    model = make_model(replicas=1, deployed=True)
    seen = make_instance(model=model, replica_index=1)
    Model.objects.filter(pk=model.pk).update(replicas=2)
    control._stop_surplus(seen)
    seen.refresh_from_db()
    assert (seen.state, seen.desired_state) == (S.READY, DesiredState.RUNNING)


def test_surplus_replicas_are_drained_from_the_end() -> None:
    model = make_model(deployed=True, replicas=1)
    rows = [make_instance(model=model, replica_index=index) for index in range(3)]
    control.replicas_check()
    assert [_state(row) for row in rows] == [S.READY, S.DRAINING, S.DRAINING]


def test_model_that_is_not_deployed_is_left_alone() -> None:
    model = make_model(replicas=3)
    control.replicas_check()
    assert not model.instances.exists()


def test_replica_that_an_operator_stopped_is_not_made_again() -> None:
    model = make_model(deployed=True, replicas=2)
    make_instance(model=model)
    make_instance(model=model, replica_index=1, state=S.STOPPED)
    control.replicas_check()
    assert model.instances.count() == 2


def test_successor_of_a_move_is_no_replica() -> None:
    model = make_model(deployed=True)
    old = make_instance(model=model)
    make_instance(model=model, replaces=old, state=S.STARTING)
    control.replicas_check()
    assert model.instances.count() == 2


# --- placing ---------------------------------------------------------------------------------------


def test_pending_instance_is_placed_without_a_message(host: Host, sent: list[Any], on_commit: Any) -> None:
    row = make_instance(host=host, state=S.PENDING)
    with on_commit():
        control.places_check()
    row.refresh_from_db()
    assert row.state == S.SCHEDULED
    assert row.reserved_bytes > 0
    assert len(row.gpu_uuids) == 1
    assert (dispatch.START, row.pk) in sent


def test_more_important_model_gets_the_last_room(host: Host) -> None:
    host.gpus.filter(index=1).delete()
    facts = {"weights_bytes": 50 * GIB}
    rows = []
    for priority in (10, 90):
        model = make_model(facts=facts)
        model.memory_policy.priority = priority
        model.memory_policy.save()
        rows.append(make_instance(model=model, host=host, state=S.PENDING))
    control.places_check()
    assert [_state(row) for row in rows] == [S.PENDING, S.SCHEDULED]
    assert "GiB" in Instance.objects.get(pk=rows[0].pk).reason


def test_pending_instance_that_finds_no_room_fails_visibly_in_the_end(host: Host) -> None:
    row = make_instance(
        model=make_model(facts={"weights_bytes": 500 * GIB}), host=host, state=S.PENDING, state_since=_ago(3600)
    )
    control.places_check()
    row.refresh_from_db()
    assert row.state == S.FAILED
    assert "No place was found" in row.reason
    assert row.next_restart_at is not None, "it is wanted, so it is tried again"


def test_pending_instance_waits_for_a_host_without_a_limit(host: Host) -> None:
    row = make_instance(host=host, state=S.PENDING, state_since=_ago(3600))
    _silence(host)
    control.places_check()
    row.refresh_from_db()
    assert row.state == S.PENDING
    assert "not been heard of" in row.reason


# --- lost messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "name"), [(S.SCHEDULED, dispatch.START), (S.DRAINING, dispatch.STOP), (S.STOPPING, dispatch.STOP)]
)
def test_lost_message_is_sent_again(sent: list[Any], state: InstanceState, name: str) -> None:
    row = make_instance(state=state, state_since=_ago(30))
    fresh = make_instance(state=state)
    control.hints_repeat()
    assert (name, row.pk) in sent
    assert (name, fresh.pk) not in sent


def test_stalled_operation_is_taken_up_again(sent: list[Any]) -> None:
    operation = Operation.objects.create(kind="test", title="x")
    Operation.objects.filter(pk=operation.pk).update(updated_at=_ago(60))
    control.hints_repeat()
    assert (dispatch.OPERATION_STEP, operation.pk) in sent


def test_remembered_answers_are_forgotten_after_a_day() -> None:
    IdempotencyRecord.objects.create(caller="a", key="old", fingerprint="x", at=_ago(2 * 86400))
    IdempotencyRecord.objects.create(caller="a", key="new", fingerprint="x")
    control.prune()
    assert [row.key for row in IdempotencyRecord.objects.all()] == ["new"]


def test_round_with_nothing_to_do_costs_a_fixed_number_of_queries(
    valkey: str, django_assert_max_num_queries: Any
) -> None:
    for number in range(5):
        host = make_host(name=f"h{number}")
        make_instance(model=make_model(deployed=True), host=host, gpus=[make_gpu(host=host)])
    control.reconcile_control()
    with django_assert_max_num_queries(20):
        control.reconcile_control()


# --- on demand ---------------------------------------------------------------------------------------


def test_demand_starts_a_model_that_allows_it(host: Host) -> None:
    model = make_model(on_demand=True)
    model_demand(model.served_model_name)
    assert model.instances.get().state == S.PENDING
    model_demand(model.served_model_name)  # finds it waiting, and places it
    assert model.instances.get().state == S.SCHEDULED


def test_demand_by_an_alias(host: Host) -> None:
    model = make_model(on_demand=True, aliases=["nick"])
    model_demand("nick")
    assert model.instances.exists()


def test_demand_wakes_a_sleeper(host: Host, sent: list[Any], on_commit: Any) -> None:
    row = make_instance(
        model=make_model(on_demand=True), host=host, state=S.SLEEPING, desired_state=DesiredState.SLEEPING
    )
    with on_commit():
        model_demand(row.model.served_model_name)
    row.refresh_from_db()
    assert row.desired_state == DesiredState.RUNNING
    assert (dispatch.WAKE, row.pk) in sent


@pytest.mark.parametrize("state", [S.PENDING, S.SCHEDULED, S.STARTING, S.READY])
def test_demand_waits_for_what_comes_up_already(host: Host, state: InstanceState) -> None:
    row = make_instance(model=make_model(on_demand=True), host=host, state=state)
    model_demand(row.model.served_model_name)
    assert row.model.instances.count() == 1


def test_demand_for_other_models_does_nothing(host: Host) -> None:
    model = make_model()
    model_demand(model.served_model_name)
    model_demand("nobody")
    assert not Instance.objects.exists()


def test_demand_that_does_not_fit_is_quiet(host: Host) -> None:
    model = make_model(on_demand=True, facts={"weights_bytes": 900 * GIB})
    model_demand(model.served_model_name)
    assert not model.instances.exists()
    assert not Model.objects.get(pk=model.pk).deployed
