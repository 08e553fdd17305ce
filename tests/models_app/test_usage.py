from __future__ import annotations

import json
from typing import Any

import pytest
from redis import Redis

from models_app.models import ApiKey, UsageRecord
from models_app.router.usage import UsageBook
from models_app.services.usage import LIST, usage_fold
from tests.builders import make_key

pytestmark = pytest.mark.django_db


@pytest.fixture
def push(valkey: str) -> Any:
    def go(*values: Any) -> None:
        with Redis.from_url(valkey) as client:
            client.rpush(LIST, *[value if isinstance(value, bytes) else json.dumps(value) for value in values])

    return go


def _counted(**changes: Any) -> dict[str, Any]:
    given = {"day": "2026-11-30", "key_id": 0, "key_name": "ci", "model": "a", "requests": 2, "prompt_tokens": 10}
    return given | changes


def test_batches_are_added_up_per_key_model_and_day(push: Any) -> None:
    push(_counted(), [_counted(errors=1), _counted(model="b")], _counted(day="2026-11-29"))
    assert usage_fold() == 3
    push(_counted())
    usage_fold()
    row = UsageRecord.objects.get(day="2026-11-30", served_model_name="a")
    assert (row.requests, row.errors, row.prompt_tokens) == (6, 1, 30)
    assert UsageRecord.objects.count() == 3
    assert usage_fold() == 0


def test_what_the_router_counts_is_what_the_row_holds(push: Any) -> None:
    key, _ = make_key(name="ci")
    book = UsageBook()
    record = book.record(key.pk, "ci", "a")
    record.requests += 1
    record.completion_tokens += 7
    record.first_token(0.03)
    push(*[one.to_json() for one in book.take()])
    usage_fold()
    row = UsageRecord.objects.get()
    assert (row.requests, row.completion_tokens, row.ttft_ms_sum, row.ttft_histogram) == (1, 7, 30, {"50": 1})
    assert ApiKey.objects.get(pk=key.pk).last_used_at is not None


@pytest.mark.parametrize("junk", [b"no json", b"5", b'{"day": "yesterday"}', b'[{"day": 3}, null]'])
def test_junk_is_dropped_and_does_not_block_the_list(push: Any, junk: bytes) -> None:
    push(junk, _counted())
    usage_fold()
    assert UsageRecord.objects.get().requests == 2
    assert usage_fold() == 0


def test_with_the_broker_away_nothing_is_lost(push: Any, settings: Any, valkey: str) -> None:
    push(_counted())
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    assert usage_fold() == 0
    settings.REDIS_URL = valkey
    assert usage_fold() == 1
