"""The services with everything real but the GPU: Valkey, workers, beat, sampler, engines. Each test kills something.

The test process stands where a web process would: it calls the same services, against the same database and broker.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.conf import settings as django_settings
from django.db import connection

from models_app.engines import process, rundir
from models_app.errors import BrokerAway
from models_app.models import Instance
from models_app.selectors import instances_for_dashboard
from models_app.services.lifecycle.launch import model_launch
from models_app.services.lifecycle.stop import instance_stop
from models_app.services.memory.kvcache import kvcache_limit_set, kvcache_trim
from models_app.services.models import model_create
from models_app.states import InstanceState
from sardeenz_site.redis_url import celery_broker_url
from sardeenz_site.run import valkey as private
from sardeenz_site.run.config import Config
from sardeenz_site.run.processes import processes
from tests.broker import celery_broker
from tests.builders import GIB

S = InstanceState
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]
ROOT = Path(__file__).resolve().parent.parent.parent
HOST = "testhost"


class Stack:
    """Processes of one installation by name; each can be killed and started again."""

    def __init__(self, home: Path, settings: Any) -> None:
        self.home = home
        self.settings = settings
        self.folder = private.socket_folder(home)
        private.make_folder(self.folder)
        self.redis_url = private.url(self.folder)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        config = Config("all", home, "127.0.0.1", 1, 2, HOST, self.redis_url, "simulated", "test")
        self.argv = {one.name: one.argv for one in processes(config) if one.name not in ("web", "router")}
        self.argv["valkey"] = tuple(private.command(private.find_server(), self.folder))

    def environment(self) -> dict[str, str]:
        database = django_settings.DATABASES["default"]
        if connection.vendor == "sqlite":
            url = f"sqlite:///{connection.settings_dict['NAME']}"
        else:
            name = connection.settings_dict["NAME"]
            url = f"postgresql://{database['USER']}@/{name}?host={database['HOST']}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SARDEENZ_", "DJANGO_"))}
        return {
            **kept,
            "DATABASE_URL": url,
            "REDIS_URL": self.redis_url,
            "SARDEENZ_HOME": str(self.home),
            "SARDEENZ_HOST_NAME": HOST,
            "SARDEENZ_ENGINE": "simulated",
            "SARDEENZ_SIM_SPEED": "20",
            "SARDEENZ_ENV_FILE": os.devnull,
            "SARDEENZ_RESTART_BACKOFF_S": "1",
            "SECRET_KEY": "a test's own",
        }

    def start(self, name: str) -> None:
        log = (self.home / f"{name}.log").open("ab")
        self.running[name] = subprocess.Popen(
            self.argv[name], cwd=ROOT, env=self.environment(), stdout=log, stderr=log, start_new_session=True
        )
        log.close()
        if name == "valkey":
            assert private.wait_until_up(self.folder, self.running[name])

    def kill(self, name: str) -> None:
        child = self.running.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(10)

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(self.home.glob("*.log")))


@pytest.fixture
def stack(settings: Any, tmp_path: Path) -> Iterator[Stack]:
    """Everything up, the host registered and its cards read."""
    stack = Stack(tmp_path, settings)
    settings.SARDEENZ_HOME = tmp_path
    settings.SARDEENZ_RUN_DIR = tmp_path / "runs"
    settings.REDIS_URL = stack.redis_url
    try:
        with celery_broker(celery_broker_url(stack.redis_url)):
            stack.start("valkey")
            for name in stack.argv:
                if name != "valkey":
                    stack.start(name)
            _until(_fresh, stack, 60)
            yield stack
    finally:
        for name in [*stack.running]:
            stack.kill(name)
        for folder in rundir.run_dirs(settings.SARDEENZ_RUN_DIR):
            process.terminate(folder, limit_s=0.0)
            process.cleanup(folder)


def _fresh() -> bool:
    from gpus_app.models import Host
    from gpus_app.selectors import latest

    host = Host.objects.filter(name=HOST).first()
    record = latest(HOST)
    return bool(host and host.worker_seen_at and host.gpus.count() == 2 and record and record["age_s"] < 3)


def _until(condition: Callable[[], object], stack: Stack, limit_s: float) -> float:
    """Wait; how long it took. Longer than ``limit_s`` means that it hangs."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < limit_s, stack.logs()
        time.sleep(0.05)
    return time.monotonic() - begun


