from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.utils import timezone

from models_app import dispatch
from models_app.engines.client import EngineClient
from models_app.engines.process import Status
from models_app.engines.progress import Progress
from models_app.models import Instance, LaunchAttempt
from models_app.services.lifecycle import probe
from models_app.states import InstanceState, Stage
from tests.builders import make_host, make_instance, make_model

S = InstanceState
pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    messages: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dispatch, "send", lambda name, *args, **_: messages.append((name, *args)))
    return messages


@pytest.fixture
def row(settings: Any) -> Instance:
    host = make_host(name=settings.SARDEENZ_HOST_NAME)
    return make_instance(model=make_model(served_model_name="a"), host=host, state=S.STARTING)


def _attempt(row: Instance, **fields: Any) -> LaunchAttempt:
    LaunchAttempt.objects.filter(pk=row.attempt_id).update(**fields)
    return LaunchAttempt.objects.get(pk=row.attempt_id)


def _ago(seconds: float) -> Any:
    return timezone.now() - timedelta(seconds=seconds)


def test_stage_is_written_when_it_changes(row: Instance) -> None:
    probe._report_progress(row, _attempt(row), Progress(Stage.LOADING_WEIGHTS, 0.251))
    assert Instance.objects.get().stage == "loading weights"
    assert Instance.objects.get().stage_progress == 0.25


def test_download_does_not_eat_the_start_limit(row: Instance, settings: Any) -> None:
    settings.START_LIMIT_S, settings.DOWNLOAD_LIMIT_S = 60.0, 7200.0
    attempt = _attempt(row, exec_at=_ago(3600))
    row.stage = Stage.DOWNLOADING
    assert not probe._over_time(row, attempt, False)
    probe._report_progress(row, attempt, Progress(Stage.LOADING_WEIGHTS))
    assert not probe._over_time(row, attempt, False)
    attempt.load_started_at = _ago(61)
    assert probe._over_time(row, attempt, False)
    assert "START_LIMIT" in LaunchAttempt.objects.get().advice


def test_download_has_a_limit_of_its_own(row: Instance, settings: Any) -> None:
    settings.DOWNLOAD_LIMIT_S = 60.0
    row.stage = Stage.DOWNLOADING
    assert probe._over_time(row, _attempt(row, exec_at=_ago(61)), False)
    assert "The download took longer" in Instance.objects.get().reason


def _engine(monkeypatch: pytest.MonkeyPatch, *, models: list[str], health: int = 200) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(health)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": name} for name in models]})
        segment = {"ipc_name": "x", "limit_bytes": 5, "capacity_bytes": 9, "effective_limit_bytes": 5}
        status = {"self_ipc_name": "x", "provider": "addon", "kvcached_active": True, "segments": [segment]}
        return httpx.Response(200, json=status)

    made = EngineClient("http://127.0.0.1:9", "t", transport=httpx.MockTransport(answer))
    monkeypatch.setattr(probe, "client", lambda *_, **__: made)


def test_engine_that_lists_another_name_is_never_called_ready(
    row: Instance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _engine(monkeypatch, models=["an old one"])
    assert probe._ready_answer(row, tmp_path) is None


def test_health_alone_is_not_enough(row: Instance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _engine(monkeypatch, models=["a"], health=503)
    assert probe._ready_answer(row, tmp_path) is None


def test_port_on_which_somebody_else_listens_too_is_not_ready(
    row: Instance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _engine(monkeypatch, models=["a"])
    monkeypatch.setattr(probe.process, "port_is_ours", lambda *_: False)
    assert probe._ready_answer(row, tmp_path) is None


def test_ready_tells_its_kv_figures(row: Instance, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _engine(monkeypatch, models=["a", "b"])
    answer = probe._ready_answer(row, tmp_path)
    assert answer is not None
    assert (answer["provider"], answer["effective_limit_bytes"], answer["capacity_bytes"]) == ("addon", 5, 9)


def test_engine_gone_with_a_reboot_starts_again_at_once(row: Instance) -> None:
    _attempt(row, boot_id="an earlier boot")
    status = Status(
        guardian_pid=2**22 + 1, guardian_start_ticks=1, engine_pid=2**22 + 2, engine_start_ticks=1, started_at=0.0
    )
    fresh = Instance.objects.select_related("model", "host", "attempt").get()
    assert probe.end_found(fresh, status)
    fresh.refresh_from_db()
    assert "was restarted" in fresh.reason
    assert fresh.next_restart_at is not None
    assert fresh.next_restart_at <= timezone.now()


def test_engine_gone_without_a_record_is_said_to_be_killed(row: Instance) -> None:
    status = Status(
        guardian_pid=2**22 + 1, guardian_start_ticks=1, engine_pid=2**22 + 2, engine_start_ticks=1, started_at=0.0
    )
    fresh = Instance.objects.select_related("model", "host", "attempt").get()
    assert probe.end_found(fresh, status)
    assert "both were killed" in Instance.objects.get().reason


def test_claim_without_an_engine_is_given_a_moment(row: Instance) -> None:
    fresh = Instance.objects.select_related("model", "host", "attempt").get()
    assert not probe.end_found(fresh, None)


def test_instance_of_another_host_is_not_looked_at(sent: list[Any]) -> None:
    other = make_instance(host=make_host(name="elsewhere"), state=S.STARTING)
    assert not probe.instance_probe(other.pk)
    assert Instance.objects.get().state == S.STARTING
