from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest
from celery import current_app
from django.conf import settings

from models_app import broker, dispatch, tasks, worker
from models_app.errors import BrokerAway


@pytest.mark.parametrize("name", dispatch.TASK_NAMES)
def test_every_dispatched_name_is_a_registered_task(name: str) -> None:
    assert name in current_app.tasks


def test_every_task_of_this_app_can_be_dispatched_by_name() -> None:
    ours = {name for name in current_app.tasks if name.startswith("models_app.")}
    assert ours == set(dispatch.TASK_NAMES)


@pytest.mark.parametrize("name", dispatch.TASK_NAMES)
def test_every_task_ends_long_before_the_broker_delivers_it_again(name: str) -> None:
    limit = current_app.tasks[name].time_limit
    assert limit is not None
    assert limit * 2 <= settings.CELERY_BROKER_TRANSPORT_OPTIONS["visibility_timeout"]


def test_tasks_are_thin() -> None:
    tree = ast.parse(inspect.getsource(tasks))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.decorator_list]
    assert functions
    for node in functions:
        assert (node.end_lineno or 0) - node.lineno < 10, node.name


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    messages: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dispatch, "send", lambda name, *args, **options: messages.append((name, args, options)))
    return messages


def test_chain_of_looks_goes_on_while_there_is_more_to_see(sent: list[Any]) -> None:
    tasks._look("test.look", lambda _: True, 7, "", 0.4)
    ((name, args, options),) = sent
    assert (name, args[0], options["countdown"]) == ("test.look", 7, 0.4)
    assert args[1], "the chain's token is passed on"


def test_chain_of_looks_ends_when_all_is_seen(sent: list[Any]) -> None:
    tasks._look("test.look", lambda _: False, 7, "", 0.4)
    assert sent == []


def test_hint_looks_once_while_a_chain_runs(sent: list[Any], valkey: str) -> None:
    assert broker.chain_hold("test.look", 7, "")
    looked: list[int] = []
    tasks._look("test.look", lambda pk: looked.append(pk) or True, 7, "", 0.4)
    assert looked == [7]
    assert sent == []


def test_message_of_a_chain_that_was_replaced_does_nothing(sent: list[Any], valkey: str) -> None:
    assert broker.chain_hold("test.look", 7, "")
    looked: list[int] = []
    tasks._look("test.look", lambda pk: looked.append(pk) or True, 7, "older", 0.4)
    assert looked == []


@pytest.mark.django_db
def test_hosts_worker_registers_beats_and_has_itself_reconciled(sent: list[Any]) -> None:
    from gpus_app.models import Host

    beat = worker.HostBeat(settings.SARDEENZ_HOST_NAME)
    beat.tick()
    host = Host.objects.get()
    assert host.reachable
    assert host.engine_kind == "simulated"
    assert [(name, args) for name, args, _ in sent] == [(dispatch.RECONCILE_HOST, (host.name,))]
    Host.objects.all().delete()
    beat.tick()
    beat.tick()
    assert Host.objects.get().reachable, "a row that was removed is made again"


@pytest.mark.django_db
def test_beat_outlives_a_broker_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise BrokerAway(broker.AWAY)

    monkeypatch.setattr(dispatch, "send", away)
    worker.HostBeat("h").tick()
