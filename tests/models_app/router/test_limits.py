"""Buckets of a key: they refill on one clock, and other processes' debits count."""

from __future__ import annotations

import time

import pytest

from models_app.router.config import RouterConfig
from models_app.router.errors import RouterError
from models_app.router.limits import Limiter
from models_app.router.metrics import Metrics
from models_app.router.peers import Peers
from models_app.router.queueing import Doors
from models_app.router.table import Key


def a_key(**fields: int | None) -> Key:
    return Key(id=1, name="k", digest="", **fields)  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_key_without_limits_is_not_counted() -> None:
    assert Limiter().enter(a_key()) is None


def test_requests_come_back_steadily(clock: list[float]) -> None:
    limiter, key = Limiter(), a_key(rpm=60)
    for _ in range(60):
        limiter.enter(key)
    with pytest.raises(RouterError) as refused:
        limiter.enter(key)
    assert refused.value.status == 429
    clock[0] += 1.01
    limiter.enter(key)
    with pytest.raises(RouterError):
        limiter.enter(key)


def test_old_count_blocks_no_longer_than_it_takes_to_refill(clock: list[float]) -> None:
    """G10: one clock, and no turn of a minute."""
    limiter, key = Limiter(), a_key(tpm=600)
    limiter.enter(key)
    limiter.leave(key, 1200)  # 600 over
    with pytest.raises(RouterError) as refused:
        limiter.enter(key)
    assert refused.value.retry_after_s == pytest.approx(60.1)
    clock[0] += 60.2
    limiter.enter(key)


def test_raised_limit_counts_at_once(clock: list[float]) -> None:
    limiter = Limiter()
    limiter.enter(a_key(rpm=1))
    with pytest.raises(RouterError):
        limiter.enter(a_key(rpm=1))
    limiter.enter(a_key(rpm=5))


def test_lifted_limit_counts_at_once(clock: list[float]) -> None:
    limiter = Limiter()
    limiter.enter(a_key(rpm=1, max_concurrency=9))
    headers = dict(limiter.enter(a_key(max_concurrency=9)) or [])
    assert b"x-ratelimit-limit-requests" not in headers
    assert headers[b"x-ratelimit-remaining-concurrency"] == b"7"


def test_too_many_at_once_are_told_the_limit_and_when_to_come_again(clock: list[float]) -> None:
    limiter, key = Limiter(), a_key(max_concurrency=1)
    limiter.enter(key)
    with pytest.raises(RouterError) as refused:
        limiter.enter(key)
    headers = dict(refused.value.response_headers(b""))
    assert headers[b"x-ratelimit-limit-concurrency"] == b"1"
    assert headers[b"x-ratelimit-remaining-concurrency"] == b"0"
    assert int(headers[b"retry-after"]) >= 1
    limiter.leave(key, 0)
    limiter.enter(key)


def test_limit_of_nothing_lets_nothing_through(clock: list[float]) -> None:
    with pytest.raises(RouterError) as refused:
        Limiter().enter(a_key(rpm=0))
    assert refused.value.retry_after_s == 60.0


def test_headers_tell_what_is_left(clock: list[float]) -> None:
    limiter, key = Limiter(), a_key(rpm=10, tpm=100)
    headers = dict(limiter.enter(key) or [])
    assert headers[b"x-ratelimit-limit-requests"] == b"10"
    assert headers[b"x-ratelimit-remaining-requests"] == b"9"
    assert headers[b"x-ratelimit-remaining-tokens"] == b"100"
    assert headers[b"x-ratelimit-reset-requests"] == b"6.000s"


def two_processes() -> tuple[Limiter, Peers, Limiter, Peers]:
    limiters = Limiter(), Limiter()
    peers = [
        Peers(name, limiter, Doors(RouterConfig(), Metrics(), None))
        for name, limiter in zip("ab", limiters, strict=True)
    ]
    return limiters[0], peers[0], limiters[1], peers[1]


def test_processes_share_a_limit(clock: list[float]) -> None:
    limiter_a, peers_a, limiter_b, peers_b = two_processes()
    key = a_key(rpm=4)
    for limiter in (limiter_a, limiter_b):
        for _ in range(2):
            limiter.enter(key)
    for here, there in ((peers_a, peers_b), (peers_b, peers_a)):
        message = here.message()
        assert message is not None
        there.hear(message)
        here.hear(message)  # its own, as pub/sub sends it back
    for limiter in (limiter_a, limiter_b):
        with pytest.raises(RouterError):
            limiter.enter(key)


def test_debits_that_were_not_told_are_told_next_time(clock: list[float]) -> None:
    limiter, peers, _, _ = two_processes()
    key = a_key(rpm=9)
    limiter.enter(key)
    limiter.leave(key, 0)
    first = peers.message()
    peers.not_told()
    assert peers.message() == first
    assert peers.message() is not None  # once more: nothing under way any longer
    assert peers.message() is None


def test_what_a_silent_process_had_under_way_is_over(clock: list[float]) -> None:
    limiter_a, peers_a, limiter_b, peers_b = two_processes()
    key = a_key(max_concurrency=1)
    limiter_a.enter(key)
    message = peers_a.message()
    assert message is not None
    peers_b.hear(message)
    with pytest.raises(RouterError):
        limiter_b.enter(key)
    clock[0] += 6
    peers_b.forget_silent()
    limiter_b.enter(key)


def test_nonsense_from_a_peer_is_refused() -> None:
    _, peers, _, _ = two_processes()
    with pytest.raises((KeyError, TypeError, ValueError)):
        peers.hear({"from": "c", "keys": {"x": 1}, "models": {}})
