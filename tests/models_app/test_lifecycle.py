"""The whole way of one instance, over a real simulated engine: the short version of ``test_pipeline``."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from gpus_app.models import Host
from models_app import dispatch
from models_app.engines import process
from models_app.models import Instance
from models_app.services.lifecycle.launch import model_launch
from models_app.services.lifecycle.stop import instance_stop
from models_app.services.memory.kvcache import kvcache_limit_set
from models_app.services.models import model_create
from models_app.states import InstanceState
from tests.builders import GIB
from tests.models_app.pump import Pump, kill

S = InstanceState
pytestmark = pytest.mark.django_db(transaction=True)


def _now(row: Instance) -> Instance:
    return Instance.objects.select_related("attempt", "host", "model").get(pk=row.pk)


def test_launch_limit_and_stop(fleet: Host, pump: Pump) -> None:
    model = model_create(actor="anna", served_model_name="a", source="catalogue", model="Qwen/Qwen3-0.6B")
    (row,) = model_launch(model, actor="anna")
    pump.run(lambda: _now(row).state == S.READY)
    row = _now(row)
    answer = httpx.post(
        f"{row.base_url}/v1/completions",
        headers={"Authorization": f"Bearer {row.engine_token}"},
        json={"model": "a", "prompt": "hello", "max_tokens": 4},
    )
    assert answer.status_code == 200
    assert [one.pk for one in model_launch(model, actor="bert")] == [row.pk], "a second click makes no second one"

    kvcache_limit_set(row, size="3G", actor="anna", wait_s=0)
    pump.run(lambda: _now(row).limit_status == "applied")
    bundle = _now(row).bundle_bytes or 0
    assert 3 * GIB - bundle < (_now(row).effective_limit_bytes or 0) <= 3 * GIB

    instance_stop(row, actor="anna")
    pump.run(lambda: _now(row).state == S.STOPPED)
    attempt = _now(row).attempt
    assert attempt is not None
    assert attempt.exit_code == 0
    assert process.members(Path(attempt.run_dir)) == []
    assert not (Path("/dev/shm") / row.ipc_name).exists()


def test_killed_engine_is_failed_with_its_cause(fleet: Host, pump: Pump, settings: Any) -> None:
    model = model_create(actor="anna", served_model_name="a", source="catalogue", model="Qwen/Qwen3-0.6B")
    (row,) = model_launch(model, actor="anna")
    pump.run(lambda: _now(row).state == S.READY)
    attempt = _now(row).attempt
    assert attempt is not None
    kill(attempt.engine_pid or 0)
    pump.send(dispatch.PROBE, row.pk, queue="")
    pump.run(lambda: _now(row).state == S.FAILED)
    attempt.refresh_from_db()
    assert attempt.signal == signal.SIGKILL
    assert attempt.cause
    assert _now(row).next_restart_at is not None
    pump.run(lambda: process.members(Path(attempt.run_dir)) == [])
