"""What no row claims: named, and ended only when it is surely ours. Over real simulated engines."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.utils import timezone

from gpus_app.models import Host
from models_app.engines import process
from models_app.engines.identity import MARKER, tmp_dir
from models_app.errors import Conflict, NotFound
from models_app.models import Instance, LaunchAttempt
from models_app.services.access import this_installation
from models_app.services.lifecycle import leftovers
from models_app.services.lifecycle.launch import model_launch
from models_app.services.models import model_create
from models_app.services.plans.control import restarts_due
from models_app.services.plans.reconcile import reconcile_host
from models_app.states import DesiredState, InstanceState
from tests.models_app.pump import Pump

S = InstanceState
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]


def _state(row: Instance) -> str:
    return str(Instance.objects.values_list("state", flat=True).get(pk=row.pk))


@pytest.fixture
def ready(fleet: Host, pump: Pump) -> Instance:
    model = model_create(actor="anna", served_model_name="a", source="catalogue", model="Qwen/Qwen3-0.6B")
    (row,) = model_launch(model, actor="anna")
    pump.run(lambda: _state(row) == S.READY)
    row.refresh_from_db()
    return row


def _folder(row: Instance) -> Path:
    assert row.attempt is not None
    return Path(row.attempt.run_dir)


def test_engine_that_no_row_knows_is_an_orphan_and_is_only_named(ready: Instance, fleet: Host, valkey: str) -> None:
    folder, attempt_id = _folder(ready), ready.attempt_id
    Instance.objects.all().delete()
    reconcile_host(fleet.name)
    (orphan,) = leftovers.orphans_shown([fleet.name])
    assert (orphan.attempt_id, orphan.served_model_name) == (attempt_id, "a")
    assert process.members(folder)


def test_orphan_is_reaped_when_asked(ready: Instance, fleet: Host) -> None:
    folder, attempt_id, ipc_name = _folder(ready), ready.attempt_id or 0, ready.ipc_name
    Instance.objects.all().delete()
    pids = leftovers.orphan_reap(attempt_id, actor="anna")
    assert pids
    assert process.members(folder) == []
    assert not (Path("/dev/shm") / ipc_name).exists()


def test_claimed_engine_is_never_reaped(ready: Instance) -> None:
    with pytest.raises(Conflict, match="stop that instance"):
        leftovers.orphan_reap(ready.attempt_id or 0, actor="anna")
    assert process.members(_folder(ready))


def test_nothing_to_reap(fleet: Host) -> None:
    with pytest.raises(NotFound):
        leftovers.orphan_reap(4711, actor="anna")


def test_stale_start_of_an_ended_instance_is_ended(ready: Instance, fleet: Host, pump: Pump) -> None:
    Instance.objects.filter(pk=ready.pk).update(state=S.STOPPED, desired_state=DesiredState.STOPPED)
    pump.run(lambda: reconcile_host(fleet.name) or not process.members(_folder(ready)))


def test_older_start_of_an_instance_that_has_a_newer_one_is_ended(ready: Instance, fleet: Host, pump: Pump) -> None:
    newer = LaunchAttempt.objects.create(instance=ready, number=2, host=fleet, run_dir="/nonexistent/2")
    Instance.objects.filter(pk=ready.pk).update(attempt=newer)
    pump.run(lambda: reconcile_host(fleet.name) or not process.members(_folder(ready)))


def test_innocent_processes_are_neither_named_nor_ended(ready: Instance, fleet: Host, valkey: str) -> None:
    log = _folder(ready) / "engine.log"
    tail = subprocess.Popen(["tail", "-f", str(log)], stdout=subprocess.DEVNULL)
    stranger = subprocess.Popen(["sleep", "60"], env={**os.environ, MARKER: "ffffffff:1:1"})
    try:
        time.sleep(0.1)
        Instance.objects.filter(pk=ready.pk).update(state=S.STOPPED)
        reconcile_host(fleet.name)
        assert tail.poll() is None
        assert stranger.poll() is None
        assert leftovers.orphans_shown([fleet.name]) == []
    finally:
        for one in (tail, stranger):
            one.kill()
            one.wait()


def test_segment_of_a_killed_start_is_removed_and_others_are_not(ready: Instance, fleet: Host, pump: Pump) -> None:
    mine = Path("/dev/shm") / ready.ipc_name
    other = Path("/dev/shm") / "sz-eeeeeeee-i1-a1"
    other.write_bytes(bytes(24))
    try:
        Instance.objects.filter(pk=ready.pk).update(state=S.STOPPED)
        pump.run(lambda: reconcile_host(fleet.name) or not mine.exists())
        assert other.exists()
    finally:
        other.unlink()


def test_sockets_and_folders_of_a_start_that_a_newer_one_replaced_are_removed(ready: Instance, fleet: Host) -> None:
    """Without a segment beside them: the engine removed that itself, and the message to tidy up came too late."""
    process.terminate(_folder(ready), limit_s=1.0)
    sockets = Path("/tmp") / f"kvcached-tp-{ready.ipc_name}-0123abcd"
    sockets.mkdir()
    reconcile_host(fleet.name)
    assert not (Path("/dev/shm") / ready.ipc_name).exists()
    sockets.mkdir(exist_ok=True)
    folder = tmp_dir(this_installation(), ready.attempt_id or 0)
    folder.mkdir(exist_ok=True)
    newer = LaunchAttempt.objects.create(instance=ready, number=2, host=fleet, run_dir=str(_folder(ready).parent / "x"))
    Instance.objects.filter(pk=ready.pk).update(state=S.STARTING, attempt=newer)
    reconcile_host(fleet.name)
    assert not sockets.exists()
    assert not folder.exists()


def test_folder_of_a_start_that_comes_up_is_not_taken_from_it(ready: Instance, fleet: Host) -> None:
    process.terminate(_folder(ready), limit_s=1.0)
    folder = tmp_dir(this_installation(), ready.attempt_id or 0)
    folder.mkdir(exist_ok=True)
    leftovers.sweep(fleet.name)
    assert folder.exists()
    folder.rmdir()


def test_logs_are_kept_for_a_time_after_the_end(ready: Instance, fleet: Host, settings: Any) -> None:
    process.terminate(_folder(ready), limit_s=1.0)
    ready.attempts.update(ended_at=timezone.now() - timedelta(seconds=10))
    newer = LaunchAttempt.objects.create(instance=ready, number=2, host=fleet, run_dir="/nonexistent/2")
    Instance.objects.filter(pk=ready.pk).update(state=S.STOPPED, attempt=newer)
    assert leftovers.run_dirs_prune() == 0
    settings.RUNS_KEEP_S = 5.0
    assert leftovers.run_dirs_prune() == 1
    assert not _folder(ready).exists()


# --- the end of a demo -----------------------------------------------------------------------------------


def test_end_of_the_demo_leaves_nothing_and_keeps_what_is_wanted(ready: Instance, fleet: Host) -> None:
    out = StringIO()
    call_command("stop_engines", "--simulated", stdout=out)
    assert out.getvalue().strip() == "1 simulated engine stopped."
    ready.refresh_from_db()
    assert (ready.state, ready.desired_state) == (S.STOPPED, DesiredState.RUNNING)
    assert process.members(_folder(ready)) == []
    restarts_due()
    assert _state(ready) == S.PENDING


def test_end_of_the_demo_removes_what_a_killed_engine_left_a_moment_ago(ready: Instance, fleet: Host) -> None:
    """Its guardian had not seen the segment yet, and no worker will sweep any more."""
    folder, segment = _folder(ready), Path("/dev/shm") / ready.ipc_name
    status = process.read_status(folder)
    assert status is not None and status.engine_pid and segment.exists()
    os.kill(status.engine_pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while not ((status := process.read_status(folder)) and status.cleaned_at):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    segment.write_bytes(bytes(24))  # as it is left at times
    call_command("stop_engines", "--simulated", stdout=StringIO())
    assert not segment.exists()


def test_end_of_the_demo_with_the_broker_away(ready: Instance, settings: Any, valkey: str) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    call_command("stop_engines", "--all", stdout=StringIO())
    assert _state(ready) == S.STOPPED


def test_end_of_the_demo_without_engines(fleet: Host) -> None:
    out = StringIO()
    call_command("stop_engines", "--simulated", stdout=out)
    assert out.getvalue().strip() == "No simulated engine was running."


def test_engine_that_will_not_go_is_killed_at_the_end_of_the_demo(fleet: Host, pump: Pump, settings: Any) -> None:
    settings.SARDEENZ_SIM_FAULTS = "ignore_sigterm"
    model = model_create(actor="anna", served_model_name="a", source="catalogue", model="Qwen/Qwen3-0.6B")
    (row,) = model_launch(model, actor="anna")
    pump.run(lambda: _state(row) == S.READY)
    call_command("stop_engines", "--simulated", "--limit", "0.5", stdout=StringIO())
    assert _state(row) == S.STOPPED


def test_reconcile_command_lists_what_lives(ready: Instance) -> None:
    out = StringIO()
    call_command("reconcile", "--control", stdout=out)
    assert "ready" in out.getvalue()
