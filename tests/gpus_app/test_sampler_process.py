"""``manage.py run_sampler`` as it runs: two hosts, cards that vanish, a broker that dies, limits that drift."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis

from gpus_app.broker import host_latest_key
from gpus_app.probes.segments import SHM
from gpus_app.probes.sim_ledger import Ledger
from sardeenz_site.run import valkey as private
from tests.gpus_app.fake_host import GIB, MIB, FakeEngine, FakeHost, metrics_text, write_segment

ROOT = Path(__file__).resolve().parent.parent.parent
#: Seconds after which something that should happen within one or two is taken for hanging.
HANGS_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("sampler-process")]


class Site:
    """One database and one Valkey, with samplers of any number of hosts on them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.vk = private.socket_folder(root / "vk")
        private.make_folder(self.vk)
        self.url = private.url(self.vk)
        self.broker: subprocess.Popen[bytes] | None = None
        self.start_broker()
        self.samplers: list[subprocess.Popen[bytes]] = []
        self.hosts: list[FakeHost] = []
        self.manage("migrate", "--skip-checks", "-v0").wait()

    def environment(self, name: str = "host-a") -> dict[str, str]:
        home = self.root / name
        home.mkdir(exist_ok=True)
        return {
            "PATH": os.environ["PATH"],
            "SARDEENZ_HOME": str(home),
            "DATABASE_URL": f"sqlite:///{self.root / 'db.sqlite3'}",
            "REDIS_URL": self.url,
            "SARDEENZ_ENGINE": "simulated",
            "SARDEENZ_HOST_NAME": name,
            "SARDEENZ_RUN_DIR": str(home / "runs"),
            "SARDEENZ_SIM_DIR": str(home / "sim"),
            "SECRET_KEY": "for-tests-only",
        }

    def manage(self, *arguments: str, name: str = "host-a") -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "manage.py", *arguments], cwd=ROOT, env=self.environment(name))

    def host(self, name: str, *, gpus: int = 1) -> FakeHost:
        host = FakeHost(self.root / name, gpus=gpus, name=name)
        self.hosts.append(host)
        return host

    def sampler(self, name: str) -> subprocess.Popen[bytes]:
        self.samplers.append(self.manage("run_sampler", name=name))
        return self.samplers[-1]

    def start_broker(self) -> None:
        self.broker = subprocess.Popen(private.command(private.find_server(), self.vk), stdout=subprocess.DEVNULL)
        assert private.wait_until_up(self.vk, self.broker)

    def kill_broker(self) -> None:
        assert self.broker is not None
        self.broker.kill()
        self.broker.wait()

    def latest(self, name: str) -> dict[str, Any] | None:
        with redis.Redis.from_url(self.url) as client:
            try:
                value = client.get(host_latest_key(name))
            except redis.RedisError:
                return None
        return orjson.loads(value) if isinstance(value, bytes) else None

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        link = sqlite3.connect(self.root / "db.sqlite3", timeout=20)
        try:
            return link.execute(query).fetchall()
        finally:
            link.close()

    def close(self) -> None:
        for process in self.samplers:
            if process.poll() is None:
                process.terminate()
                process.wait(20)
        for host in self.hosts:
            host.close()
        if self.broker is not None and self.broker.poll() is None:
            self.broker.terminate()
            self.broker.wait(20)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


def until(condition: Callable[[], Any]) -> Any:
    """The first true answer; how long it took is not judged, only that it comes."""
    deadline = time.monotonic() + HANGS_S
    while time.monotonic() < deadline:
        if answer := condition():
            return answer
        time.sleep(0.05)
    raise AssertionError("it did not happen")


