"""From *wanted* to *gone* through the controller's own services, on either kind of engine. Only Celery is left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpus_app.models import Host
from gpus_app.probes.sim_ledger import ensure_gpus
from models_app.engines import process, rundir
from models_app.engines.identity import installation_id
from models_app.engines.versions import detect_versions
from models_app.models import Instance
from models_app.services.lifecycle.launch import model_launch
from models_app.services.lifecycle.stop import instance_stop
from models_app.services.models import model_create
from models_app.states import InstanceState
from tests.builders import GIB, make_gpu, make_host
from tests.contract.kit import LIMIT_S, Kit
from tests.models_app.pump import Pump

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.xdist_group("contract")]


@pytest.fixture
def fleet(db: None, kit: Kit, settings: Any, tmp_path: Path) -> Iterator[Host]:
    """This machine with one card, as far as the books go: a CPU build of vLLM does not look at it."""
    settings.SARDEENZ_HOME = tmp_path
    settings.SARDEENZ_RUN_DIR = tmp_path / "runs"
    settings.SARDEENZ_SIM_DIR = tmp_path / "gpus"
    settings.SARDEENZ_SIM_SPEED = 20.0
    settings.SARDEENZ_ENGINE = kit.kind
    settings.SARDEENZ_VLLM = kit.vllm_command
    settings.SARDEENZ_MODEL_ROOTS = [kit.models]
    settings.SARDEENZ_HF_TOKEN = None
    settings.START_LIMIT_S = LIMIT_S
    host = make_host(name=settings.SARDEENZ_HOST_NAME, engine_kind=kit.kind)
    if kit.kind == "vllm":
        host.versions = detect_versions(kit.vllm_command)
        host.save(update_fields=["versions"])
    for card in ensure_gpus(settings.SARDEENZ_SIM_DIR, 1, 80 * GIB, "contract"):
        make_gpu(host=host, index=card.index, uuid=card.uuid, name=card.name, total_bytes=card.total_bytes)
    yield host
    for folder in rundir.run_dirs(settings.SARDEENZ_RUN_DIR):
        process.terminate(folder, limit_s=0)
        process.cleanup(folder)
    assert process.find_marked(installation_id(tmp_path)) == []


def test_a_launch_becomes_ready_is_stopped_and_leaves_nothing(
    kit: Kit, fleet: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    pump = Pump(monkeypatch)
    model = model_create(
        actor="anna",
        served_model_name="tiny",
        source="local",
        model=str(kit.models / "tiny"),
        max_model_len=512,
        dtype="float32",
        enforce_eager=True,
        kvcached=False,
        load_format="dummy",
        extra_args="--max-num-seqs 8",
    )
    (row,) = model_launch(model, actor="anna")

    def state() -> str:
        return str(Instance.objects.values_list("state", flat=True).get(pk=row.pk))

    pump.run(lambda: state() in (InstanceState.READY, InstanceState.FAILED), limit_s=LIMIT_S)
    row.refresh_from_db()
    assert row.state == InstanceState.READY, row.reason
    assert row.attempt is not None
    assert (row.provider, row.attempt.memory["max_model_len"]) == ("none", 512)
    assert row.attempt.memory["graphs_bytes"] == 0

    instance_stop(row, actor="anna")
    pump.run(lambda: state() == InstanceState.STOPPED, limit_s=LIMIT_S)
    attempt = Instance.objects.get(pk=row.pk).attempt
    assert attempt is not None
    assert (attempt.exit_code, attempt.signal) == (0, None)
    run_dir = Path(attempt.run_dir)
    assert process.members(run_dir) == []
    status = process.read_status(run_dir)
    assert status is not None and status.cleaned_at is not None
    assert [name for name in status.shared_memory or {} if Path(name).exists()] == []