def _now(row: Instance) -> Instance:
    return instances_for_dashboard().get(pk=row.pk)


def _launch(stack: Stack, name: str, **fields: Any) -> Instance:
    given: dict[str, Any] = {"source": "catalogue", "model": "Qwen/Qwen3-0.6B"}
    model = model_create(actor="anna", served_model_name=name, **(given | fields))
    return model_launch(model, actor="anna")[0]


def _ready(stack: Stack, name: str, **fields: Any) -> Instance:
    row = _launch(stack, name, **fields)
    _until(lambda: _now(row).state == S.READY, stack, 60)
    return _now(row)


def _answers(row: Instance) -> bool:
    answer = httpx.post(
        f"{row.base_url}/v1/completions",
        headers={"Authorization": f"Bearer {row.engine_token}"},
        json={"model": row.model.served_model_name, "prompt": "hello", "max_tokens": 4},
        timeout=10,
    )
    return answer.status_code == 200


def test_launch_limit_trim_and_stop(stack: Stack) -> None:
    row = _ready(stack, "a")
    assert row.attempt is not None
    assert row.attempt.exec_at is not None
    print(f"launch to exec {(row.attempt.exec_at - row.created_at).total_seconds():.2f} s")
    assert _answers(row)
    answer = kvcache_limit_set(row, size="3G", actor="anna", wait_s=60)
    assert answer.status == "applied", (answer, stack.logs())
    assert (answer.effective_limit_bytes or 0) <= 3 * GIB
    trimmed = kvcache_trim(row, actor="anna", wait_s=60)
    assert trimmed.freed_bytes is not None, (trimmed, stack.logs())
    _until(lambda: _now(row).attempt.memory.get("baseline_bytes"), stack, 30)  # type: ignore[union-attr]

    second = _ready(stack, "b", gpu_uuids=row.gpu_uuids)
    assert _answers(row)
    assert _answers(second)

    instance_stop(row, actor="anna")
    _until(lambda: _now(row).state == S.STOPPED, stack, 30)
    assert _now(row).reason.endswith("Memory is back.")
    assert _answers(second), "the neighbour serves on"


def test_host_worker_killed_while_it_serves_and_while_it_starts(stack: Stack) -> None:
    serving = _ready(stack, "a")
    stack.kill("host")
    assert _answers(serving)
    starting = _launch(stack, "b")
    time.sleep(1)
    assert _answers(serving)
    stack.start("host")
    _until(lambda: _now(starting).state == S.READY, stack, 60)
    assert _now(serving).state == S.READY
    assert _now(serving).attempt_id == serving.attempt_id, "it is still the same engine"


def test_control_worker_and_beat_killed_during_a_launch(stack: Stack) -> None:
    stack.kill("control")
    stack.kill("beat")
    row = _launch(stack, "a")
    time.sleep(1)
    assert _now(row).state == S.PENDING
    stack.start("control")
    stack.start("beat")
    _until(lambda: _now(row).state == S.READY, stack, 60)


def test_killed_engine_is_noticed_explained_and_restarted(stack: Stack) -> None:
    row = _ready(stack, "a")
    assert row.attempt is not None
    os.kill(row.attempt.engine_pid or 0, signal.SIGKILL)
    took = _until(lambda: _now(row).state == S.FAILED, stack, 30)
    print(f"noticed after {took:.1f} s")
    assert _now(row).first_cause
    _until(lambda: _now(row).state == S.READY, stack, 60)
    assert _now(row).restart_count == 1
    assert _answers(_now(row))


def test_broker_away_and_back(stack: Stack) -> None:
    row = _ready(stack, "a")
    stack.kill("valkey")
    begun = time.monotonic()
    with pytest.raises(BrokerAway):
        instance_stop(row, actor="anna")
    assert time.monotonic() - begun < 5, "an action fails within five seconds"
    assert _now(row).state == S.READY
    assert _answers(row)
    assert (stack.home / "routes.json").exists()
    stack.start("valkey")
    second = _launch(stack, "b")
    _until(lambda: _now(second).state == S.READY, stack, 90)
    instance_stop(row, actor="anna")
    _until(lambda: _now(row).state == S.STOPPED, stack, 60)