def test_two_hosts_share_one_database_and_one_broker(site: Site) -> None:
    """Each with its own cards and readings (SZ-128); killed and started again, a sampler goes on where it was."""
    for name, gpus in (("host-a", 1), ("host-b", 2)):
        host = site.host(name, gpus=gpus)
        host.hold(host.process(None).pid, {host.uuids[0]: gpus * GIB})
        site.sampler(name)
    a = until(lambda: site.latest("host-a"))
    b = until(lambda: site.latest("host-b"))
    assert [gpu["used"] for gpu in a["gpus"]] == [GIB] and [gpu["used"] for gpu in b["gpus"]] == [2 * GIB, 0]
    query = "select h.name, count(*) from gpus_app_gpu g join gpus_app_host h on h.id = g.host_id group by h.name"
    until(lambda: site.rows(query) == [("host-a", 1), ("host-b", 2)])
    until(lambda: not site.rows("select 1 from gpus_app_host where sampler_seen_at is null"))

    site.samplers[0].kill()
    site.samplers[0].wait()
    seen = site.latest("host-b")["t"]  # type: ignore[index]
    until(lambda: site.latest("host-b")["t"] > seen)  # type: ignore[index]
    site.sampler("host-a")
    until(lambda: site.latest("host-a")["t"] > a["t"] + 2)  # type: ignore[index]
    assert site.rows(query) == [("host-a", 1), ("host-b", 2)]


def test_it_goes_on_while_cards_vanish_and_the_broker_dies(site: Site) -> None:
    host = site.host("host-a", gpus=2)
    sampler = site.sampler("host-a")
    until(lambda: site.latest("host-a"))
    state = f"select state, state_reason from gpus_app_gpu where uuid = '{host.uuids[0]}'"
    until(lambda: site.rows(state) == [("ok", "")])

    Ledger(host.sim).change_gpu(host.uuids[0], fault="missing")
    until(lambda: site.rows(state) == [("missing", "The card has left the bus.")])
    record = site.latest("host-a")
    assert record is not None and record["gpus"][0]["error"] and record["gpus"][1]["error"] is None

    site.kill_broker()
    Ledger(host.sim).change_gpu(host.uuids[0], fault="")
    until(lambda: site.rows(state) == [("ok", "")])  # the database is told without the broker
    site.start_broker()
    fresh = until(lambda: site.latest("host-a"))
    assert fresh["gpus"][0]["error"] is None and fresh["t"] > record["t"]
    assert sampler.poll() is None
    sampler.terminate()
    assert sampler.wait(HANGS_S) == 0
    assert {row[0] for row in site.rows("select resolution_s from gpus_app_gpusample")} == {10, 60}


def test_a_foreign_limit_is_shown_and_an_ended_engine_told(site: Site) -> None:
    host = site.host("host-a")
    core = host.process(1)
    host.hold(core.pid, {host.uuids[0]: 5 * GIB})
    segment: dict[str, Any] = {"capacity_bytes": 20 * GIB, "limit_bytes": 8 * GIB, "drift_bytes": None}
    engine = FakeEngine(metrics=metrics_text(running=1), status={"segments": [segment]})
    host.attempt(1, pid=core.pid, port=engine.port)
    name = host.ipc(1)
    try:
        write_segment(SHM, name, 8 * GIB, GIB, 320 * MIB)
        site.sampler("host-a")

        def part() -> dict[str, Any]:
            record = site.latest("host-a") or {"gpus": [{"instances": []}]}
            instances = record["gpus"][0]["instances"]
            return {**instances[0], "t": record["t"]} if instances else {"state": "", "drift": None}

        until(lambda: part()["state"] == "ok" and part()["capacity"])
        segment |= {"limit_bytes": 30 * GIB, "drift_bytes": 22 * GIB}
        write_segment(SHM, name, 30 * GIB, GIB, 320 * MIB)
        written = time.time()
        until(lambda: part()["drift"] == 30 * GIB)
        # Noticed within 2 s of the sampler's own time; how long a busy test machine takes to run it is not judged.
        assert part()["t"] - written < 20
        with redis.Redis.from_url(site.url) as client:
            queue = "host.host-a"
            until(lambda: client.llen(queue) > 0)
            client.delete(queue)
            host.status(1, pid=core.pid, ended_at=time.time())
            tasks = until(lambda: client.lrange(queue, 0, -1))
        assert any(b"models_app.probe" in task for task in tasks)
    finally:
        (SHM / name).unlink(missing_ok=True)
        engine.close()
