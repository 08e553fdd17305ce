"""Starts that go differently, over real simulated engines: faults, foreign endpoints, none at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpus_app.models import Host
from gpus_app.probes.segments import read_segment
from models_app import dispatch
from models_app.engines import process
from models_app.errors import Conflict
from models_app.models import Instance
from models_app.services.access import client
from models_app.services.lifecycle.launch import model_launch
from models_app.services.memory.kvcache import kvcache_limit_set
from models_app.services.memory.limit_apply import limit_apply, trim_apply
from models_app.services.memory.limit_foreign import write_limit
from models_app.services.models import model_create
from models_app.states import InstanceState
from tests.builders import GIB
from tests.models_app.pump import Pump

S = InstanceState
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]


def _now(row: Instance) -> Instance:
    return Instance.objects.select_related("attempt", "host", "model").get(pk=row.pk)


def _launch(**fields: Any) -> Instance:
    given: dict[str, Any] = {"served_model_name": "a", "source": "catalogue", "model": "Qwen/Qwen3-0.6B"}
    return model_launch(model_create(actor="anna", **(given | fields)), actor="anna")[0]


def _ready(pump: Pump, settings: Any, faults: str) -> Instance:
    settings.SARDEENZ_SIM_FAULTS = faults
    row = _launch()
    pump.run(lambda: _now(row).state == S.READY)
    return _now(row)


def test_kvcached_that_did_not_take_hold_is_shown_and_no_limit_is_offered(
    fleet: Host, pump: Pump, settings: Any
) -> None:
    row = _ready(pump, settings, "kvcached_inactive")
    assert row.provider == "none"
    assert "kvcached is not active" in row.health_reason
    with pytest.raises(Conflict, match="without kvcached"):
        kvcache_limit_set(row, size="3G", actor="anna", wait_s=0)


def test_engine_without_endpoints_is_limited_through_its_segment(fleet: Host, pump: Pump, settings: Any) -> None:
    row = _ready(pump, settings, "no_addon")
    assert row.provider == "shm"
    kvcache_limit_set(row, size="3G", actor="anna", wait_s=0)
    pump.run(lambda: _now(row).limit_acked_revision == 1)
    assert read_segment(row.ipc_name).limit_bytes == 3 * GIB
    assert "next allocation" in _now(row).limit_message
    trim_apply(row.pk, "x", "anna")
    assert _now(row).limit_answer["trim"]["status"] == "rejected"


def test_engine_with_the_pull_requests_endpoints_keeps_the_wanted_limit_after_a_trim(
    fleet: Host, pump: Pump, settings: Any
) -> None:
    row = _ready(pump, settings, "pr324")
    assert row.provider == "pr324"
    kvcache_limit_set(row, size="3G", actor="anna", wait_s=0)
    pump.run(lambda: _now(row).limit_acked_revision == 1)
    assert read_segment(row.ipc_name).limit_bytes == 3 * GIB
    trim_apply(row.pk, "x", "anna")
    assert read_segment(row.ipc_name).limit_bytes == 3 * GIB


def test_foreign_writers_limit_is_put_back_and_on_record(fleet: Host, pump: Pump, settings: Any) -> None:
    row = _ready(pump, settings, "none")
    kvcache_limit_set(row, size="3G", actor="anna", wait_s=0)
    pump.run(lambda: _now(row).limit_status == "applied")
    write_limit(row.ipc_name, 5 * GIB)
    pump.send(dispatch.LIMIT, row.pk, queue="")
    pump.run(lambda: row.events.filter(kind="drift").exists())
    pump.run(lambda: limit_apply(row.pk) or read_segment(row.ipc_name).limit_bytes <= 3 * GIB)


@pytest.mark.parametrize("faults", ["no_addon", "pr324"])
def test_strangers_limit_on_an_engine_without_our_add_on_is_put_back_and_on_record(
    fleet: Host, pump: Pump, settings: Any, faults: str
) -> None:
    row = _ready(pump, settings, faults)
    kvcache_limit_set(row, size="3G", actor="anna", wait_s=0)
    pump.run(lambda: _now(row).limit_acked_revision == 1)
    limit_apply(row.pk)
    assert not row.events.filter(kind="drift").exists(), "what we wrote ourselves is no drift"
    write_limit(row.ipc_name, 200 * GIB)
    limit_apply(row.pk)  # what the sampler's hint brings about
    assert read_segment(row.ipc_name).limit_bytes == 3 * GIB
    drift = row.events.get(kind="drift")
    assert drift.facts == {"found_bytes": 200 * GIB, "wanted_bytes": 3 * GIB}
    trim_apply(row.pk, "x", "anna")
    limit_apply(row.pk)
    assert row.events.filter(kind="drift").count() == 1, "nor is what our own trim does to the limit"


@pytest.mark.parametrize("faults", ["no_addon", "pr324"])
def test_limit_above_capacity_is_put_back_where_none_was_ever_set(
    fleet: Host, pump: Pump, settings: Any, faults: str
) -> None:
    """A3: pages would be handed out twice."""
    row = _ready(pump, settings, faults)
    capacity = row.capacity_bytes or 0
    assert row.limit_bytes is None and read_segment(row.ipc_name).limit_bytes == capacity > 0
    limit_apply(row.pk)
    write_limit(row.ipc_name, capacity - 4 * (row.bundle_bytes or 2**27))
    limit_apply(row.pk)
    assert not row.events.filter(kind="drift").exists(), "below capacity it may be whatever its owner likes"
    write_limit(row.ipc_name, 200 * GIB)
    limit_apply(row.pk)
    assert read_segment(row.ipc_name).limit_bytes == capacity
    assert row.events.get(kind="drift").facts["found_bytes"] == 200 * GIB


def test_start_that_takes_too_long_fails_and_its_whole_tree_is_ended(fleet: Host, pump: Pump, settings: Any) -> None:
    settings.SARDEENZ_SIM_FAULTS = "slow_load:100000"
    settings.START_LIMIT_S = 2.0
    row = _launch()
    pump.run(lambda: _now(row).state == S.FAILED)
    attempt = _now(row).attempt
    assert attempt is not None
    assert "took longer than 2 s" in attempt.cause
    pump.run(lambda: process.members(Path(attempt.run_dir)) == [])


@pytest.mark.parametrize("stage", ["loading_weights", "capturing_graphs"])
def test_crash_at_a_stage_is_one_failure(fleet: Host, pump: Pump, settings: Any, stage: str) -> None:
    settings.SARDEENZ_SIM_FAULTS = f"crash_at:{stage}"
    row = _launch()
    pump.run(lambda: _now(row).state == S.FAILED)
    pump.settle(1.0)
    assert row.events.filter(to_state="failed").count() == 1
    assert _now(row).first_cause


def test_stop_that_meets_a_hanging_handshake_is_carried_through(fleet: Host, pump: Pump, settings: Any) -> None:
    from models_app.services.lifecycle.stop import instance_stop

    settings.SARDEENZ_SIM_FAULTS = "sigterm_hang"
    settings.SARDEENZ_SIM_SPEED = 1.0
    settings.STOP_LIMIT_S = 2.0
    row = _launch()
    pump.run(lambda: _now(row).state == S.STARTING)
    pump.settle(2.0)
    instance_stop(row, actor="anna")
    pump.run(lambda: _now(row).state == S.STOPPED)


@pytest.mark.parametrize("wanted", [None, "3G"])
def test_limit_that_the_engine_has_put_back_before_anybody_asked_is_on_record_all_the_same(
    fleet: Host, pump: Pump, settings: Any, wanted: str | None
) -> None:
    """The sampler's question makes the add-on put it back; the worker asks later, and must still tell of it."""
    row = _ready(pump, settings, "none")
    if wanted:
        kvcache_limit_set(row, size=wanted, actor="anna", wait_s=0)
        pump.run(lambda: _now(row).limit_status == "applied")
    good = read_segment(row.ipc_name).limit_bytes
    write_limit(row.ipc_name, 200 * GIB)
    client(row).kvcache_status()  # as the sampler asks
    assert read_segment(row.ipc_name).limit_bytes == good
    for _ in range(2):
        limit_apply(row.pk)
    assert row.events.get(kind="drift").facts["found_bytes"] == 200 * GIB
