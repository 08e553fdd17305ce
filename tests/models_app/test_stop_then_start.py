"""Where two do not fit side by side: stopped first, then started there, with the wish kept and the options saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from gpus_app.models import Gpu, Host
from models_app import dispatch
from models_app.errors import Conflict, DoesNotFit
from models_app.models import Instance, LaunchAttempt
from models_app.services.lifecycle import stop
from models_app.services.lifecycle.launch import instance_place
from models_app.services.plans.rollout import instance_move
from models_app.services.plans.stop_then_start import instance_move_stopped
from models_app.states import InstanceState
from tests.builders import GIB, make_gpu, make_host, make_instance, make_key, make_model
from tests.models_app.pages import client_of

S = InstanceState
pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    messages: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dispatch, "send", lambda name, *args, **_: messages.append((name, *args)))
    return messages


@pytest.fixture
def row(settings: Any, tmp_path: Path) -> Instance:
    """Over two of three cards, of which the one in the middle has no room for two of it."""
    settings.SARDEENZ_HOME = tmp_path
    host = make_host(name=settings.SARDEENZ_HOST_NAME)
    cards = [make_gpu(host=host, index=index, total_bytes=20 * GIB) for index in range(3)]
    model = make_model(deployed=True, tensor_parallel_size=2, enable_sleep_mode=True)
    return make_instance(model=model, gpus=cards[:2], reserved_bytes=17 * GIB)


def _target() -> list[str]:
    return [gpu.uuid for gpu in Gpu.objects.filter(index__in=(1, 2))]


def _now(row: Instance) -> Instance:
    return Instance.objects.select_related("model", "host", "attempt").get(pk=row.pk)


def _ended(row: Instance, tmp_path: Path) -> None:
    """Its processes are gone; the host worker looks."""
    LaunchAttempt.objects.update(run_dir=str(tmp_path), ended_at=timezone.now())
    Instance.objects.filter(pk=row.pk).update(state=S.STOPPING)
    stop.instance_stop_step(row.pk)


def test_what_does_not_fit_beside_itself_starts_there_after_its_end(row: Instance, tmp_path: Path) -> None:
    """SZ-067, the way out that its refusal names."""
    with pytest.raises(DoesNotFit, match="stop first"):
        instance_move(row, actor="anna", gpu_uuids=_target())
    instance_move_stopped(row, actor="anna", gpu_uuids=_target())
    assert (row.state, row.desired_state) == (S.DRAINING, "running")
    _ended(row, tmp_path)
    assert _now(row).state == S.PENDING
    assert instance_place(row.pk)
    assert (_now(row).state, _now(row).gpu_uuids) == (S.SCHEDULED, _target())


def test_sleeper_sleeps_there(row: Instance, tmp_path: Path) -> None:
    Instance.objects.update(state=S.SLEEPING, desired_state="sleeping", sleep_level=1)
    moved = instance_move_stopped(_now(row), actor="anna", gpu_uuids=_target())
    assert (moved.state, moved.desired_state) == (S.STOPPING, "sleeping")
    _ended(row, tmp_path)
    assert (_now(row).state, _now(row).desired_state) == (S.PENDING, "sleeping")


def test_what_does_not_fit_there_either_is_refused_before_anything_is_ended(row: Instance) -> None:
    make_instance(model=make_model(), gpus=list(Gpu.objects.filter(index=2)), reserved_bytes=19 * GIB)
    with pytest.raises(DoesNotFit):
        instance_move_stopped(row, actor="anna", gpu_uuids=_target())
    assert (_now(row).state, _now(row).placement_wish) == (S.READY, {})


@pytest.mark.parametrize("state", [S.STARTING, S.STOPPED, S.FAILED])
def test_what_neither_serves_nor_sleeps_is_not_moved(row: Instance, state: InstanceState) -> None:
    Instance.objects.update(state=state)
    with pytest.raises(Conflict, match=state):
        instance_move_stopped(_now(row), actor="anna", gpu_uuids=_target())


def test_stopped_move_by_rest_and_by_the_page(row: Instance, client: Client) -> None:
    headers = {"Authorization": f"Bearer {make_key()[1]}"}
    address = f"/api/v1/instances/{row.pk}/move_stopped"
    answer = client.post(address, {"gpu_uuids": _target()}, content_type="application/json", headers=headers)
    assert (answer.status_code, answer.json()) == (202, {"instance_id": row.pk, "state": "draining"})
    Instance.objects.update(state=S.READY, placement_wish={})
    browser = client_of()
    gpus = [str(gpu.pk) for gpu in Gpu.objects.filter(uuid__in=_target())]
    refused = browser.post(f"/instances/{row.pk}/move/", {"gpu": gpus})
    assert refused.status_code == 422
    assert "stop first" in refused.content.decode()
    assert refused.content.decode().count(" checked") == 2  # what was chosen stays chosen
    browser.post(f"/instances/{row.pk}/move/", {"gpu": gpus, "stop_first": "on"})
    assert (_now(row).state, _now(row).placement_wish["gpu_uuids"]) == (S.DRAINING, _target())
    assert Host.objects.count() == 1
