"""Hosts that fall silent: one is lost after a while, most of them at once are not, and nobody has two owners."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from gpus_app.models import Host
from models_app import dispatch
from models_app.engines import process
from models_app.engines.identity import Marker
from models_app.engines.process import MarkedProcess
from models_app.errors import Conflict
from models_app.models import AuditEntry, Instance
from models_app.services.access import this_installation
from models_app.services.lifecycle.host_loss import freeze_sentence, vanished_together
from models_app.services.lifecycle.launch import instance_place, instance_restart, model_launch
from models_app.services.lifecycle.sleep import sleep_again
from models_app.services.lifecycle.start import _claim
from models_app.services.plans import control
from models_app.services.plans.reconcile import reconcile_host
from models_app.services.plans.rollout import instance_move
from models_app.states import InstanceState
from tests.builders import make_gpu, make_host, make_instance, make_model

S = InstanceState
pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    messages: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dispatch, "send", lambda name, *args, **_: messages.append((name, *args)))
    return messages


@pytest.fixture
def three(settings: Any, tmp_path: Path) -> list[Host]:
    settings.SARDEENZ_HOME = tmp_path
    settings.HOST_HEARTBEAT_LIMIT_S, settings.HOST_LOST_S = 15.0, 300.0
    hosts = [make_host(name=name) for name in ("ha", "hb", "hc")]
    for host in hosts:
        make_gpu(host=host)
    return hosts


def _silence(host: Host, seconds: float = 60.0) -> None:
    at = timezone.now() - timedelta(seconds=seconds)
    Host.objects.filter(pk=host.pk).update(worker_seen_at=at, sampler_seen_at=at)


def _speak(host: Host) -> None:
    Host.objects.filter(pk=host.pk).update(worker_seen_at=timezone.now(), sampler_seen_at=timezone.now())


def _now(row: Instance) -> Instance:
    return Instance.objects.select_related("host", "attempt").get(pk=row.pk)


def _hosts() -> list[Host]:
    return list(Host.objects.all())


# --- most of them at once ------------------------------------------------------------------------------


def test_most_hosts_at_once_freeze_everything_and_it_is_said_once(three: list[Host]) -> None:
    rows = [make_instance(host=host) for host in three]
    failed = make_instance(host=three[2], state=S.FAILED, next_restart_at=timezone.now() - timedelta(seconds=1))
    _silence(three[0], 400)
    _silence(three[1], 405)
    for _ in range(2):
        control.hosts_check()
        control.restarts_due()
    assert [_now(row).state for row in rows] == [S.READY] * 3
    assert _now(failed).state == S.FAILED
    (entry,) = AuditEntry.objects.filter(action="hosts.freeze")
    assert "2 of 3 hosts fell silent at once (ha, hb)" in entry.detail
    assert "maintenance" in entry.detail


def test_hosts_that_come_back_end_the_freeze_with_a_record(three: list[Host]) -> None:
    failed = make_instance(host=three[2], state=S.FAILED, next_restart_at=timezone.now() - timedelta(seconds=1))
    for host in three[:2]:
        _silence(host)
    control.hosts_check()
    _speak(three[0])
    control.hosts_check()
    control.hosts_check()
    control.restarts_due()
    assert list(AuditEntry.objects.order_by("pk").values_list("action", flat=True)) == ["hosts.freeze", "hosts.thaw"]
    assert _now(failed).state == S.PENDING


def test_frozen_fleet_places_nothing_and_says_so(three: list[Host]) -> None:
    row = make_instance(state=S.PENDING)
    serving = make_instance(host=three[2])
    _silence(three[0])
    _silence(three[1])
    assert not instance_place(row.pk)
    assert (_now(row).state, _now(row).reason) == (S.PENDING, freeze_sentence(_hosts()))
    for ask in (
        lambda: model_launch(make_model(), actor="anna"),
        lambda: model_launch(make_model(), actor="anna", host=three[2], anyway=True),
        lambda: instance_restart(serving, actor="anna"),
        lambda: instance_move(serving, actor="anna", host="ha"),
    ):
        with pytest.raises(Conflict, match="2 of 3 hosts fell silent at once"):
            ask()
    assert _now(serving).state == S.READY
    _speak(three[0])
    assert instance_place(row.pk)


def test_freeze_again_is_said_again(three: list[Host]) -> None:
    for _ in range(2):
        _silence(three[0])
        _silence(three[1])
        control.hosts_check()
        _speak(three[0])
        control.hosts_check()
    assert AuditEntry.objects.filter(action="hosts.freeze").count() == 2


def test_hosts_that_fell_silent_one_by_one_are_no_freeze(three: list[Host]) -> None:
    _silence(three[0], 4000)
    _silence(three[1], 60)
    assert vanished_together(_hosts()) == []


def test_hosts_off_for_long_do_not_count(three: list[Host]) -> None:
    """Two of five are away since yesterday; two of the other three now."""
    for name in ("old1", "old2"):
        _silence(make_host(name=name), 86_400)
    _silence(three[0])
    _silence(three[1], 62)
    assert {host.name for host in vanished_together(_hosts())} == {"ha", "hb"}


@pytest.mark.parametrize("count", [1, 2])
def test_small_fleets_never_freeze(three: list[Host], count: int) -> None:
    three[2].delete()
    for host in three[:count]:
        _silence(host)
    assert vanished_together(_hosts()) == []


def test_maintenance_is_the_way_out_of_a_freeze(three: list[Host]) -> None:
    _silence(three[0])
    _silence(three[1])
    assert freeze_sentence(_hosts())
    Host.objects.filter(pk=three[0].pk).update(maintenance=True)
    assert freeze_sentence(_hosts()) == ""


# --- one of them, for long enough -------------------------------------------------------------------------


def _lost(host: Host) -> None:
    _silence(host, 301)
    control.hosts_check()


def test_silent_host_is_unreachable_and_not_yet_lost(three: list[Host]) -> None:
    row = make_instance(host=three[0])
    _silence(three[0], 299)
    control.hosts_check()
    assert _now(row).state == S.UNREACHABLE


def test_instances_of_a_lost_host_start_elsewhere(three: list[Host]) -> None:
    row = make_instance(host=three[0], model=make_model(deployed=True))
    _lost(three[0])
    assert _now(row).state == S.FAILED
    assert "silent for more than 300 s" in _now(row).reason
    Instance.objects.filter(pk=row.pk).update(next_restart_at=timezone.now())
    control.restarts_due()
    instance_place(row.pk)
    assert _now(row).state == S.SCHEDULED
    assert _now(row).host in three[1:]


@pytest.mark.parametrize("policy", ["always", "on_failure"])
def test_policy_decides_who_moves_on(three: list[Host], policy: str) -> None:
    moves = make_instance(host=three[0], model=make_model(restart_policy=policy))
    stays = make_instance(host=three[0], model=make_model(restart_policy="never"))
    _lost(three[0])
    assert (_now(moves).next_restart_at is not None, _now(stays).state) == (True, S.UNREACHABLE)


def test_never_lost_when_switched_off(three: list[Host], settings: Any) -> None:
    settings.HOST_LOST_S = 0.0
    row = make_instance(host=three[0])
    _silence(three[0], 100_000)
    control.hosts_check()
    assert _now(row).state == S.UNREACHABLE


def test_what_is_bound_to_the_host_waits_for_it(three: list[Host]) -> None:
    bound = make_instance(host=three[0], model=make_model(host=three[0]))
    by_hand = make_instance(host=three[0], placement_wish={"host": "ha", "gpu_uuids": [], "anyway": False})
    _lost(three[0])
    assert {_now(bound).state, _now(by_hand).state} == {S.UNREACHABLE}


def test_what_is_stopping_is_not_started_elsewhere(three: list[Host]) -> None:
    stopping = make_instance(host=three[0], state=S.STOPPING, desired_state="stopped")
    drained = make_instance(host=three[0], state=S.DRAINING, desired_state="stopped")
    _lost(three[0])
    assert (_now(stopping).state, _now(drained).state) == (S.STOPPING, S.UNREACHABLE)


def test_sleeper_of_a_lost_host_starts_elsewhere_and_sleeps_there(three: list[Host], settings: Any) -> None:
    model = make_model(deployed=True, enable_sleep_mode=True, sleep_level=2)
    row = make_instance(host=three[0], model=model, state=S.SLEEPING, desired_state="sleeping", sleep_level=2)
    _lost(three[0])
    assert _now(row).state == S.FAILED
    Instance.objects.filter(pk=row.pk).update(next_restart_at=timezone.now())
    control.restarts_due()
    instance_place(row.pk)
    assert (_now(row).state, _now(row).desired_state) == (S.SCHEDULED, "sleeping")
    assert _now(row).host in three[1:]
    Instance.objects.filter(pk=row.pk).update(state=S.READY)
    assert sleep_again(row.pk)
    assert (_now(row).state, _now(row).sleep_level) == (S.DRAINING, 2)


def test_silent_sleeper_is_unreachable_and_asleep_again_when_its_host_is_back(
    three: list[Host], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unreachable is not gone: what its engine says counts, and the wish holds."""
    from models_app.engines.metrics import EngineMetrics
    from models_app.services.plans import reconcile

    level = ["weights_offloaded"]

    class Engine:
        def metrics(self) -> EngineMetrics:
            return EngineMetrics(sleep_state=level[0])

    settings.SARDEENZ_HOST_NAME, settings.HOST_BACK_AFTER_S = "ha", 0.0
    monkeypatch.setattr(reconcile, "client", lambda *_, **__: Engine())
    monkeypatch.setattr(reconcile, "end_found", lambda *_: False)
    model = make_model(deployed=True, enable_sleep_mode=True)
    row = make_instance(host=three[0], model=model, state=S.SLEEPING, desired_state="sleeping", sleep_level=1)
    _silence(three[0])
    control.hosts_check()
    assert (_now(row).state, _now(row).desired_state) == (S.UNREACHABLE, "sleeping")
    _speak(three[0])
    reconcile_host("ha")
    assert (_now(row).state, _now(row).desired_state) == (S.SLEEPING, "sleeping")
    level[0] = "awake"
    Instance.objects.filter(pk=row.pk).update(state=S.UNREACHABLE)
    reconcile_host("ha")
    assert _now(row).state == S.READY
    reconcile_host("ha")
    assert (_now(row).state, _now(row).desired_state) == (S.DRAINING, "sleeping")


