"""What goes wrong between kvcached and those around it, over real simulated engines: deleted segments, dead owners, two
GPUs, one name.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gpus_app.models import Host
from gpus_app.probes.segments import read_segment
from gpus_app.probes.sim_ledger import Ledger
from gpus_app.probes.simulated import SimulatedProbe
from gpus_app.sampler.observer import Hint, Observer
from gpus_app.sampler.record import InstancePart
from models_app.engines import process
from models_app.models import Instance
from models_app.services.lifecycle.launch import model_launch
from models_app.services.memory.kvcache import kvcache_limit_set, kvcache_trim
from models_app.services.memory.limit_apply import limit_apply, trim_apply
from models_app.services.models import model_create
from models_app.services.plans.control import reconcile_control
from models_app.services.plans.reconcile import reconcile_host
from models_app.states import InstanceState
from tests.builders import GIB
from tests.models_app.pump import Pump

S = InstanceState
SHM = Path("/dev/shm")
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]


def _now(row: Instance) -> Instance:
    return Instance.objects.select_related("attempt", "host", "model").get(pk=row.pk)


def _ready(pump: Pump, name: str = "a", **fields: Any) -> Instance:
    given: dict[str, Any] = {"served_model_name": name, "source": "catalogue", "model": "Qwen/Qwen3-0.6B"}
    (row,) = model_launch(model_create(actor="anna", **(given | fields)), actor="anna")
    pump.run(lambda: _now(row).state == S.READY)
    return _now(row)


@pytest.fixture
def observer(fleet: Host, settings: Any) -> Any:
    found = Observer(
        host_name=fleet.name, probe=SimulatedProbe(settings.SARDEENZ_SIM_DIR), run_dir=settings.SARDEENZ_RUN_DIR
    )
    yield found
    found.close()


def _parts(observer: Observer, row: Instance) -> list[InstancePart]:
    return [part for gpu in observer.look().record["gpus"] for part in gpu["instances"] if part["id"] == row.pk]


def test_segment_deleted_under_a_live_engine_is_made_again_with_its_limit(
    fleet: Host, pump: Pump, observer: Observer
) -> None:
    """C5, ``kvctl delete``: shown as lost, not as nothing in use; the limit is put right and the act is on record."""
    row = _ready(pump)
    kvcache_limit_set(row, size="3G", actor="anna", wait_s=0)
    pump.run(lambda: _now(row).limit_status == "applied")
    limit = read_segment(row.ipc_name).limit_bytes
    observer.look()
    observer.look()
    (SHM / row.ipc_name).unlink()
    look = observer.look()
    (part,) = [part for gpu in look.record["gpus"] for part in gpu["instances"] if part["id"] == row.pk]
    assert (part["state"], part["used"]) == ("lost", None)
    assert Hint("drift", row.pk) in look.hints
    limit_apply(row.pk)  # what the hint brings about
    again = read_segment(row.ipc_name)
    assert again.limit_bytes == limit and again.used_bytes > 0
    assert "deleted its KV segment" in row.events.get(kind="drift").reason
    (part,) = _parts(observer, row)
    assert part["state"] == "ok"


def test_segment_of_a_killed_engine_is_stale_and_its_successor_has_its_own(
    fleet: Host, pump: Pump, observer: Observer, settings: Any
) -> None:
    """C2, C12: SIGKILL for all of it leaves the segment with its last numbers, which are not the new engine's."""
    settings.RESTART_BACKOFF_S = 0.1
    row = _ready(pump)
    kvcache_limit_set(row, size="3G", actor="anna", wait_s=0)
    pump.run(lambda: _now(row).limit_status == "applied")
    assert row.attempt is not None
    old = row.ipc_name
    for victim in process.members(Path(row.attempt.run_dir)):
        os.kill(victim.pid, signal.SIGKILL)

    def again() -> bool:
        reconcile_host(fleet.name)
        reconcile_control()
        now = _now(row)
        return now.state == S.READY and now.attempt_id != row.attempt_id

    pump.run(again, limit_s=60)
    new = _now(row)
    assert new.ipc_name != old
    assert not (SHM / old).exists(), "the dead one's segment is removed"
    pump.run(lambda: _now(row).limit_status == "applied")
    assert read_segment(new.ipc_name).limit_bytes <= 3 * GIB, "the wanted limit outlives the restart"
    assert {part["ipc"] for part in _parts(observer, row) if part["state"] != "stale"} == {new.ipc_name}


def test_two_of_one_model_never_share_a_segment(fleet: Host, pump: Pump) -> None:
    """C4: kvcached would overwrite the first one's numbers, and take the file away with whoever ends first."""
    model = model_create(
        actor="anna", served_model_name="twins", source="catalogue", model="Qwen/Qwen3-0.6B", replicas=2
    )
    rows = model_launch(model, actor="anna")
    pump.run(lambda: all(_now(row).state == S.READY for row in rows), limit_s=60)
    names = {_now(row).ipc_name for row in rows}
    assert len(names) == 2 and all((SHM / name).exists() for name in names)


def test_engine_over_two_gpus_has_one_limit_and_takes_it_on_both(
    fleet: Host, pump: Pump, observer: Observer, settings: Any
) -> None:
    """D11, E4: the segment's bytes are those of one GPU; what comes back comes back on each."""
    row = _ready(pump, tensor_parallel_size=2)
    ledger = Ledger(settings.SARDEENZ_SIM_DIR)
    before = [ledger.used_bytes(uuid) for uuid in row.gpu_uuids]
    assert len(before) == 2 and before[0] == before[1] > GIB
    observer.look()
    parts = _parts(observer, row)
    assert len(parts) == 2 and parts[0]["used"] == parts[1]["used"] == read_segment(row.ipc_name).used_bytes
    assert len(list(SHM.glob(f"{row.ipc_name}*"))) == 1, "the workers have none of their own"
    wanted = row.safety_floor_bytes or 0
    kvcache_limit_set(row, size=wanted, actor="anna", wait_s=0)
    pump.run(lambda: _now(row).limit_status == "applied")
    assert read_segment(row.ipc_name).limit_bytes <= wanted
    trim_apply(row.pk, "x", "anna")
    freed = _now(row).limit_answer["trim"]["freed_bytes"]
    after = [ledger.used_bytes(uuid) for uuid in row.gpu_uuids]
    assert freed > 0 and [was - now for was, now in zip(before, after, strict=True)] == [freed, freed]


def test_trim_of_what_is_not_there_is_told(fleet: Host, pump: Pump) -> None:
    row = _ready(pump)
    trim_apply(row.pk, "x", "anna")
    trim_apply(row.pk, "y", "anna")
    assert _now(row).limit_answer["trim"]["freed_bytes"] == 0
    assert kvcache_trim(row, actor="anna", wait_s=0).status == "pending"
