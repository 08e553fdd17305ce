"""Engines that live and do nothing: what moves counts, a probe proves, a busy one is left alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from models_app import dispatch
from models_app.engines.client import EngineRefused
from models_app.engines.metrics import EngineMetrics
from models_app.errors import EngineUnavailable
from models_app.models import AuditEntry, Instance
from models_app.services.lifecycle import health
from models_app.services.lifecycle.health import health_check
from models_app.states import InstanceState
from tests.builders import GIB, make_gpu, make_host, make_instance

S = InstanceState
pytestmark = pytest.mark.django_db
T = 1_000_000.0


class Engine:
    """Stands for every client of the engine: figures, and what a probe gets."""

    def __init__(self) -> None:
        self.figures: list[EngineMetrics | None] = [EngineMetrics()]
        self.token: str | Exception = "1"
        self.probes = 0
        self.stuck: list[dict[str, Any]] = []

    def metrics(self) -> EngineMetrics:
        now = self.figures.pop(0) if len(self.figures) > 1 else self.figures[0]
        if now is None:
            raise EngineUnavailable("silent", reason="timeout")
        return now

    def probe_token(self, model: str) -> str:
        self.probes += 1
        if isinstance(self.token, Exception):
            raise self.token
        return self.token

    def kvcache_status(self) -> dict[str, Any]:
        return {"requests": {"running": 0, "waiting": len(self.stuck), "stuck": self.stuck}}


SILENT = EngineUnavailable("The engine did not answer.", reason="timeout")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Engine:
    engine = Engine()
    monkeypatch.setattr(health, "client", lambda *_, **__: engine)
    monkeypatch.setattr(dispatch, "send", lambda *_, **__: None)
    settings.HUNG_AFTER_S, settings.PROBE_EVERY_S, settings.PROBE_LIMIT_S = 60.0, 300.0, 5.0
    return engine


@pytest.fixture
def row(settings: Any) -> Instance:
    host = make_host(name=settings.SARDEENZ_HOST_NAME)
    make_gpu(host=host)
    return make_instance(host=host)


def _at(row: Instance, *seconds: float) -> Instance:
    for second in seconds:
        health_check(row.pk, now=T + second)
    row.refresh_from_db()
    return row


def test_running_without_a_token_and_a_failed_probe_is_hung(row: Instance, engine: Engine) -> None:
    engine.figures, engine.token = [EngineMetrics(running=1, generation_tokens=10)], SILENT
    assert (_at(row, 0, 10, 50).state, engine.probes) == (S.READY, 0)
    _at(row, 71)
    assert (row.state, row.health, row.is_routable) == (S.FAILED, "hung", False)
    assert row.next_restart_at is not None
    assert "1 running and no token for 61 s" in row.reason
    steps = list(row.events.filter(kind="state").order_by("pk").values_list("to_state", flat=True))
    assert steps == ["unreachable", "failed"]
    assert AuditEntry.objects.filter(action="instance.hung").exists()


def test_hung_engine_whose_policy_is_never_is_taken_out_and_kept(row: Instance, engine: Engine) -> None:
    row.model.__class__.objects.update(restart_policy="never")
    engine.figures, engine.token = [EngineMetrics(running=1)], SILENT
    _at(row, 0, 10, 71)
    assert (row.state, row.health) == (S.UNREACHABLE, "hung")
    assert "Hung" in row.health_reason
    engine.token = "1"
    assert (_at(row, 80).state, row.health) == (S.READY, "ok")


@pytest.mark.parametrize("moving", ["generation_tokens", "prompt_tokens"])
def test_engine_whose_tokens_move_is_never_probed(row: Instance, engine: Engine, moving: str) -> None:
    engine.token = SILENT
    for second in range(0, 600, 30):
        figures: dict[str, Any] = {moving: float(second)}
        engine.figures = [replace(EngineMetrics(running=8), **figures)]
        _at(row, second)
    assert (row.state, row.health, engine.probes) == (S.READY, "ok", 0)
    assert row.last_progress_at is not None


def test_busy_engine_is_not_killed_by_its_probe(row: Instance, engine: Engine) -> None:
    """No token for the probe, but others got theirs while it waited."""
    still, moved = EngineMetrics(running=9), EngineMetrics(running=9, generation_tokens=40)
    engine.token = SILENT
    engine.figures = [still]
    _at(row, 0, 10)
    engine.figures = [still, moved]
    _at(row, 71)
    assert (row.state, row.health, engine.probes) == (S.READY, "busy", 1)


def test_probe_that_gets_a_token_clears_the_suspicion(row: Instance, engine: Engine) -> None:
    engine.figures = [EngineMetrics(running=1)]
    _at(row, 0, 10, 71)
    assert (row.state, engine.probes) == (S.READY, 1)
    _at(row, 80)
    assert engine.probes == 1


@pytest.mark.parametrize("token", ["1", EngineRefused("too long", code="bad_request", status=400)])
def test_idle_engine_makes_one_token_now_and_then(row: Instance, engine: Engine, token: Any) -> None:
    engine.token = token
    _at(row, 0, 10, 299)
    assert engine.probes == 0
    _at(row, 301, 310, 600)
    assert (engine.probes, row.state) == (1, S.READY)
    _at(row, 602)
    assert engine.probes == 2


def test_idle_engine_that_makes_no_token_is_hung(row: Instance, engine: Engine) -> None:
    engine.token = SILENT
    _at(row, 0, 10, 301)
    assert (row.state, row.health) == (S.FAILED, "hung")
    assert "nothing to do" in row.reason


def test_traffic_within_the_window_makes_the_probe_needless(row: Instance, engine: Engine) -> None:
    _at(row, 0)
    engine.figures = [EngineMetrics(generation_tokens=7)]
    _at(row, 200, 301, 499)
    assert engine.probes == 0


def test_long_prompt_that_came_during_an_idle_probe_is_no_hang(row: Instance, engine: Engine) -> None:
    engine.token = SILENT
    engine.figures = [EngineMetrics()]
    _at(row, 0)
    engine.figures = [EngineMetrics(), EngineMetrics(running=2)]
    _at(row, 301)
    assert (row.state, row.health) == (S.READY, "busy")


def test_probing_can_be_switched_off_and_spares_models_that_go_to_sleep(
    row: Instance, engine: Engine, settings: Any
) -> None:
    settings.PROBE_EVERY_S = 0.0
    _at(row, 0, 10_000)
    settings.PROBE_EVERY_S = 300.0
    row.model.__class__.objects.update(idle_sleep_after_s=3600)
    _at(row, 20_000)
    assert engine.probes == 0


def test_engine_that_answers_nothing_at_all_is_hung_in_the_end(row: Instance, engine: Engine) -> None:
    engine.figures, engine.token = [None], SILENT
    assert (_at(row, 0, 30, 59).state, engine.probes) == (S.READY, 0)
    assert (_at(row, 61).state, row.health) == (S.FAILED, "hung")


def test_short_silence_is_forgotten(row: Instance, engine: Engine) -> None:
    engine.token = SILENT
    for second, figures in ((0, None), (30, EngineMetrics()), (70, None), (100, EngineMetrics())):
        engine.figures = [figures]
        _at(row, second)
    assert (row.state, engine.probes) == (S.READY, 0)


def test_stuck_request_is_named_with_the_way_out_and_nothing_is_ended(row: Instance, engine: Engine) -> None:
    engine.figures, engine.token = [EngineMetrics(waiting=1)], SILENT
    engine.stuck = [{"id": "cmpl-7", "needs_bytes": 3 * GIB, "since_s": 20.0}]
    Instance.objects.filter(pk=row.pk).update(effective_limit_bytes=2 * GIB)
    _at(row, 0, 10, 200, 10_000)
    assert (row.state, row.health, engine.probes) == (S.READY, "stuck", 0)
    assert row.health_reason == (
        "Request cmpl-7 needs 3.0 GiB of KV memory and the limit is 2.0 GiB: raise the limit, or abort it."
    )
    assert row.events.filter(kind="health").count() == 1


def test_waiting_without_a_name_is_stuck_after_a_while(row: Instance, engine: Engine) -> None:
    engine.figures = [EngineMetrics(waiting=2)]
    assert _at(row, 0, 10, 30).health != "stuck"
    assert (_at(row, 71).state, row.health) == (S.READY, "stuck")
    engine.figures = [EngineMetrics(running=2, generation_tokens=5)]
    assert (_at(row, 80).health, row.health_reason) == ("ok", "")


def test_figures_of_an_earlier_start_say_nothing_of_this_one(row: Instance, engine: Engine) -> None:
    engine.figures, engine.token = [EngineMetrics(running=1)], SILENT
    _at(row, 0, 10)
    facts = row.health_facts | {"attempt": -1}
    Instance.objects.filter(pk=row.pk).update(health_facts=facts)
    assert _at(row, 71).state == S.READY


@pytest.mark.parametrize("state", [S.STARTING, S.DRAINING, S.SLEEPING, S.STOPPING, S.FAILED])
def test_only_what_should_serve_is_looked_at(row: Instance, engine: Engine, state: InstanceState) -> None:
    Instance.objects.filter(pk=row.pk).update(state=state)
    engine.figures, engine.token = [None], SILENT
    assert _at(row, 0, 100, 1000).state == state