def test_sleeper_whose_process_is_gone_when_its_host_is_back_is_started_and_sleeps(
    three: list[Host], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.SARDEENZ_HOST_NAME, settings.HOST_BACK_AFTER_S, settings.START_GRACE_S = "ha", 0.0, 0.0
    monkeypatch.setattr(process, "find_marked", lambda _: [])
    model = make_model(deployed=True, enable_sleep_mode=True)
    row = make_instance(host=three[0], model=model, state=S.UNREACHABLE, desired_state="sleeping", sleep_level=1)
    reconcile_host("ha")
    assert (_now(row).state, _now(row).desired_state) == (S.FAILED, "sleeping")
    assert _now(row).next_restart_at is not None


def test_lost_host_that_returns_ends_what_it_no_longer_owns(
    three: list[Host], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every moment after the loss: failed, waiting for a place, placed elsewhere, started elsewhere."""
    settings.SARDEENZ_HOST_NAME = "ha"
    row = make_instance(host=three[0], model=make_model(deployed=True))
    old = row.attempt
    assert old is not None
    living = MarkedProcess(
        pid=4711,
        start_ticks=1,
        name="vllm",
        command="",
        session=4711,
        marker=Marker(this_installation(), row.pk, old.pk),
        run_dir=None,
    )
    monkeypatch.setattr(process, "find_marked", lambda _: [living])
    ended: list[str] = []
    monkeypatch.setattr(process, "stop_step", lambda folder, **_: ended.append(str(folder)))

    def returns() -> bool:
        ended.clear()
        reconcile_host("ha")
        return ended == [old.run_dir]

    _lost(three[0])
    assert (_now(row).state, returns()) == (S.FAILED, True)
    Instance.objects.filter(pk=row.pk).update(next_restart_at=timezone.now())
    control.restarts_due()
    assert (_now(row).state, returns()) == (S.PENDING, True)
    instance_place(row.pk)
    assert (_now(row).state, returns()) == (S.SCHEDULED, True)
    settings.SARDEENZ_HOST_NAME = _now(row).host.name  # type: ignore[union-attr]
    _claim(_now(row))
    settings.SARDEENZ_HOST_NAME = "ha"
    assert (_now(row).state, returns()) == (S.STARTING, True)
    assert _now(row).attempt_id != old.pk


def test_host_that_comes_and_goes_does_not_flap_in_the_routes(
    three: list[Host], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from models_app.engines.metrics import EngineMetrics
    from models_app.services.plans import reconcile

    class Engine:
        def metrics(self) -> EngineMetrics:
            return EngineMetrics()

    settings.SARDEENZ_HOST_NAME, settings.HOST_BACK_AFTER_S = "ha", 5.0
    monkeypatch.setattr(reconcile, "client", lambda *_, **__: Engine())
    monkeypatch.setattr(reconcile, "end_found", lambda *_: False)
    row = make_instance(host=three[0], state=S.UNREACHABLE)
    reconcile_host("ha")
    assert _now(row).state == S.UNREACHABLE
    Instance.objects.filter(pk=row.pk).update(state_since=timezone.now() - timedelta(seconds=6))
    reconcile_host("ha")
    assert _now(row).state == S.READY
