"""Ends that were asked for, at any moment, and ends that were not."""

from __future__ import annotations

import os
import signal
import time

import pytest

from models_app.engines import procfs
from models_app.engines.process import cleanup, end_processes, find_marked, members, terminate
from tests.contract.kit import Kit, wait_for

pytestmark = pytest.mark.xdist_group("contract")


@pytest.mark.parametrize("phase", ["imports", "Initializing a V1 LLM engine"])
def test_stop_during_the_start_ends_it(kit: Kit, phase: str) -> None:
    started = kit.start()
    if phase == "imports":
        time.sleep(0.1)
    else:
        started.wait_line(phase)
    assert terminate(started.run_dir, limit_s=10).done
    assert started.wait_end(30).stop_requested
    cleanup(started.run_dir)
    started.nothing_left()


def test_sigkill_of_the_engine_core_is_noticed_although_the_server_exits_with_0(kit: Kit) -> None:
    started = kit.start()
    started.wait_ready()
    for pid in started.memory().engine_core_pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not started.client.health(), 30)
    status = started.wait_end(60)
    assert (status.exit_code, status.failed) == (0, True)
    assert started.cause().code == "engine_core_died"
    cleanup(started.run_dir)
    started.nothing_left()


def test_orphans_of_a_killed_server_and_guardian_are_found_and_ended(kit: Kit) -> None:
    started = kit.start()
    started.wait_ready()
    core = set(started.memory().engine_core_pids)
    os.kill(started.record.guardian_pid, signal.SIGKILL)
    os.kill(started.record.engine_pid or 0, signal.SIGKILL)
    wait_for(lambda: procfs.start_ticks(started.record.engine_pid or 0) is None, 10)
    time.sleep(1)
    assert core <= {p.pid for p in members(started.run_dir)}  # they do not notice
    assert cleanup(started.run_dir) == []
    orphans = [p for p in find_marked(kit.installation) if p.marker.attempt_id == started.attempt_id]
    assert core <= {p.pid for p in orphans}
    assert end_processes(orphans, limit_s=20) == []
    wait_for(lambda: not members(started.run_dir), 10)
    cleanup(started.run_dir)
    started.nothing_left()
