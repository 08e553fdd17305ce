from __future__ import annotations

from typing import Any

import pytest

from models_app import broker, dispatch, hints
from models_app.errors import BrokerAway


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    messages: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        dispatch, "send", lambda name, *args, **options: messages.append((name, args, options["queue"]))
    )
    return messages


@pytest.mark.parametrize(
    ("kind", "instance_id", "expected"),
    [
        ("ended", 7, (dispatch.PROBE, (7,))),
        ("drift", 7, (dispatch.LIMIT, (7,))),
        ("gpu", None, (dispatch.RECONCILE_HOST, ("gpu-a",))),
        ("ended", None, (dispatch.RECONCILE_HOST, ("gpu-a",))),
        ("something new", 7, (dispatch.RECONCILE_HOST, ("gpu-a",))),
    ],
)
def test_hint_becomes_a_look_on_its_host(
    sent: list[Any], kind: str, instance_id: int | None, expected: tuple[Any, ...]
) -> None:
    hints.send_hint(kind, host="gpu-a", instance_id=instance_id)
    assert sent == [(*expected, "host.gpu-a")]


def test_lost_hint_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise BrokerAway(broker.AWAY)

    monkeypatch.setattr(dispatch, "send", away)
    hints.send_hint("ended", host="gpu-a", instance_id=1)


def test_hints_do_not_double_a_chain_of_looks(valkey: str) -> None:
    first = broker.chain_hold("probe", 1, "")
    assert first is not None
    assert broker.chain_hold("probe", 1, "") is None
    assert broker.chain_hold("probe", 1, first) == first
    assert broker.chain_hold("probe", 2, "") is not None


def test_chain_that_has_ended_may_start_again(valkey: str) -> None:
    first = broker.chain_hold("probe", 1, "")
    broker.chain_drop("probe", 1)
    second = broker.chain_hold("probe", 1, "")
    assert second not in (None, first)
    assert broker.chain_hold("probe", 1, first or "") is None


def test_chains_go_on_with_the_broker_away(settings: Any, valkey: str) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    assert broker.chain_hold("probe", 1, "mine") == "mine"


def test_turn_is_taken_by_one(valkey: str) -> None:
    assert [broker.once_in("prune", 60) for _ in range(3)] == [True, False, False]
