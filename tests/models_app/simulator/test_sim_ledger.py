"""The book of simulated GPU memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpus_app.probes import sim_ledger
from gpus_app.probes.sim_ledger import GIB, Holding, Ledger, Thermals, ensure_gpus


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ensure_gpus(tmp_path, 2, 80 * GIB, "host-a")
    return tmp_path


@pytest.fixture
def other_process():
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def test_gpus_have_stable_uuids_and_say_that_they_are_simulated(tmp_path: Path) -> None:
    first = ensure_gpus(tmp_path / "a", 2, 80 * GIB, "host-a")
    again = ensure_gpus(tmp_path / "b", 2, 80 * GIB, "host-a")
    elsewhere = ensure_gpus(tmp_path / "c", 2, 80 * GIB, "host-b")
    assert [gpu.uuid for gpu in first] == [gpu.uuid for gpu in again]
    assert not {gpu.uuid for gpu in first} & {gpu.uuid for gpu in elsewhere}
    assert {gpu.name for gpu in first} == {"Simulated H100 80GB"}
    assert all(gpu.uuid.startswith("GPU-sim-") for gpu in first)


def test_existing_gpus_win_over_new_settings(folder: Path) -> None:
    assert len(ensure_gpus(folder, 8, 10 * GIB, "host-a")) == 2
    assert Ledger(folder).gpus()[0].total_bytes == 80 * GIB


def test_claim_is_refused_when_the_card_is_full_and_changes_nothing(folder: Path, other_process) -> None:
    uuid = Ledger(folder).gpus()[0].uuid
    mine, theirs = Ledger(folder), Ledger(folder, pid=other_process.pid)
    assert mine.claim(uuid, 50 * GIB)
    assert not theirs.claim(uuid, 31 * GIB)
    assert theirs.claim(uuid, 30 * GIB)
    assert mine.free_bytes(uuid) == 0
    assert not mine.claim(uuid, 1)
    assert mine.claim(uuid, -1)
    assert mine.free_bytes(uuid) == 1


def test_claim_on_several_cards_is_all_or_nothing(folder: Path) -> None:
    ledger = Ledger(folder)
    first, second = (gpu.uuid for gpu in ledger.gpus())
    assert ledger.claim(second, 60 * GIB)
    assert not ledger.claim_all({first: 30 * GIB, second: 30 * GIB})
    assert ledger.held_bytes(first) == 0
    assert ledger.claim_all({first: 20 * GIB, second: 20 * GIB})
    assert (ledger.held_bytes(first), ledger.held_bytes(second)) == (20 * GIB, 80 * GIB)


def test_memory_of_a_killed_process_is_free_at_once_even_while_it_is_a_zombie(folder: Path, other_process) -> None:
    uuid = Ledger(folder).gpus()[0].uuid
    theirs, mine = Ledger(folder, pid=other_process.pid), Ledger(folder)
    assert theirs.claim(uuid, 80 * GIB)
    assert not mine.claim(uuid, GIB)
    os.kill(other_process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, other_process.pid, os.WEXITED | os.WNOWAIT)
    assert mine.claim(uuid, GIB)
    assert mine.read()[uuid] == [Holding(os.getpid(), mine._ticks, "VLLM::EngineCore", GIB)]
    assert len(list((folder / "alloc").iterdir())) == 1


def test_pid_used_again_by_another_process_holds_nothing(folder: Path, other_process) -> None:
    ledger = Ledger(folder)
    uuid = ledger.gpus()[0].uuid
    row = {"pid": other_process.pid, "start_ticks": 1, "name": "old", "bytes": {uuid: 80 * GIB}, "util": {uuid: 90}}
    (folder / "alloc" / f"{other_process.pid}-1.json").write_text(json.dumps(row))
    assert ledger.read()[uuid] == []
    assert ledger.utilization()[uuid] == 0


def test_foreign_bytes_count_against_the_card(folder: Path) -> None:
    ledger = Ledger(folder)
    uuid = ledger.gpus()[0].uuid
    ledger.change_gpu(uuid, foreign_bytes=79 * GIB)
    assert ledger.free_bytes(uuid) == GIB
    assert not ledger.claim(uuid, 2 * GIB)


@pytest.mark.parametrize("fault", ["missing", "xid:79"])
def test_nothing_can_be_claimed_on_a_broken_card_but_giving_back_works(folder: Path, fault: str) -> None:
    ledger = Ledger(folder)
    uuid = ledger.gpus()[0].uuid
    assert ledger.claim(uuid, GIB)
    ledger.change_gpu(uuid, fault=fault)
    assert not ledger.claim(uuid, 1)
    assert ledger.claim(uuid, -GIB)
    ledger.change_gpu(uuid, fault="")
    assert ledger.claim(uuid, 1)


def test_torn_or_foreign_files_are_passed_over(folder: Path) -> None:
    ledger = Ledger(folder)
    uuid = ledger.gpus()[0].uuid
    (folder / "alloc" / "12-34.json").write_text('{"pid": 12, "sta')
    (folder / "alloc" / "notes.txt").write_text("[]")
    assert ledger.claim(uuid, GIB)
    assert len(ledger.read()[uuid]) == 1


def test_utilisation_of_a_card_is_the_sum_of_its_processes_up_to_a_hundred(folder: Path, other_process) -> None:
    mine, theirs = Ledger(folder), Ledger(folder, pid=other_process.pid)
    first, second = (gpu.uuid for gpu in mine.gpus())
    mine.set(utilization={first: 70.0})
    theirs.set(utilization={first: 60.0, second: 20.0})
    assert mine.utilization() == {first: 100.0, second: 20.0}


def test_release_gives_everything_back(folder: Path) -> None:
    ledger = Ledger(folder)
    uuid = ledger.gpus()[0].uuid
    ledger.claim(uuid, GIB)
    ledger.release()
    assert ledger.read()[uuid] == []
    assert ledger.free_bytes(uuid) == 80 * GIB


def test_many_processes_that_claim_at_once_never_overfill_the_card(folder: Path) -> None:
    uuid = Ledger(folder).gpus()[0].uuid
    code = (
        "import sys, pathlib\n"
        "from gpus_app.probes.sim_ledger import Ledger\n"
        "ledger = Ledger(sys.argv[1])\n"
        "print(sum(ledger.claim(sys.argv[2], 2**30) for _ in range(40)), flush=True)\n"
        "sys.stdin.read()\n"
    )
    root = Path(sim_ledger.__file__).parents[2]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(folder), uuid],
            cwd=root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    try:
        taken = sum(int(worker.stdout.readline()) for worker in workers)  # type: ignore[union-attr]
        assert taken == 80
        assert Ledger(folder).free_bytes(uuid) == 0
    finally:
        for worker in workers:
            worker.communicate("", timeout=20)
    assert Ledger(folder).free_bytes(uuid) == 80 * GIB


def test_temperature_follows_load_slowly_and_power_at_once() -> None:
    thermals = Thermals()
    cold, idle_w = thermals.step("g", 0, now=0.0)
    warm, busy_w = thermals.step("g", 100, now=5.0)
    hot, _ = thermals.step("g", 100, now=200.0)
    assert cold < warm < hot <= sim_ledger.BUSY_C
    assert idle_w == sim_ledger.IDLE_W
    assert sim_ledger.IDLE_W < busy_w <= sim_ledger.LIMIT_W
