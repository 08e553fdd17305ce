"""Leftovers by REST: named for admins, ended on their own host after another look."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest
from redis import Redis

from gpus_app.models import Host
from models_app import dispatch
from models_app.engines import process
from models_app.errors import Conflict
from models_app.models import AuditEntry, Instance
from models_app.services.audit import audited
from models_app.services.lifecycle import leftovers, reaping
from models_app.services.lifecycle.launch import model_launch
from models_app.services.lifecycle.leftovers import Orphan
from models_app.services.models import model_create
from models_app.states import InstanceState
from tests.builders import make_host, make_instance
from tests.models_app.api.conftest import Api
from tests.models_app.pump import Pump

ORPHAN = Orphan("far", 3, 17, [4711, 4712], "vllm", 1.5, "a")


@pytest.fixture
def shown(valkey: str, db: None) -> Orphan:
    """Another host's last sweep found one."""
    make_host(name="far")
    with Redis.from_url(valkey) as client:
        client.set("sardeenz:orphans:far", orjson.dumps([asdict(ORPHAN)]))
    return ORPHAN


@pytest.mark.parametrize("role", ["viewer", "operator"])
def test_only_admins_see_and_end_leftovers(api_as: Callable[[str], Api], role: str) -> None:
    api = api_as(role)
    assert api("GET", "/leftovers")[0] == 403
    assert api("POST", "/leftovers/reap", {"host": "far", "attempt_id": 17})[0] == 403


def test_leftovers_are_listed_with_owner_and_age(api_as: Callable[[str], Api], shown: Orphan) -> None:
    assert api_as("admin")("GET", "/leftovers") == (200, [asdict(shown)])


def test_one_on_another_host_is_left_to_that_hosts_worker(
    api_as: Callable[[str], Api], shown: Orphan, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(dispatch, "send", lambda name, *args, queue: sent.append((name, args[0], queue)))
    status, body = api_as("admin")("POST", "/leftovers/reap", {"host": "far", "attempt_id": 17})
    assert (status, body["outcome"]) == (200, "asked")
    assert sent == [(dispatch.REAP, 17, "host.far")]


def test_what_no_sweep_has_seen_is_not_found(api_as: Callable[[str], Api], shown: Orphan) -> None:
    assert api_as("admin")("POST", "/leftovers/reap", {"host": "far", "attempt_id": 18})[0] == 404
    assert api_as("admin")("POST", "/leftovers/reap", {"host": "nowhere", "attempt_id": 17})[0] == 404


def test_what_a_row_claims_by_now_is_refused(api_as: Callable[[str], Api], shown: Orphan, valkey: str) -> None:
    attempt_id = make_instance(host=Host.objects.get(name="far")).attempt_id
    with Redis.from_url(valkey) as client:
        client.set("sardeenz:orphans:far", orjson.dumps([asdict(shown) | {"attempt_id": attempt_id}]))
    assert api_as("admin")("POST", "/leftovers/reap", {"host": "far", "attempt_id": attempt_id})[0] == 409


def test_reaping_by_message_says_why_not_in_the_audit_trail(db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(attempt_id: int, *, actor: str) -> list[int]:
        with audited(actor, "orphan.reap", f"attempt {attempt_id}"):
            raise Conflict("An instance claims it.")

    monkeypatch.setattr(leftovers, "orphan_reap", refused)
    monkeypatch.setattr(leftovers, "sweep", lambda name: [])
    reaping.orphan_reap_here(17, actor="anna")
    assert AuditEntry.objects.get(action="orphan.reap").outcome == "refused"


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_reaping_ends_the_orphan_alone(
    fleet: Host, pump: Pump, api_as: Callable[[str], Api], valkey: str, tmp_path: Path
) -> None:
    """SZ-048, SZ-049: the whole tree of the orphan; not its healthy neighbour on the card, nor an innocent process."""
    card = fleet.gpus.all()[0].uuid
    given: dict[str, Any] = {"source": "catalogue", "model": "Qwen/Qwen3-0.6B", "gpu_uuids": [card]}
    rows = [model_launch(model_create(actor="anna", served_model_name=name, **given), actor="anna")[0] for name in "ab"]
    pump.run(lambda: set(Instance.objects.values_list("state", flat=True)) == {InstanceState.READY})
    for row in rows:
        row.refresh_from_db()
    orphan, neighbour = rows
    assert orphan.attempt is not None
    assert neighbour.attempt is not None
    folder, attempt_id = Path(orphan.attempt.run_dir), orphan.attempt_id
    innocent = subprocess.Popen(["/usr/bin/tail", "-f", str(folder / "engine.log")], stdout=subprocess.DEVNULL)
    try:
        Instance.objects.filter(pk=orphan.pk).delete()
        leftovers.sweep(fleet.name)
        admin = api_as("admin")
        (listed,) = admin("GET", "/leftovers")[1]
        assert listed["attempt_id"] == attempt_id
        assert innocent.pid not in listed["pids"]
        status, body = admin("POST", "/leftovers/reap", {"host": fleet.name, "attempt_id": attempt_id})
        assert (status, body["outcome"]) == (200, "ended")
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}/environ").exists() and process.members(folder) for pid in listed["pids"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert innocent.poll() is None
        assert process.members(Path(neighbour.attempt.run_dir))
        assert (Path("/dev/shm") / neighbour.ipc_name).exists()
        assert not (Path("/dev/shm") / orphan.ipc_name).exists()
        assert admin("GET", "/leftovers") == (200, [])
        claimed = admin("POST", "/leftovers/reap", {"host": fleet.name, "attempt_id": neighbour.attempt_id})
        assert claimed[0] == 409
    finally:
        os.kill(innocent.pid, 15)
        innocent.wait(10)
