"""Switching capture on and off, reading, and that nothing is left when its time is over."""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from redis import Redis

from models_app.errors import BrokerAway, Conflict, InvalidInput
from models_app.models import ApiKey, AuditEntry
from models_app.selectors import routes_snapshot
from models_app.services.capture import (
    RING,
    capture_start,
    capture_stop,
    captures_end,
    captures_read,
    keys_captured,
)
from models_app.services.keys import api_key_revoke
from tests.builders import make_key

pytestmark = pytest.mark.django_db


def captured(**changes: Any) -> dict[str, Any]:
    return {
        "at": time.time(),
        "model": "m",
        "path": "/v1/chat/completions",
        "status": 200,
        "request_id": "r",
        "request": "{}",
        "request_cut": False,
        "answer": "hello",
        "answer_cut": False,
        "streamed": True,
        **changes,
    }


class Ring:
    """A key's ring as a router fills it."""

    def __init__(self, url: str, key: ApiKey) -> None:
        self.client = Redis.from_url(url)
        self.names = (f"{RING}{key.pk}", f"{RING}{key.pk}:bytes")

    def push(self, *entries: Any) -> None:
        self.client.lpush(self.names[0], *[e if isinstance(e, bytes) else json.dumps(e) for e in entries])
        self.client.incr(self.names[1])

    @property
    def there(self) -> bool:
        return bool(self.client.exists(*self.names))


@pytest.fixture
def key(valkey: str) -> ApiKey:
    return make_key(name="ci")[0]


@pytest.fixture
def ring(valkey: str, key: ApiKey) -> Any:
    ring = Ring(valkey, key)
    yield ring
    ring.client.close()


def test_capture_is_off_until_it_is_switched_on_and_lasts_an_hour(key: ApiKey) -> None:
    assert not key.is_captured
    assert routes_snapshot()["keys"][0]["capture_until"] is None
    row = capture_start(key, actor="anna")
    assert row.is_captured
    assert row.capture_until is not None
    assert abs((row.capture_until - timezone.now()).total_seconds() - 3600) < 60
    assert routes_snapshot()["keys"][0]["capture_until"] == row.capture_until.timestamp()
    assert keys_captured() == [row]


@pytest.mark.parametrize("seconds", [0, -5, 86_401])
def test_time_out_of_bounds_is_refused(key: ApiKey, seconds: float) -> None:
    with pytest.raises(InvalidInput, match="1 to 86400 seconds"):
        capture_start(key, seconds=seconds, actor="anna")


def test_longest_time_is_a_setting(key: ApiKey, settings: Any) -> None:
    settings.CAPTURE_MAX_S = 120.0
    row = capture_start(key, actor="anna")  # the default is cut to it
    assert row.capture_until is not None
    assert row.capture_until <= timezone.now() + timedelta(seconds=121)
    with pytest.raises(InvalidInput):
        capture_start(key, seconds=121, actor="anna")


def test_key_that_is_revoked_is_captured_no_longer(key: ApiKey, ring: Ring) -> None:
    capture_start(key, actor="anna")
    ring.push(captured())
    row = api_key_revoke(key, actor="anna")
    assert not row.is_captured
    assert captures_read(row, actor="anna") == []
    captures_end()
    assert not ring.there
    with pytest.raises(Conflict):
        capture_start(row, actor="anna")


def test_ring_is_read_newest_first_and_each_reading_is_on_record(key: ApiKey, ring: Ring) -> None:
    row = capture_start(key, actor="anna")
    ring.push(captured(answer="first"), b"no json", b"{}", captured(answer="second"))
    assert [one.answer for one in captures_read(row, actor="bert")] == ["second", "first"]
    assert list(AuditEntry.objects.order_by("pk").values_list("actor", "action", "target")) == [
        ("test", "key.create", "ci"),
        ("anna", "capture.on", "ci"),
        ("bert", "capture.read", "ci"),
    ]


def test_switching_off_throws_away_what_was_captured(key: ApiKey, ring: Ring) -> None:
    capture_start(key, actor="anna")
    ring.push(captured())
    row = capture_stop(key, actor="anna")
    assert not ring.there
    assert captures_read(row, actor="anna") == []
    capture_stop(row, actor="anna")
    assert AuditEntry.objects.filter(action="capture.off").count() == 1
    assert not AuditEntry.objects.filter(action="capture.read").exists()


def test_what_a_router_tells_too_late_is_thrown_away(key: ApiKey, ring: Ring) -> None:
    capture_start(key, actor="anna")
    row = capture_stop(key, actor="anna")
    ring.push(captured())
    assert captures_read(row, actor="anna") == []
    captures_end()
    assert not ring.there
    row.refresh_from_db()
    assert row.capture_until is not None  # looked for once more
    ApiKey.objects.update(capture_until=timezone.now() - timedelta(seconds=11))
    assert captures_end() == 1
    assert captures_end() == 0
    assert ApiKey.objects.get().capture_until is None


def test_nothing_of_an_earlier_capture_is_read_in_the_next_one(key: ApiKey, ring: Ring) -> None:
    capture_start(key, actor="anna")
    row = capture_stop(key, actor="anna")
    ring.push(captured())
    assert captures_read(capture_start(row, actor="anna"), actor="anna") == []


def test_a_new_end_moves_the_rings_end_too(key: ApiKey, ring: Ring) -> None:
    row = capture_start(key, seconds=60, actor="anna")
    ring.push(captured())
    row = capture_start(row, seconds=600, actor="anna")
    assert 500 < ring.client.ttl(ring.names[0]) <= 602
    assert len(captures_read(row, actor="anna")) == 1


def test_redis_away_is_said_and_not_taken_for_an_empty_ring(key: ApiKey, settings: Any) -> None:
    row = capture_start(key, actor="anna")
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    with pytest.raises(BrokerAway, match="does not answer"):
        captures_read(row, actor="anna")
    ApiKey.objects.update(capture_until=timezone.now() - timedelta(seconds=60))
    assert captures_end() == 0  # and it is tried again
    assert ApiKey.objects.get().capture_until is not None
