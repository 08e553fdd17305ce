from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from django.db import DatabaseError
from redis import Redis

from models_app.models import ApiKey, UsageRecord, UsageSender
from models_app.router.usage import UsageBook
from models_app.services import usage
from models_app.services.usage import LIST, senders_prune, usage_fold
from sardeenz_site.router_usage import USAGE_LIST
from tests.builders import make_key

pytestmark = pytest.mark.django_db
_numbers = itertools.count(1)


@pytest.fixture
def push(valkey: str) -> Any:
    def go(*values: Any) -> None:
        with Redis.from_url(valkey) as client:
            client.rpush(LIST, *[value if isinstance(value, bytes) else json.dumps(value) for value in values])

    return go


def _counted(**changes: Any) -> dict[str, Any]:
    given = {"day": "2026-11-30", "key_id": 0, "key_name": "ci", "model": "a", "requests": 2, "prompt_tokens": 10}
    return given | changes


def _batch(*records: Any, sender: str = "r1", sequence: int = 0) -> dict[str, Any]:
    return {"sender": sender, "sequence": sequence or next(_numbers), "records": list(records)}


def test_router_and_worker_mean_the_same_list() -> None:
    assert LIST == USAGE_LIST


def test_batches_are_added_up_per_key_model_and_day(push: Any) -> None:
    push(_batch(_counted()), _batch(_counted(errors=1), _counted(model="b")), _batch(_counted(day="2026-11-29")))
    assert usage_fold() == 3
    push(_batch(_counted()))
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
    push(_batch(*[one.to_json() for one in book.take()]))
    usage_fold()
    row = UsageRecord.objects.get()
    assert (row.requests, row.completion_tokens, row.ttft_ms_sum, row.ttft_histogram) == (1, 7, 30, {"50": 1})
    assert ApiKey.objects.get(pk=key.pk).last_used_at is not None


def test_a_batch_sent_twice_counts_once(push: Any) -> None:
    twice = _batch(_counted(), sequence=5)
    push(twice, twice)
    usage_fold()
    push(twice, _batch(_counted(), sequence=6), _batch(_counted(), sender="r2", sequence=5))
    usage_fold()
    assert UsageRecord.objects.get().requests == 6
    assert dict(UsageSender.objects.values_list("sender", "sequence")) == {"r1": 6, "r2": 5}


def test_a_worker_that_dies_before_it_takes_the_batch_off_the_list_folds_it_once(
    push: Any, monkeypatch: pytest.MonkeyPatch, valkey: str
) -> None:
    push(_batch(_counted()))
    with monkeypatch.context() as patch:
        patch.setattr("redis.client.Pipeline.lrem", lambda *_: (_ for _ in ()).throw(OSError("killed")))
        assert usage_fold() == 0
    assert usage_fold() == 1
    assert UsageRecord.objects.get().requests == 2


def test_a_database_that_fails_leaves_the_batch_on_the_list(push: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    push(_batch(_counted()))
    with monkeypatch.context() as patch:
        patch.setattr(usage, "_add", lambda *_: (_ for _ in ()).throw(DatabaseError("locked")))
        with pytest.raises(DatabaseError):
            usage_fold()
    assert not UsageSender.objects.exists()
    usage_fold()
    assert UsageRecord.objects.get().requests == 2


def test_two_workers_that_fold_at_once_take_nothing_away(push: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    push(_batch(_counted()))
    write = usage._write

    def other_worker_first(batches: list[Any]) -> None:
        monkeypatch.setattr(usage, "_write", write)
        assert usage_fold() == 1
        push(_batch(_counted(model="b")))
        write(batches)

    monkeypatch.setattr(usage, "_write", other_worker_first)
    usage_fold()
    assert usage_fold() == 1
    assert dict(UsageRecord.objects.values_list("served_model_name", "requests")) == {"a": 2, "b": 2}


@pytest.mark.parametrize("junk", [b"no json", b"5", b'{"sender": "x"}', b'{"sender":"x","sequence":"y","records":[]}'])
def test_junk_is_dropped_and_does_not_block_the_list(push: Any, junk: bytes) -> None:
    push(junk, _batch(_counted()))
    usage_fold()
    assert UsageRecord.objects.get().requests == 2
    assert usage_fold() == 0


@pytest.mark.parametrize("junk", [None, 3, {"day": "yesterday"}, {"day": 3}, _counted(requests="many")])
def test_a_record_of_junk_does_not_spoil_its_batch(push: Any, junk: Any) -> None:
    push(_batch(junk, _counted()))
    usage_fold()
    assert UsageRecord.objects.get().requests == 2


def test_routers_of_long_ago_are_forgotten(push: Any) -> None:
    push(_batch(_counted()), _batch(_counted(), sender="old"))
    usage_fold()
    UsageSender.objects.filter(sender="old").update(at="2020-01-01T00:00:00Z")
    assert senders_prune() == 1
    assert UsageSender.objects.get().sender == "r1"


def test_with_the_broker_away_nothing_is_lost(push: Any, settings: Any, valkey: str) -> None:
    push(_batch(_counted()))
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    assert usage_fold() == 0
    settings.REDIS_URL = valkey
    assert usage_fold() == 1
