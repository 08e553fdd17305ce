"""Failures that routers saw: the engine is looked at at once, by the looks that there are anyway."""

from __future__ import annotations

from typing import Any

import pytest

from gpus_app.models import Host
from models_app import dispatch
from models_app.errors import BrokerAway
from models_app.models import InstanceEvent
from models_app.services.lifecycle.launch import model_launch
from models_app.services.lifecycle.suspicion import instance_suspect
from models_app.states import InstanceState
from tests.builders import make_instance, make_model
from tests.models_app.pump import Pump, kill

S = InstanceState
pytestmark = pytest.mark.django_db


def test_ready_engine_is_probed_and_judged_at_once(sent: list[tuple[Any, ...]]) -> None:
    row = make_instance()
    instance_suspect(row.pk, kind="connect")
    assert sent == [(dispatch.PROBE, row.pk), (dispatch.HEALTH, row.pk)]
    note = InstanceEvent.objects.get(instance=row, kind="router")
    assert "it takes no connection" in note.reason


@pytest.mark.parametrize("state", [S.STARTING, S.DRAINING, S.SLEEPING, S.UNREACHABLE, S.FAILED, S.STOPPED])
def test_engine_that_is_not_in_the_routes_is_left_to_others(sent: list[tuple[Any, ...]], state: InstanceState) -> None:
    instance_suspect(make_instance(state=state).pk, kind="reset")
    instance_suspect(10**9, kind="reset")
    assert sent == []


def test_many_routers_cause_one_look(sent: list[tuple[Any, ...]], valkey: str) -> None:
    row = make_instance()
    for kind in ("connect", "reset", "status_500"):
        instance_suspect(row.pk, kind=kind)
    assert len(sent) == 2
    assert InstanceEvent.objects.filter(instance=row, kind="router").count() == 1


def test_broker_that_is_away_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise BrokerAway("away")

    monkeypatch.setattr(dispatch, "send", away)
    instance_suspect(make_instance().pk, kind="connect")


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_killed_engine_is_failed_by_the_hint_alone(fleet: Host, pump: Pump) -> None:
    (row,) = model_launch(make_model(restart_policy="never"), actor="test")

    def state() -> str:
        row.refresh_from_db()
        return row.state

    pump.run(lambda: state() == S.READY)
    pump.drop()
    assert row.attempt is not None and row.attempt.engine_pid is not None
    kill(row.attempt.engine_pid)
    instance_suspect(row.pk, kind="connect")
    pump.run(lambda: state() == S.FAILED)
