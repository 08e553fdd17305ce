"""A card that is out of order: closed, its instances moved or ended with the reason, told, and no loop on it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from gpus_app.models import Gpu, Host
from gpus_app.probes.base import GpuReading
from gpus_app.probes.grades import Grade
from gpus_app.services import gpu_uncordon, gpus_sync
from models_app import dispatch
from models_app.models import AuditEntry, Instance, Operation
from models_app.services.lifecycle.launch import instance_place
from models_app.services.plans import control
from models_app.services.plans.gpu_faults import gpu_faults_check
from models_app.services.plans.operations import operation_step
from models_app.states import InstanceState
from tests.builders import GIB, make_gpu, make_host, make_instance, make_key, make_model
from tests.models_app.pages import client_of

S = InstanceState
XID = "XID 79: the GPU has fallen off the bus."
pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    messages: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dispatch, "send", lambda name, *args, **_: messages.append((name, *args)))
    return messages


@pytest.fixture
def host(settings: Any, tmp_path: Path) -> Host:
    settings.SARDEENZ_HOME = tmp_path
    host = make_host(name=settings.SARDEENZ_HOST_NAME)
    for index in range(2):
        make_gpu(host=host, index=index)
    return host


def _break(host: Host, index: int = 0, *, grade: Grade = Grade.FATAL, error: str | None = XID) -> Gpu:
    readings = [
        GpuReading(
            gpu.uuid,
            gpu.index,
            gpu.name,
            gpu.total_bytes,
            error=error if gpu.index == index else None,
            grade=grade if gpu.index == index and error else Grade.NONE,
        )
        for gpu in host.gpus.all()
    ]
    gpus_sync(host, readings=readings)
    return host.gpus.get(index=index)


def _on(host: Host, index: int = 0, **fields: Any) -> Instance:
    model = fields.pop("model", None) or make_model(deployed=True)
    return make_instance(model=model, gpus=[host.gpus.get(index=index)], **fields)


def _now(row: Instance) -> Instance:
    return Instance.objects.select_related("model", "host").get(pk=row.pk)


def test_fatal_fault_closes_the_card_and_is_on_record(host: Host, on_commit: Any) -> None:
    with on_commit():
        gpu = _break(host)
        _break(host)
    assert (gpu.state, gpu.grade, gpu.cordoned, gpu.cordon_reason) == ("faulty", "fatal", True, XID)
    (entry,) = AuditEntry.objects.filter(action="gpu.fault")
    assert (entry.actor, entry.detail) == ("sampler", XID)


def test_card_that_answers_again_stays_closed_until_it_is_opened(host: Host) -> None:
    _break(host)
    gpu = _break(host, error=None)
    assert (gpu.state, gpu.grade, gpu.cordoned, gpu.cordon_reason) == ("ok", "", True, XID)
    gpu_uncordon(gpu, actor="anna")
    gpu.refresh_from_db()
    assert (gpu.cordoned, gpu.cordon_reason) == (False, "")


@pytest.mark.parametrize("grade", [Grade.PASSING, Grade.BLIND])
def test_lesser_faults_take_nobody_new_and_leave_alone_what_runs(host: Host, grade: Grade) -> None:
    row = _on(host)
    gpu = _break(host, grade=grade)
    gpu_faults_check()
    assert (gpu.state, gpu.cordoned, _now(row).state) == ("faulty", False, S.READY)
    newcomer = make_instance(state=S.PENDING, model=make_model())
    assert instance_place(newcomer.pk)
    assert _now(newcomer).gpu_uuids == [host.gpus.get(index=1).uuid]


def test_fault_that_gets_worse_closes_the_card(host: Host) -> None:
    assert not _break(host, grade=Grade.PASSING, error="XID 94: contained.").cordoned
    assert _break(host).cordoned


def test_instance_moves_to_another_card_and_serves_until_then(host: Host) -> None:
    row = _on(host)
    _break(host)
    gpu_faults_check()
    operation = Operation.objects.get(kind="replace")
    assert "GPU 0 of testhost is out of order" in operation.title
    operation_step(operation.pk)
    new = Instance.objects.get(replaces=row)
    assert instance_place(new.pk)
    assert (_now(row).state, _now(new).gpu_uuids) == (S.READY, [host.gpus.get(index=1).uuid])
    gpu_faults_check()
    assert Operation.objects.count() == 1


def test_what_fits_nowhere_ends_with_the_reason_and_waits_without_a_loop(host: Host, settings: Any) -> None:
    row = _on(host)
    _on(host, 1, reserved_bytes=79 * GIB)
    _break(host)
    gpu_faults_check()
    found = _now(row)
    assert found.state == S.FAILED
    assert found.reason == f"GPU 0 of testhost is out of order: {XID} It starts again where there is room."
    assert found.first_cause == f"GPU 0 of testhost is out of order: {XID}"
    control.restarts_due()
    for _ in range(3):
        control.places_check()
    found = _now(row)
    assert (found.state, Instance.objects.filter(state=S.SCHEDULED).count()) == (S.PENDING, 0)
    assert "is out of order" in found.reason


def test_bound_to_the_faulty_card_by_hand_waits_for_it(host: Host, settings: Any) -> None:
    settings.PLACE_LIMIT_S = 0.0
    uuid = host.gpus.get(index=0).uuid
    row = _on(host, model=make_model(deployed=True, gpu_uuids=[uuid]))
    _break(host)
    gpu_faults_check()
    control.restarts_due()
    Instance.objects.update(state_since=timezone.now() - timedelta(hours=1))
    control.places_check()
    assert (_now(row).state, _now(row).desired_state) == (S.PENDING, "running")
    gpu = _break(host, error=None)
    gpu_uncordon(gpu, actor="anna")
    control.places_check()
    assert _now(row).gpu_uuids == [uuid]


def test_move_that_came_to_nothing_is_not_begun_again(host: Host) -> None:
    row = _on(host)
    _break(host)
    gpu_faults_check()
    Operation.objects.update(state="failed")
    gpu_faults_check()
    assert (_now(row).state, Operation.objects.count()) == (S.FAILED, 1)
    assert _now(row).next_restart_at is not None


def test_policy_never_ends_with_the_reason_and_is_not_moved(host: Host) -> None:
    row = _on(host, model=make_model(restart_policy="never"))
    _break(host)
    gpu_faults_check()
    found = _now(row)
    assert (found.state, found.next_restart_at, Operation.objects.count()) == (S.FAILED, None, 0)
    assert "out of order" in found.reason


def test_starts_on_a_faulty_card_are_placed_anew(host: Host) -> None:
    scheduled = _on(host, state=S.SCHEDULED)
    starting = _on(host, state=S.STARTING)
    _break(host)
    gpu_faults_check()
    control.restarts_due()
    control.places_check()
    assert {_now(scheduled).state, _now(starting).state} == {S.SCHEDULED}
    assert _now(scheduled).gpu_uuids == _now(starting).gpu_uuids == [host.gpus.get(index=1).uuid]


def test_sleeper_moves_too_and_what_is_stopping_does_not(host: Host) -> None:
    sleeper = _on(host, state=S.SLEEPING, desired_state="sleeping", model=make_model(enable_sleep_mode=True))
    stopping = _on(host, state=S.DRAINING, desired_state="stopped")
    _break(host)
    gpu_faults_check()
    (operation,) = Operation.objects.filter(kind="replace")
    assert (operation.model, operation.steps[0]["asleep"]) == (sleeper.model, True)
    assert _now(stopping).state == S.DRAINING


def test_nothing_is_moved_in_a_freeze_or_from_a_silent_host(host: Host) -> None:
    row = _on(host)
    _break(host)
    for name in ("hb", "hc"):
        make_host(name=name)
    Host.objects.exclude(pk=host.pk).update(
        worker_seen_at=timezone.now() - timedelta(hours=1), sampler_seen_at=timezone.now() - timedelta(hours=1)
    )
    gpu_faults_check()
    assert _now(row).state == S.READY
    Host.objects.update(worker_seen_at=None, sampler_seen_at=None)
    gpu_faults_check()
    assert (_now(row).state, Operation.objects.count()) == (S.READY, 0)


def test_fault_is_told_on_pages_in_rest_and_metrics(host: Host, client: Any, valkey: str) -> None:
    _on(host)
    gpu = _break(host)
    page = client_of().get("/").content.decode()
    assert "GPU 0 of testhost is faulty" in page
    assert XID in page
    assert "closed by the fault" in client_of().get("/gpus/").content.decode()
    headers = {"Authorization": f"Bearer {make_key()[1]}"}
    shown = client.get(f"/api/v1/gpus/{gpu.uuid}", headers=headers).json()
    assert (shown["state"], shown["grade"], shown["cordon_reason"]) == ("faulty", "fatal", XID)
    alerts = client.get("/api/v1/attention", headers=headers).json()
    assert {"title": "GPU 0 of testhost is faulty", "text": XID, "tone": "bad"}.items() <= alerts[0].items()
    metrics = client.get("/metrics", headers=headers).content.decode()
    labels = f'gpu="{gpu.uuid}"'
    assert any(
        line.startswith("sardeenz_gpu_faulty") and labels in line and line.endswith(" 1.0")
        for line in metrics.splitlines()
    )
    assert any(
        line.startswith("sardeenz_gpu_cordoned") and labels in line and line.endswith(" 1.0")
        for line in metrics.splitlines()
    )
    _break(host, error=None)
    assert "GPU 0 of testhost is closed by a fault" in client_of().get("/").content.decode()
