"""From launch to gone, over real simulated engines under real guardians; only Celery is left out."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.utils import timezone

from gpus_app.models import Host
from models_app import dispatch
from models_app.engines import process
from models_app.errors import Conflict, DoesNotFit, InvalidInput
from models_app.models import AuditEntry, Instance, InstanceEvent, Model
from models_app.services.lifecycle.launch import instance_restart, model_launch
from models_app.services.lifecycle.sleep import instance_sleep, instance_wake
from models_app.services.lifecycle.stop import instance_stop, stop_all
from models_app.services.memory.kvcache import kvcache_limit_set
from models_app.services.models import model_create
from models_app.services.plans.control import reconcile_control
from models_app.services.plans.reconcile import reconcile_host
from models_app.states import DesiredState, InstanceState
from tests.builders import GIB, make_model
from tests.models_app.pump import Pump, kill

S = InstanceState
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]


def _state(row: Instance) -> str:
    return str(Instance.objects.values_list("state", flat=True).get(pk=row.pk))


def _model(**fields: Any) -> Model:
    given: dict[str, Any] = {"served_model_name": "a", "source": "catalogue", "model": "Qwen/Qwen3-0.6B"}
    return model_create(actor="anna", **(given | fields))


def _ready(pump: Pump, **fields: Any) -> Instance:
    (row,) = model_launch(_model(**fields), actor="anna")
    pump.run(lambda: _state(row) == S.READY)
    row.refresh_from_db()
    return row


def _engine_pid(row: Instance) -> int:
    assert row.attempt is not None
    status = process.read_status(Path(row.attempt.run_dir))
    assert status is not None
    assert status.engine_pid is not None
    return status.engine_pid


def test_launch_becomes_ready_and_answers(fleet: Host, pump: Pump) -> None:
    row = _ready(pump)
    assert row.host == fleet
    assert row.capacity_bytes
    assert row.provider == "addon"
    assert row.attempt is not None
    assert row.attempt.engine_pid == _engine_pid(row)
    answer = httpx.post(
        f"{row.base_url}/v1/chat/completions",
        headers={"Authorization": f"Bearer {row.engine_token}"},
        json={"model": "a", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4},
    )
    assert answer.status_code == 200
    assert httpx.get(f"{row.base_url}/v1/models").status_code == 401


def test_stages_are_told_in_their_order_and_on_record(fleet: Host, pump: Pump) -> None:
    row = _ready(pump)
    steps = list(row.events.filter(kind="state").order_by("pk").values_list("to_state", flat=True))
    assert steps == ["scheduled", "starting", "ready"]


def test_start_is_on_record_with_who_and_how_long(fleet: Host, pump: Pump) -> None:
    _ready(pump)
    entry = AuditEntry.objects.get(action="instance.start")
    assert (entry.actor, entry.outcome) == ("anna", "ok")
    assert entry.detail.startswith("Ready after")


def test_launching_again_returns_the_same_instance(fleet: Host, pump: Pump) -> None:
    row = _ready(pump)
    assert [one.pk for one in model_launch(row.model, actor="bert")] == [row.pk]


def test_limit_on_an_idle_engine_is_applied_at_once(fleet: Host, pump: Pump) -> None:
    row = _ready(pump)
    kvcache_limit_set(row, size="3G", actor="anna", wait_s=0)
    pump.run(lambda: Instance.objects.get(pk=row.pk).limit_acked_revision == 1)
    row.refresh_from_db()
    assert row.limit_status == "applied"
    assert row.bundle_bytes
    assert 3 * GIB - row.bundle_bytes < (row.effective_limit_bytes or 0) <= 3 * GIB


def test_limit_wished_before_the_start_is_in_force_from_the_first_request(fleet: Host, pump: Pump) -> None:
    row = _ready(pump, initial_limit_bytes="2G")
    assert (row.effective_limit_bytes or 0) <= 2 * GIB
    pump.run(lambda: Instance.objects.get(pk=row.pk).limit_status == "applied")


def test_stop_leaves_no_process_segment_or_folder(fleet: Host, pump: Pump) -> None:
    row = _ready(pump)
    pid = _engine_pid(row)
    instance_stop(row, actor="anna")
    assert _state(row) == S.DRAINING
    pump.run(lambda: _state(row) == S.STOPPED)
    row.refresh_from_db()
    assert row.attempt is not None
    assert row.attempt.ended_at is not None
    assert row.attempt.exit_code == 0
    assert not Path(f"/proc/{pid}").exists()
    assert not (Path("/dev/shm") / row.ipc_name).exists()
    assert not row.model.__class__.objects.get(pk=row.model_id).deployed


def test_stop_during_the_start(fleet: Host, pump: Pump, settings: Any) -> None:
    settings.SARDEENZ_SIM_SPEED = 1.0
    (row,) = model_launch(_model(), actor="anna")
    pump.run(lambda: _state(row) == S.STARTING)
    pump.settle(1.0)
    instance_stop(row, actor="anna")
    pump.run(lambda: _state(row) == S.STOPPED, limit_s=60)


def test_stop_between_claim_and_engine(fleet: Host, pump: Pump, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = process.launch

    def slow(*args: Any, **options: Any) -> Any:
        instance_stop(Instance.objects.get(), actor="bert")
        return launch(*args, **options)

    monkeypatch.setattr(process, "launch", slow)
    (row,) = model_launch(_model(), actor="anna")
    pump.run(lambda: _state(row) == S.STOPPED)


def test_cancelled_before_it_was_placed(fleet: Host, pump: Pump) -> None:
    pump.lose.add(dispatch.PLACE)
    (row,) = model_launch(_model(), actor="anna")
    instance_stop(row, actor="anna")
    assert _state(row) == S.STOPPED
    assert not InstanceEvent.objects.filter(to_state="starting").exists()


def test_stop_that_is_ignored_ends_in_a_kill(fleet: Host, pump: Pump, settings: Any) -> None:
    settings.SARDEENZ_SIM_FAULTS = "ignore_sigterm"
    settings.STOP_LIMIT_S = 1.0
    row = _ready(pump)
    instance_stop(row, actor="anna")
    pump.run(lambda: _state(row) == S.STOPPED)
    row.refresh_from_db()
    assert row.attempt is not None
    assert row.attempt.signal == signal.SIGKILL


def test_restart_runs_the_saved_options(fleet: Host, pump: Pump) -> None:
    row = _ready(pump)
    Model.objects.update(max_model_len=4096, spec_revision=2)
    instance_restart(row, actor="anna")
    pump.run(lambda: Instance.objects.get(pk=row.pk).spec_revision == 2 and _state(row) == S.READY)
    row.refresh_from_db()
    assert row.attempt is not None
    assert row.attempt.number == 2
    assert "4096" in row.attempt.argv


def test_killed_engine_fails_with_a_cause_and_comes_back(fleet: Host, pump: Pump, settings: Any) -> None:
    settings.RESTART_BACKOFF_S = 0.1
    row = _ready(pump)
    kill(_engine_pid(row))
    pump.send(dispatch.PROBE, row.pk, queue="")
    pump.run(lambda: Instance.objects.get(pk=row.pk).first_cause != "")
    row.refresh_from_db()
    assert row.first_cause
    pump.run(lambda: reconcile_control() or _state(row) == S.READY)
    row.refresh_from_db()
    assert row.restart_count == 1
    assert row.attempt is not None
    assert row.attempt.number == 2


def test_crash_at_load_is_failed_with_the_logs_own_reason(fleet: Host, pump: Pump, settings: Any) -> None:
    settings.SARDEENZ_SIM_FAULTS = "oom_at_load"
    (row,) = model_launch(_model(), actor="anna")
    pump.run(lambda: _state(row) == S.FAILED)
    row.refresh_from_db()
    assert row.attempt is not None
    assert "memory" in row.reason.lower()
    assert row.next_restart_at is None, "lack of memory at load is not tried again blindly"
    assert AuditEntry.objects.get(action="instance.start").outcome == "failed"


def test_starts_on_one_card_are_one_after_the_other(fleet: Host, pump: Pump, settings: Any) -> None:
    settings.SARDEENZ_SIM_SPEED = 5.0
    card = fleet.gpus.all()[0].uuid
    first, second = (
        model_launch(_model(served_model_name=name, gpu_uuids=[card]), actor="anna")[0] for name in ("a", "b")
    )
    pump.run(lambda: _state(first) == S.STARTING and Instance.objects.get(pk=second.pk).reason.startswith("Waits"))
    assert _state(second) == S.SCHEDULED
    pump.run(lambda: _state(first) == _state(second) == S.READY)
    second.refresh_from_db()
    assert second.attempt is not None
    first.refresh_from_db()
    assert second.attempt.started_at >= (first.ready_at or timezone.now())


def test_starts_on_two_cards_run_at_the_same_time(fleet: Host, pump: Pump, settings: Any) -> None:
    settings.SARDEENZ_SIM_SPEED = 2.0
    rows = [model_launch(_model(served_model_name=name), actor="anna")[0] for name in ("a", "b")]
    pump.run(lambda: all(_state(row) == S.STARTING for row in rows))


def test_sleep_and_wake(fleet: Host, pump: Pump) -> None:
    row = _ready(pump, enable_sleep_mode=True)
    instance_sleep(row, actor="anna")
    pump.run(lambda: _state(row) == S.SLEEPING)
    row.refresh_from_db()
    assert row.sleep_level == 1
    instance_sleep(row, actor="anna")
    instance_wake(row, actor="anna")
    pump.run(lambda: _state(row) == S.READY)
    row.refresh_from_db()
    assert (row.sleep_level, row.desired_state) == (None, DesiredState.RUNNING)


def test_sleep_without_sleep_mode_is_refused(fleet: Host, pump: Pump) -> None:
    row = _ready(pump)
    with pytest.raises(Conflict, match="sleep mode"):
        instance_sleep(row, actor="anna")


def test_stop_all_ends_everything(fleet: Host, pump: Pump) -> None:
    rows = [model_launch(_model(served_model_name=name), actor="anna")[0] for name in ("a", "b")]
    pump.run(lambda: all(_state(row) == S.READY for row in rows))
    assert len(stop_all(actor="anna")) == 2
    pump.run(lambda: all(_state(row) == S.STOPPED for row in rows))


# --- what gets lost ----------------------------------------------------------------------------------


def test_every_message_lost_and_it_still_becomes_ready(fleet: Host, pump: Pump) -> None:
    (row,) = model_launch(_model(), actor="anna")

    def look() -> bool:
        pump.drop()
        reconcile_control()
        reconcile_host(fleet.name)
        pump.settle(0.1)
        return _state(row) == S.READY

    pump.run(look)


def test_worker_that_died_between_claim_and_start(fleet: Host, pump: Pump, monkeypatch: pytest.MonkeyPatch) -> None:
    class Died(BaseException):
        pass

    def die(*_: Any, **__: Any) -> None:
        raise Died

    with monkeypatch.context() as patch:
        patch.setattr(process, "launch", die)
        (row,) = model_launch(_model(), actor="anna")
        with pytest.raises(Died):
            pump.run(lambda: False)
    assert _state(row) == S.STARTING
    Instance.objects.get(pk=row.pk).attempts.update(started_at=timezone.now() - timedelta(minutes=1))
    pump.drop()
    reconcile_host(fleet.name)
    assert _state(row) == S.FAILED
    assert "No engine came up" in Instance.objects.get(pk=row.pk).reason


def test_engine_found_running_after_the_worker_was_killed_is_adopted(fleet: Host, pump: Pump) -> None:
    row = _ready(pump)
    row.attempts.update(guardian_pid=None, engine_pid=None)
    reconcile_host(fleet.name)
    row.refresh_from_db()
    assert _state(row) == S.READY
    assert row.attempt is not None
    assert row.attempt.engine_pid == _engine_pid(row)
    assert row.events.filter(kind="adopt").exists()


def test_row_that_says_running_over_a_dead_engine_is_put_right(fleet: Host, pump: Pump) -> None:
    row = _ready(pump)
    os.kill(_engine_pid(row), signal.SIGKILL)
    pump.run(lambda: reconcile_host(fleet.name) or _state(row) == S.FAILED)


def test_orphaned_engine_core_is_ended_after_a_failure(fleet: Host, pump: Pump, settings: Any) -> None:
    settings.SARDEENZ_SIM_FAULTS = "orphan"
    row = _ready(pump)
    assert row.attempt is not None
    folder = Path(row.attempt.run_dir)
    os.kill(_engine_pid(row), signal.SIGKILL)
    pump.run(lambda: reconcile_host(fleet.name) or _state(row) == S.FAILED)
    pump.run(lambda: reconcile_host(fleet.name) or not process.members(folder))


# --- refused before anything starts ------------------------------------------------------------------


def test_cap_on_instances_names_the_cap_and_failed_ones_do_not_count(fleet: Host, pump: Pump, settings: Any) -> None:
    settings.SARDEENZ_MAX_INSTANCES = 2
    models = [_model(served_model_name=name) for name in "abc"]
    failed = model_launch(models[0], actor="anna")[0]
    Instance.objects.filter(pk=failed.pk).update(state=S.FAILED)
    for model in models[1:]:
        model_launch(model, actor="anna")
    with pytest.raises(Conflict, match="At most 2 instances"):
        model_launch(models[0], actor="anna")


def test_launch_that_does_not_fit_is_refused_with_numbers_and_writes_nothing(fleet: Host, pump: Pump) -> None:
    model = make_model(facts={"weights_bytes": 100 * GIB})
    with pytest.raises(DoesNotFit) as caught:
        model_launch(model, actor="anna")
    assert caught.value.facts["need_bytes"] > 100 * GIB
    assert not Instance.objects.exists()
    assert not Model.objects.get(pk=model.pk).deployed


@pytest.mark.parametrize("choice", [("x", "x"), ("x",)])
def test_gpus_chosen_by_hand_are_checked(fleet: Host, pump: Pump, choice: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput):
        model_launch(_model(), actor="anna", gpu_uuids=choice)
