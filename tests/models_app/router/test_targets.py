"""Which replica is chosen, and what a failure does."""

from __future__ import annotations

from collections import Counter

import pytest

from models_app.router.config import RouterConfig
from models_app.router.targets import Targets
from tests.models_app.router.support import table


def routes(*weights: int, first_port: int = 9000) -> object:
    instances = [
        {"id": number, "url": f"http://127.0.0.1:{first_port + number}", "token": "t", "weight": weight}
        for number, weight in enumerate(weights)
    ]
    model = {"name": "m", "status": "ready", "instances": instances}
    return table(model)


def made(*weights: int) -> tuple[Targets, tuple[object, ...]]:
    targets = Targets(RouterConfig())
    routed = routes(*weights)
    targets.follow(routed)  # type: ignore[arg-type]
    return targets, routed.models["m"].targets  # type: ignore[attr-defined]


def test_weight_shares_what_is_outstanding() -> None:
    targets, all_of_them = made(1, 3)
    for _ in range(40):
        state = targets.choose(all_of_them, 0.0)
        assert state is not None
        state.outstanding += 1
    assert [state.outstanding for state in targets] == [10, 30]


def test_equal_ones_take_turns() -> None:
    targets, all_of_them = made(1, 1, 1)
    turns = Counter(targets.choose(all_of_them, 0.0).target.id for _ in range(30))  # type: ignore[union-attr]
    assert set(turns.values()) == {10}


def test_tried_ones_are_not_chosen_again() -> None:
    targets, all_of_them = made(1, 1)
    tried = []
    for _ in range(2):
        state = targets.choose(all_of_them, 0.0, tried=tried)
        assert state is not None
        tried.append(state)
    assert targets.choose(all_of_them, 0.0, tried=tried) is None


def test_rest_grows_with_failures_up_to_a_bound() -> None:
    targets, _ = made(1)
    (state,) = targets
    rests = []
    for _ in range(8):
        targets.failed(state, "connect", 100.0, at_once=True)
        rests.append(state.cooled_until - 100.0)
    assert rests == [2, 4, 8, 16, 30, 30, 30, 30]
    targets.succeeded(state)
    assert (state.failures, state.cooled_until) == (0, 0.0)


def test_5xx_cool_after_three_in_a_row() -> None:
    targets, _ = made(1)
    (state,) = targets
    for _ in range(2):
        targets.failed(state, "status_500", 100.0, at_once=False)
    assert state.cooled_until == 0.0
    targets.failed(state, "status_500", 100.0, at_once=False)
    assert state.cooled_until == 102.0


def test_when_all_rest_the_least_bad_is_tried() -> None:
    targets, all_of_them = made(1, 1)
    bad, worse = targets
    targets.failed(bad, "connect", 0.0, at_once=True)
    for _ in range(3):
        targets.failed(worse, "connect", 0.0, at_once=True)
    assert targets.choose(all_of_them, 1.0) is bad


def test_busy_favourite_is_passed_over() -> None:
    targets, all_of_them = made(1, 1)
    favourite = targets.choose(all_of_them, 0.0, affinity="the same beginning")
    assert favourite is targets.choose(all_of_them, 0.0, affinity="the same beginning")
    assert favourite is not None
    favourite.outstanding = 50
    assert targets.choose(all_of_them, 0.0, affinity="the same beginning") is not favourite


def test_new_token_is_used_at_once_and_new_address_is_a_new_instance() -> None:
    targets, _ = made(1)
    (before,) = targets
    assert b"Bearer t\r\n" in before.head("/v1/x")
    newer = table({"name": "m", "status": "ready", "instances": [{"id": 0, "url": before.target.url, "token": "new"}]})
    targets.follow(newer)
    (after,) = targets
    assert after is before
    assert b"Bearer new\r\n" in after.head("/v1/x")
    targets.follow(routes(1, first_port=9500))  # type: ignore[arg-type]
    (moved,) = targets
    assert moved is not before
    assert before.pool.closed


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", b"127.0.0.1:1"), ("[::1]", b"[::1]:1")])
def test_host_header(host: str, shown: bytes) -> None:
    targets = Targets(RouterConfig())
    targets.follow(table({"name": "m", "status": "ready", "instances": [{"id": 1, "url": f"http://{host}:1"}]}))
    (state,) = targets
    assert state.head("/v1/x") == b"POST /v1/x HTTP/1.1\r\nhost: " + shown + b"\r\n"
