"""Clients that ask for what does not exist are on record, with key and address (G11)."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from redis import Redis

from models_app.models import AuditEntry
from models_app.services.plans.control import reconcile_control
from models_app.services.router_events import LIST, router_events_fold
from sardeenz_site.router_feed import EVENTS_LIST

pytestmark = pytest.mark.django_db

EVENT = {"type": "unknown_model", "model": "gone", "key_id": 1, "key_name": "ci", "address": "10.0.0.7", "at": 1.0}


@pytest.fixture
def tell(valkey: str) -> Any:
    def tell(*events: Any) -> None:
        with Redis.from_url(valkey) as client:
            for event in events:
                client.lpush(LIST, event if isinstance(event, bytes) else orjson.dumps(event))

    return tell


def test_routers_and_control_side_use_the_same_list() -> None:
    assert LIST == EVENTS_LIST


def test_unknown_model_is_in_the_audit_with_key_and_address(tell: Any, sent: Any) -> None:
    tell(EVENT)
    reconcile_control()
    entry = AuditEntry.objects.get(action="request.unknown_model")
    assert (entry.actor, entry.target, entry.outcome, entry.address) == ("key:ci", "gone", "refused", "10.0.0.7")
    assert router_events_fold() == 0


def test_what_cannot_be_understood_keeps_nothing_back(tell: Any) -> None:
    tell(b"{half", b"[]", {"type": "other"}, EVENT | {"address": "not an address"})
    assert router_events_fold() == 1
    assert AuditEntry.objects.get().address is None


def test_broker_that_is_away_is_no_error(settings: Any, valkey: str) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    assert router_events_fold() == 0
