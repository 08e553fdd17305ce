"""Who launches what, at once and twice: no engine is started here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpus_app.models import Host
from models_app import dispatch
from models_app.errors import BrokerAway, DoesNotFit, InvalidInput
from models_app.models import AuditEntry, Instance, LaunchAttempt, Model
from models_app.services.lifecycle.launch import instance_place, instance_restart, model_launch
from models_app.services.lifecycle.start import _claim, instance_start
from models_app.services.lifecycle.stop import instance_stop
from models_app.states import DesiredState, InstanceState
from tests.builders import GIB, make_instance, make_model
from tests.race import race

S = InstanceState
pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("sent")]


def _state(row: Instance) -> str:
    return str(Instance.objects.values_list("state", flat=True).get(pk=row.pk))


def test_launch_makes_the_wanted_replicas_and_says_so_by_message(host: Host, sent: list[Any], on_commit: Any) -> None:
    model = make_model(replicas=2)
    with on_commit():
        rows = model_launch(model, actor="anna")
    assert [row.state for row in rows] == [S.PENDING, S.PENDING]
    assert [row.replica_index for row in rows] == [0, 1]
    assert [(dispatch.PLACE, row.pk) for row in rows] == sent
    model.refresh_from_db()
    assert model.deployed


def test_asked_number_of_replicas_becomes_the_wish(host: Host) -> None:
    model = make_model()
    assert len(model_launch(model, actor="anna", replicas=3)) == 3
    model.refresh_from_db()
    assert model.replicas == 3


@pytest.mark.parametrize("state", [S.STOPPED, S.FAILED])
def test_ended_replica_is_brought_back_with_its_history(host: Host, state: InstanceState) -> None:
    row = make_instance(host=host, state=state, restart_count=4, first_cause="old")
    (again,) = model_launch(row.model, actor="anna")
    assert again.pk == row.pk
    assert (again.state, again.restart_count, again.first_cause) == (S.PENDING, 0, "")


def test_launch_while_it_is_being_stopped_starts_it_again_after_its_end(host: Host) -> None:
    row = make_instance(host=host, state=S.STOPPING, desired_state=DesiredState.STOPPED)
    (same,) = model_launch(row.model, actor="anna")
    assert (same.pk, same.state, same.desired_state) == (row.pk, S.STOPPING, DesiredState.RUNNING)


def test_launch_elsewhere_than_the_model_says(host: Host) -> None:
    uuids = [gpu.uuid for gpu in host.gpus.all()]
    model = make_model(gpu_uuids=uuids[:1])
    (row,) = model_launch(model, actor="anna", gpu_uuids=uuids[1:])
    instance_place(row.pk)
    row.refresh_from_db()
    assert row.gpu_uuids == uuids[1:]


def test_unknown_host_is_named(host: Host) -> None:
    with pytest.raises(InvalidInput, match="'nowhere'"):
        model_launch(make_model(), actor="anna", host="nowhere")


def test_launch_anyway_is_placed_although_the_memory_is_short(host: Host) -> None:
    model = make_model(facts={"weights_bytes": 100 * GIB})
    with pytest.raises(DoesNotFit):
        model_launch(model, actor="anna")
    (row,) = model_launch(model, actor="anna", anyway=True)
    assert instance_place(row.pk)


def test_launch_with_the_broker_away_writes_nothing(host: Host, settings: Any, valkey: str) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    with pytest.raises(BrokerAway):
        model_launch(make_model(), actor="anna")
    assert not Instance.objects.exists()
    assert not Model.objects.get().deployed
    assert AuditEntry.objects.get(action="model.launch").outcome == "failed"


def test_stop_of_a_running_instance_with_the_broker_away_writes_nothing(host: Host, settings: Any, valkey: str) -> None:
    row = make_instance(host=host)
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    with pytest.raises(BrokerAway):
        instance_stop(row, actor="anna")
    assert _state(row) == S.READY


@pytest.mark.parametrize(
    ("state", "force", "expected"),
    [
        (S.PENDING, False, S.STOPPED),
        (S.SCHEDULED, False, S.STOPPED),
        (S.STARTING, False, S.STOPPING),
        (S.READY, False, S.DRAINING),
        (S.READY, True, S.STOPPING),
        (S.UNREACHABLE, False, S.DRAINING),
        (S.DRAINING, False, S.DRAINING),
        (S.DRAINING, True, S.STOPPING),
        (S.SLEEPING, False, S.STOPPING),
        (S.STOPPING, True, S.STOPPING),
        (S.STOPPED, False, S.STOPPED),
        (S.FAILED, False, S.STOPPED),
    ],
)
def test_first_step_of_a_stop(host: Host, state: InstanceState, force: bool, expected: InstanceState) -> None:
    row = make_instance(host=host, state=state)
    for _ in range(2):
        instance_stop(row, actor="anna", force=force)
    row.refresh_from_db()
    assert (row.state, row.desired_state) == (expected, DesiredState.STOPPED)
    assert row.stop_force == (force and state not in (S.STOPPED, S.FAILED))


def test_last_wanted_replica_stopped_means_that_the_model_is_no_longer_deployed(host: Host) -> None:
    model = make_model(deployed=True, replicas=2)
    rows = [make_instance(model=model, host=host, replica_index=index) for index in range(2)]
    instance_stop(rows[0], actor="anna")
    assert Model.objects.get().deployed
    instance_stop(rows[1], actor="anna")
    assert not Model.objects.get().deployed


def test_restart_of_a_stopped_instance_just_starts_it(host: Host) -> None:
    row = make_instance(host=host, state=S.STOPPED)
    assert instance_restart(row, actor="anna").state == S.PENDING


def test_restart_of_a_running_instance_drains_it_and_keeps_it_wanted(host: Host) -> None:
    row = make_instance(host=host)
    instance_restart(row, actor="anna")
    assert (row.state, row.desired_state) == (S.DRAINING, DesiredState.RUNNING)


# --- at once -----------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_two_clicks_at_once_make_one_instance(host: Host) -> None:
    model = make_model()
    results = race(*[lambda who=who: model_launch(model, actor=who) for who in ("anna", "bert", "carl", "dora")])
    assert Instance.objects.count() == 1
    assert {row.pk for rows in results for row in rows} == {Instance.objects.get().pk}


@pytest.mark.django_db(transaction=True)
def test_placements_at_once_never_sell_the_same_bytes(host: Host) -> None:
    facts = {"weights_bytes": 40 * GIB}
    rows = [make_instance(model=make_model(facts=facts), host=host, state=S.PENDING) for _ in range(4)]
    race(*[lambda pk=row.pk: instance_place(pk) for row in rows])
    placed = Instance.objects.filter(state=S.SCHEDULED)
    assert placed.count() == 2, "one for each card of 80 GiB"
    assert len({tuple(row.gpu_uuids) for row in placed}) == 2
    assert Instance.objects.filter(state=S.PENDING).count() == 2


@pytest.mark.django_db(transaction=True)
def test_of_starts_claimed_at_once_on_one_card_one_goes_first(host: Host) -> None:
    card = host.gpus.all()[0]
    rows = [make_instance(host=host, gpus=[card], state=S.SCHEDULED) for _ in range(3)]
    claims = race(*[lambda row=row: _claim(row) for row in rows])
    assert sum(claim is not None for claim in claims) == 1
    assert sorted(Instance.objects.values_list("state", flat=True)) == ["scheduled", "scheduled", "starting"]


@pytest.mark.django_db(transaction=True)
def test_of_two_workers_that_claim_one_start_one_gets_it(host: Host) -> None:
    row = make_instance(host=host, state=S.SCHEDULED)
    claims = race(*[lambda: _claim(Instance.objects.select_related("model", "host").get(pk=row.pk))] * 3)
    assert sum(claim is not None for claim in claims) == 1
    assert row.attempts.count() == 1


@pytest.mark.django_db(transaction=True)
def test_starts_at_once_get_ports_of_their_own(host: Host) -> None:
    gpus = list(host.gpus.all())
    rows = [make_instance(host=host, gpus=[gpu], state=S.SCHEDULED) for gpu in gpus]
    race(*[lambda row=row: _claim(row) for row in rows])
    ports = set(Instance.objects.values_list("port", flat=True))
    assert len(ports) == 2
    assert None not in ports


@pytest.mark.django_db(transaction=True)
def test_launch_and_stop_at_once_end_in_one_clear_state(host: Host) -> None:
    row = make_instance(host=host, state=S.STOPPED)
    race(lambda: model_launch(row.model, actor="anna"), lambda: instance_stop(row, actor="bert"))
    row.refresh_from_db()
    wanted = row.desired_state == DesiredState.RUNNING
    assert row.state == (S.PENDING if wanted else S.STOPPED)
    assert Model.objects.get().deployed == wanted


def test_start_in_the_folder_of_one_that_the_database_forgot_fails_visibly(
    host: Host, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.SARDEENZ_RUN_DIR = tmp_path / "runs"
    row = make_instance(state=S.SCHEDULED, host=host, gpus=[host.gpus.all()[0]])
    folder = tmp_path / "forgotten"
    folder.mkdir()
    (folder / "status.json").write_text(json.dumps({"guardian_pid": 1, "guardian_start_ticks": 1, "started_at": 1.0}))
    (folder / "attempt.json").write_text(json.dumps({"instance_id": row.pk, "port": 1}))

    def claim(row: Instance) -> LaunchAttempt:
        attempt = _claim(row)
        assert attempt is not None
        attempt.run_dir = str(folder)
        attempt.save(update_fields=["run_dir"])
        return attempt

    monkeypatch.setattr("models_app.services.lifecycle.start._claim", claim)
    assert not instance_start(row.pk)
    row.refresh_from_db()
    assert row.state == S.FAILED
    assert "the database knows nothing of" in row.reason
    assert row.next_restart_at is not None
