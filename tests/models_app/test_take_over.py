"""Move, preset and hang over real simulated engines under real guardians; only Celery is left out."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpus_app.models import Host
from models_app import selectors
from models_app.engines import process
from models_app.models import Instance, Operation
from models_app.services.lifecycle.launch import model_launch
from models_app.services.models import model_create
from models_app.services.plans.control import reconcile_control
from models_app.services.plans.operations import operation_cancel
from models_app.services.plans.reconcile import reconcile_host
from models_app.services.plans.rollout import instance_move
from models_app.states import InstanceState
from tests.models_app.pump import Pump

S = InstanceState
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]


def _now(row: Instance) -> Instance:
    return Instance.objects.select_related("model", "host", "attempt").get(pk=row.pk)


@pytest.fixture
def ready(fleet: Host, pump: Pump) -> Instance:
    return _launched(fleet, pump)


def _launched(fleet: Host, pump: Pump) -> Instance:
    """One ready instance on the first card."""
    model = model_create(
        actor="anna", served_model_name="a", source="catalogue", model="Qwen/Qwen3-0.6B", enable_sleep_mode=True
    )
    (row,) = model_launch(model, actor="anna", gpu_uuids=[fleet.gpus.all()[0].uuid])
    pump.run(lambda: _now(row).state == S.READY)
    return _now(row)


def _route() -> dict[str, Any]:
    """What the router sends the next request to."""
    (model,) = selectors.routes_snapshot()["models"]
    (instance,) = model["instances"]
    return dict(instance)


class Stream(threading.Thread):
    """A client in the middle of a long answer."""

    def __init__(self, row: Instance, tokens: int) -> None:
        super().__init__(daemon=True)
        self.url, self.token, self.tokens = row.base_url, row.engine_token, tokens
        self.begun = threading.Event()
        self.finish = ""
        self.done = False
        self.cut = ""

    def run(self) -> None:
        body = {"model": "a", "prompt": "tell", "max_tokens": self.tokens, "stream": True, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {self.token}"}
        try:
            self._read(httpx.stream("POST", f"{self.url}/v1/completions", headers=headers, json=body, timeout=60))
        except httpx.HTTPError as exc:
            self.cut = repr(exc)

    def _read(self, request: AbstractContextManager[httpx.Response]) -> None:
        with request as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data:"):
                    self.finish = json.loads(line[5:])["choices"][0]["finish_reason"] or self.finish
                    self.begun.set()
                elif line:
                    self.cut = line


def _ask(route: dict[str, Any]) -> int:
    body = {"model": "a", "prompt": "1", "max_tokens": 1}
    headers = {"Authorization": f"Bearer {route['token']}"}
    return httpx.post(f"{route['url']}/v1/completions", headers=headers, json=body, timeout=10).status_code


def test_stream_finishes_on_the_old_card_while_new_requests_go_to_the_new_one(
    ready: Instance, fleet: Host, pump: Pump, settings: Any
) -> None:
    settings.DRAIN_LIMIT_S = 60.0
    stream = Stream(ready, 20_000)
    stream.start()
    assert stream.begun.wait(10), stream.cut
    operation = instance_move(ready, actor="anna", gpu_uuids=[fleet.gpus.all()[1].uuid])
    pump.run(lambda: _now(ready).state == S.DRAINING, limit_s=60)
    new = Instance.objects.get(replaces=ready)
    assert (_route()["id"], _ask(_route())) == (new.pk, 200)
    pump.run(lambda: Operation.objects.get(pk=operation.pk).state == "succeeded", limit_s=90)
    stream.join(10)
    assert (stream.done, stream.finish) == (True, "length")
    assert (_now(ready).state, _now(new).state, _now(new).gpu_uuids) == (
        S.STOPPED,
        S.READY,
        [fleet.gpus.all()[1].uuid],
    )
    assert not (Path("/dev/shm") / ready.ipc_name).exists()


def test_move_cancelled_while_draining_leaves_the_source_serving_and_removes_the_target(
    fleet: Host, pump: Pump, settings: Any
) -> None:
    """SZ-063: the stream goes on, the source takes requests again, nothing else happens afterwards."""
    settings.DRAIN_LIMIT_S, settings.SARDEENZ_SIM_SPEED = 60.0, 10.0  # the stream outlasts the target's start
    ready = _launched(fleet, pump)
    stream = Stream(ready, 12_000)
    stream.start()
    assert stream.begun.wait(10), stream.cut
    operation = instance_move(ready, actor="anna", gpu_uuids=[fleet.gpus.all()[1].uuid])
    pump.run(lambda: _now(ready).state == S.DRAINING, limit_s=60)
    new = Instance.objects.get(replaces=ready)
    operation_cancel(operation, actor="anna")
    pump.run(lambda: Operation.objects.get(pk=operation.pk).state == "cancelled", limit_s=30)
    assert (_now(ready).state, _now(ready).desired_state) == (S.READY, "running")
    assert (_route()["id"], _ask(_route())) == (ready.pk, 200)
    pump.run(lambda: _now(new).state == S.STOPPED, limit_s=60)
    assert new.ipc_name == "" or not (Path("/dev/shm") / new.ipc_name).exists()
    stream.join(60)
    assert (stream.done, stream.finish, stream.cut) == (True, "length", "")
    reconcile_host(fleet.name)
    reconcile_control()
    pump.settle(1.0)
    assert (_now(ready).state, _now(new).state) == (S.READY, S.STOPPED)
    assert Instance.objects.live().count() == 1


def _faults(row: Instance, *names: str) -> None:
    assert row.attempt is not None
    (Path(row.attempt.run_dir) / "faults.json").write_text(json.dumps(names))


def _fast(settings: Any) -> None:
    settings.HUNG_AFTER_S, settings.PROBE_LIMIT_S, settings.RESTART_BACKOFF_S = 1.0, 2.0, 0.1


def _until_new_start(row: Instance, fleet: Host, pump: Pump, settings: Any) -> Instance:
    """Once it is found, the limits are long again: on a busy machine the new start would seem to hang too."""
    due = time.monotonic()

    def look() -> bool:
        nonlocal due
        if time.monotonic() >= due:
            reconcile_host(fleet.name)
            reconcile_control()
            due = time.monotonic() + 1.0
        now = _now(row)
        if now.state != S.READY:
            settings.HUNG_AFTER_S = settings.PROBE_LIMIT_S = 60.0
        return now.attempt_id != row.attempt_id and now.state == S.READY

    pump.run(look, limit_s=180)
    return _now(row)


def test_hanging_engine_is_found_taken_out_and_started_again(
    ready: Instance, fleet: Host, pump: Pump, settings: Any
) -> None:
    _fast(settings)
    reconcile_host(fleet.name)
    pump.settle()
    _faults(ready, "hang")
    stream = Stream(ready, 100)
    stream.start()
    settings.PROBE_EVERY_S = 1.0
    back = _until_new_start(ready, fleet, pump, settings)
    assert (back.health, back.restart_count) == ("ok", 1)
    steps = list(ready.events.filter(kind="state").order_by("pk").values_list("to_state", flat=True))
    assert steps[3:] == ["unreachable", "failed", "pending", "scheduled", "starting", "ready"]
    assert _ask(_route()) == 200


def test_engine_stopped_by_a_signal_is_found_and_started_again(
    ready: Instance, fleet: Host, pump: Pump, settings: Any
) -> None:
    """SZ-040"""
    _fast(settings)
    assert ready.attempt is not None
    status = process.read_status(Path(ready.attempt.run_dir))
    assert status is not None
    assert status.engine_pid is not None
    os.kill(status.engine_pid, signal.SIGSTOP)
    back = _until_new_start(ready, fleet, pump, settings)
    assert "hung" in back.first_cause.lower()
    assert not Path(f"/proc/{status.engine_pid}").exists()
