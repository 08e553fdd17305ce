"""The end of an instance: gone is gone only when the memory is back, and what will not end is a visible failure."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from models_app import dispatch
from models_app.engines.process import StopProgress
from models_app.models import Instance, LaunchAttempt
from models_app.services.lifecycle import probe, stop
from models_app.services.lifecycle.sleep import wake_apply
from models_app.states import InstanceState
from tests.builders import GIB, make_gpu, make_host, make_instance, make_model

S = InstanceState
pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    messages: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dispatch, "send", lambda name, *args, **_: messages.append((name, *args)))
    return messages


@pytest.fixture
def row(settings: Any, tmp_path: Path) -> Instance:
    """Stopping; its processes have ended."""
    make_gpu(host=make_host(name=settings.SARDEENZ_HOST_NAME))
    row = make_instance(state=S.STOPPING, desired_state="stopped")
    LaunchAttempt.objects.update(run_dir=str(tmp_path), ended_at=timezone.now() - timedelta(seconds=1))
    return row


def _reading(monkeypatch: pytest.MonkeyPatch, row: Instance, resident: int) -> None:
    gpus = [{"uuid": row.gpu_uuids[0], "instances": [{"id": row.pk, "resident": resident}]}]
    record = {"source": "broker", "t": time.time(), "gpus": gpus}
    monkeypatch.setattr(stop.gpu_readings, "latest", lambda _: record)


def _now(row: Instance) -> Instance:
    return Instance.objects.select_related("model", "host", "attempt").get(pk=row.pk)


def test_stop_is_done_only_when_the_memory_is_back(row: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """B11, C2: the next start on the card would fail for want of what the driver has not released yet."""
    _reading(monkeypatch, row, 3 * GIB)
    assert stop.instance_stop_step(row.pk)
    assert (_now(row).state, _now(row).reason) == (S.STOPPING, "Its processes are gone; waiting for the memory.")
    assert _now(row).reserved_bytes == 4 * GIB
    _reading(monkeypatch, row, 0)
    assert not stop.instance_stop_step(row.pk)
    assert (_now(row).state, _now(row).reserved_bytes) == (S.STOPPED, 0)
    assert "Memory is back" in _now(row).reason


def test_memory_that_does_not_come_back_is_told_with_its_bytes(
    row: Instance, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    settings.MEMORY_BACK_LIMIT_S = 5.0
    Instance.objects.update(state_since=timezone.now() - timedelta(seconds=9))
    LaunchAttempt.objects.update(ended_at=timezone.now() - timedelta(seconds=9))
    _reading(monkeypatch, row, 3 * GIB)
    stop.instance_stop_step(row.pk)
    assert _now(row).state == S.STOPPED
    assert "3.0 GiB are still counted to it after 9 s" in _now(row).reason


def test_start_whose_worker_was_killed_before_it_made_the_folder_can_be_stopped(row: Instance, tmp_path: Path) -> None:
    LaunchAttempt.objects.update(
        run_dir=str(tmp_path / "never-made"), ended_at=None, started_at=timezone.now() - timedelta(minutes=1)
    )
    assert not stop.instance_stop_step(row.pk)
    row.refresh_from_db()
    assert row.state == S.STOPPED
    assert not (tmp_path / "never-made").exists()


def test_process_that_outlives_sigkill_is_a_failed_stop_that_names_it(row: Instance, settings: Any) -> None:
    """C10: no stopping for ever."""
    settings.STOP_LIMIT_S, settings.KILL_LIMIT_S = 30.0, 20.0
    waiting = StopProgress(done=False, sent="SIGKILL", alive=(4711,), asked_s=49.0)
    assert stop._not_gone(_now(row), waiting)
    assert _now(row).reason == "It did not end in time and is being killed."
    assert not stop._not_gone(_now(row), StopProgress(done=False, sent="SIGKILL", alive=(4711,), asked_s=51.0))
    assert _now(row).state == S.FAILED
    assert "process 4711 does not end, not even by SIGKILL" in _now(row).reason
    stop.instance_stop(_now(row), actor="anna")  # and the operator can put an end to it
    assert _now(row).state == S.STOPPED


def test_engine_that_dies_of_waking_is_a_crash_and_loaded_anew(row: Instance, tmp_path: Path) -> None:
    """E20: not asleep for ever with a dead engine behind it."""
    Instance.objects.update(state=S.STARTING, stage="waking", desired_state="running", ready_at=timezone.now())
    status = probe.Status(
        guardian_pid=2**22 + 1,
        guardian_start_ticks=1,
        engine_pid=2**22 + 2,
        engine_start_ticks=1,
        started_at=0.0,
        ended_at=time.time(),
        exit_code=1,
    )
    assert probe.end_found(_now(row), status)
    assert (_now(row).state, _now(row).next_restart_at is not None) == (S.FAILED, True)


def test_sleeper_whose_model_was_edited_says_which_options_it_wakes_with(
    row: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E18"""
    from models_app.services.lifecycle import sleep

    class Engine:
        def wake(self) -> dict[str, Any]:
            return {}

    monkeypatch.setattr(sleep, "client", lambda *_, **__: Engine())
    model = make_model(enable_sleep_mode=True, spec_revision=3)
    Instance.objects.update(model=model, state=S.SLEEPING, desired_state="running", spec_revision=2)
    wake_apply(row.pk)
    assert (_now(row).state, _now(row).reason) == (
        S.STARTING,
        "Waking. With the options of revision 2; saved is 3.",
    )
