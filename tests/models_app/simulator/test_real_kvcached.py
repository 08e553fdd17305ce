"""The released kvcached against the simulator: ``kvctl`` on a simulated engine, and its pool manager beside ours."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.models_app.simulator.engine import ROOT, eventually, running
from tests.models_app.simulator.kvcached_sdist import Kvcached, Unreachable, fetch

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kvcached(tmp_path_factory: pytest.TempPathFactory) -> Kvcached:
    try:
        return fetch(tmp_path_factory.mktemp("kvcached"))
    except Unreachable as problem:
        try:
            socket.create_connection(("pypi.org", 443), timeout=5).close()
        except OSError:
            pytest.skip("the package registry cannot be reached")
        pytest.fail(f"the registry is there, but kvcached could not be fetched: {problem}")


def listed(kvcached: Kvcached, name: str) -> dict | None:
    rows = json.loads(kvcached.run("list", "--json").stdout)
    return next((row for row in rows if row["ipc"] == name), None)


def test_kvctl_lists_and_limits_a_simulated_engine(kvcached: Kvcached, tmp_path: Path) -> None:
    with running(tmp_path, faults="stock") as engine:
        total, used, _ = engine.numbers()
        assert listed(kvcached, engine.ipc_name) == {
            "ipc": engine.ipc_name, "limit_bytes": total, "used_bytes": used,
        }  # fmt: skip
        said = kvcached.run("limit", engine.ipc_name, "3g")
        assert "Updated kv cache limit" in said.stdout, said
        assert engine.numbers() == (3 * 1024**3, used, engine.numbers()[2])
        engine.complete("x", max_tokens=2)
        eventually(lambda: engine.footprint <= 3 * 1024**3)
        assert listed(kvcached, engine.ipc_name)["limit_bytes"] == 3 * 1024**3  # type: ignore[index]


def test_kvctls_change_is_drift_for_the_add_on(kvcached: Kvcached, tmp_path: Path) -> None:
    with running(tmp_path) as engine:
        kvcached.run("limit", engine.ipc_name, "3g")
        status = engine.kv("status")["segments"][0]
        assert status["limit_bytes"] == 3 * 1024**3
        assert status["drift_bytes"] == 3 * 1024**3 - status["capacity_bytes"] or status["drift_bytes"] < 0


def test_kvctl_delete_on_a_live_engine_and_the_limit_that_brings_it_back(kvcached: Kvcached, tmp_path: Path) -> None:
    with running(tmp_path, "--no-enable-prefix-caching") as engine:
        assert "Deleted IPC" in kvcached.run("delete", engine.ipc_name).stdout
        assert not engine.segment.exists()
        engine.complete("word " * 3000, max_tokens=2)
        assert engine.kv("limit", {"size": "4g"})["status"] == "applied"
        assert listed(kvcached, engine.ipc_name)["limit_bytes"] <= 4 * 1024**3  # type: ignore[index]


def test_kvctl_does_not_list_the_32_byte_segment_of_pull_request_324(kvcached: Kvcached, tmp_path: Path) -> None:
    with running(tmp_path, faults="pr324", token=False) as engine:
        assert listed(kvcached, engine.ipc_name) is None
        kvcached.run("limit", engine.ipc_name, "3g")
        assert engine.numbers()[0] == 3 * 1024**3


def test_pool_does_what_the_released_manager_does(kvcached: Kvcached) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    code += "from tests.models_app.simulator import side_by_side; side_by_side.main(seeds=60, steps=120)"
    done = kvcached.python(code, *(path for path in __import__("sys").path if "site-packages" in path))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "60 histories alike" in done.stdout
