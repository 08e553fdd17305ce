"""A host with two simulated cards, and engines on it that leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpus_app.models import Host
from gpus_app.probes.sim_ledger import ensure_gpus
from models_app import dispatch
from models_app.engines import process, rundir
from models_app.engines.identity import installation_id
from tests.builders import GIB, make_gpu, make_host
from tests.models_app.pump import Pump
from tests.models_app.readings import Readings


@pytest.fixture
def pump(monkeypatch: pytest.MonkeyPatch) -> Pump:
    return Pump(monkeypatch)


@pytest.fixture
def fleet(request: pytest.FixtureRequest, db: None, settings: Any, tmp_path: Path) -> Iterator[Host]:
    """This machine as a host with two simulated cards, 80 GiB or of the parameter; its engines end with the test."""
    settings.SARDEENZ_HOME = tmp_path
    settings.SARDEENZ_RUN_DIR = tmp_path / "runs"
    settings.SARDEENZ_SIM_DIR = tmp_path / "simgpu"
    settings.SARDEENZ_SIM_SPEED = 100.0
    settings.SARDEENZ_ENGINE = "simulated"
    settings.ROUTE_GRACE_S = 0.0
    settings.HOST_BACK_AFTER_S = 0.0
    cards = ensure_gpus(settings.SARDEENZ_SIM_DIR, 2, getattr(request, "param", 80 * GIB), "testhost")
    host = make_host(name=settings.SARDEENZ_HOST_NAME)
    for card in cards:
        make_gpu(host=host, index=card.index, uuid=card.uuid, name=card.name, total_bytes=card.total_bytes)
    yield host
    for folder in rundir.run_dirs(settings.SARDEENZ_RUN_DIR):
        process.terminate(folder, limit_s=0.0)
        process.cleanup(folder)
    mine = installation_id(tmp_path)
    assert process.find_marked(mine) == []
    assert list(Path("/dev/shm").glob(f"sz-{mine}-*")) == []


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Readings:
    return Readings(monkeypatch)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was enqueued, as (name, *args)."""
    messages: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dispatch, "send", lambda name, *args, **_: messages.append((name, *args)))
    return messages


@pytest.fixture
def host(db: None, settings: Any, tmp_path: Path) -> Host:
    """This machine with two cards of which nobody reads anything: for services that only write rows."""
    settings.SARDEENZ_HOME = tmp_path
    host = make_host(name=settings.SARDEENZ_HOST_NAME)
    make_gpu(host=host, index=0)
    make_gpu(host=host, index=1)
    return host
