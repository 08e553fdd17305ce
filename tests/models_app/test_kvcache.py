"""The wanted side of limits. The engine's answer is put into the row as the host worker would."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from django.db import connection

from models_app import dispatch, transitions
from models_app.errors import BelowFloor, BrokerAway, Conflict, InvalidInput
from models_app.models import AuditEntry, Instance, MemoryPolicy
from models_app.services.memory.kvcache import (
    kvcache_limit_percent_set,
    kvcache_limit_set,
    kvcache_safety_floor,
    kvcache_trim,
    limit_write,
)
from models_app.states import InstanceState
from tests.builders import GIB, make_gpu, make_instance, make_model

S = InstanceState
BUNDLE = 117_440_512
pytestmark = pytest.mark.django_db


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was enqueued, as (name, *args)."""
    messages: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dispatch, "send", lambda name, *args, **_: messages.append((name, *args)))
    return messages


def test_limit_is_written_with_a_rising_revision_and_sent(sent: list[Any], on_commit: Any) -> None:
    row = make_instance()
    with on_commit():
        answer = kvcache_limit_set(row, size="3G", actor="anna", wait_s=0)
    row.refresh_from_db()
    assert (row.limit_bytes, row.limit_revision, row.limit_set_by) == (3 * GIB, 1, "anna")
    assert (dispatch.LIMIT, row.pk) in sent
    assert (answer.status, answer.revision, answer.limit_bytes) == ("pending", 1, 3 * GIB)


def test_percent_is_of_the_instances_own_gpu(sent: list[Any]) -> None:
    row = make_instance(gpus=[make_gpu(total_bytes=40 * GIB)])
    assert kvcache_limit_set(row, size="50%", actor="anna", wait_s=0).limit_bytes == 20 * GIB
    assert kvcache_limit_percent_set(row, percent=25, actor="anna", wait_s=0).limit_bytes == 10 * GIB


def test_percent_over_several_gpus_is_of_the_smallest(sent: list[Any]) -> None:
    gpus = [make_gpu(total_bytes=80 * GIB), make_gpu(index=1, total_bytes=40 * GIB)]
    row = make_instance(gpus=gpus)
    assert kvcache_limit_set(row, size="50%", actor="anna", wait_s=0).limit_bytes == 20 * GIB


def test_limit_is_clamped_to_the_capacity_at_start(sent: list[Any]) -> None:
    row = make_instance(capacity_bytes=40 * GIB)
    answer = kvcache_limit_set(row, size="60G", actor="anna", wait_s=0)
    assert answer.clamped
    assert (answer.requested_bytes, answer.limit_bytes) == (60 * GIB, 40 * GIB)


def test_limit_below_the_safety_floor_needs_force(sent: list[Any]) -> None:
    row = make_instance()
    with pytest.raises(BelowFloor) as caught:
        kvcache_limit_set(row, size=8 * BUNDLE, actor="anna", wait_s=0)
    assert caught.value.facts["safety_floor_bytes"] == 9 * BUNDLE
    row.refresh_from_db()
    assert row.limit_bytes is None
    assert kvcache_limit_set(row, size=8 * BUNDLE, actor="anna", force=True, wait_s=0).limit_bytes == 8 * BUNDLE


@pytest.mark.parametrize("force", ["true", 1, "yes"])
def test_force_is_only_the_boolean_true(sent: list[Any], force: Any) -> None:
    with pytest.raises(BelowFloor):
        kvcache_limit_set(make_instance(), size=8 * BUNDLE, actor="anna", force=force, wait_s=0)


def test_limit_below_the_hard_minimum_is_refused_even_with_force(sent: list[Any]) -> None:
    with pytest.raises(InvalidInput, match="hard minimum"):
        kvcache_limit_set(make_instance(), size=BUNDLE, actor="anna", force=True, wait_s=0)


@pytest.mark.parametrize("state", [S.PENDING, S.SCHEDULED, S.STARTING, S.SLEEPING])
def test_limit_of_an_instance_that_cannot_take_it_now_is_kept(sent: list[Any], state: InstanceState) -> None:
    row = make_instance(state=state)
    answer = kvcache_limit_set(row, size="3G", actor="anna", wait_s=5)
    assert answer.status == "pending"
    assert "applied as soon as" in answer.message
    assert sent == []


def test_limit_of_an_instance_that_moves_goes_along_and_says_so(sent: list[Any]) -> None:
    """Set in the middle of a move it would else end with the instance that is on its way out."""
    row = make_instance()
    new = make_instance(model=row.model, replaces=row, state=S.STARTING)
    answer = kvcache_limit_set(row, size="3G", actor="anna", wait_s=0)
    new.refresh_from_db()
    assert (new.limit_bytes, new.limit_automatic, new.limit_set_by) == (3 * GIB, False, "anna")
    assert answer.warnings == ["It is moving: the instance that takes over (starting) gets the same limit."]


@pytest.mark.parametrize("state", [S.STOPPING, S.STOPPED, S.FAILED])
def test_limit_of_an_instance_on_its_way_out_is_refused(sent: list[Any], state: InstanceState) -> None:
    with pytest.raises(Conflict, match=state):
        kvcache_limit_set(make_instance(state=state), size="3G", actor="anna", wait_s=0)


def test_limit_without_kvcached_is_refused(sent: list[Any]) -> None:
    row = make_instance(model=make_model(kvcached=False))
    with pytest.raises(Conflict, match="without kvcached"):
        kvcache_limit_set(row, size="3G", actor="anna", wait_s=0)


def test_way_to_reclaim_is_the_models_unless_given(sent: list[Any]) -> None:
    row = make_instance()
    MemoryPolicy.objects.filter(model=row.model).update(reclaim="preempt")
    kvcache_limit_set(row, size="3G", actor="anna", wait_s=0)
    row.refresh_from_db()
    assert row.limit_reclaim == "preempt"
    kvcache_limit_set(row, size="3G", actor="anna", reclaim="wait", wait_s=0)
    row.refresh_from_db()
    assert row.limit_reclaim == "wait"
    with pytest.raises(InvalidInput, match="preempt or abort"):
        kvcache_limit_set(row, size="3G", actor="anna", reclaim="steal", wait_s=0)


def test_refusals_are_on_record_too(sent: list[Any]) -> None:
    row = make_instance()
    with pytest.raises(BelowFloor):
        kvcache_limit_set(row, size=8 * BUNDLE, actor="anna", wait_s=0)
    entry = AuditEntry.objects.get(action="limit.set")
    assert (entry.actor, entry.outcome) == ("anna", "refused")


def test_broker_away_is_said_before_anything_is_written(settings: Any, valkey: str) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    row = make_instance()
    with pytest.raises(BrokerAway):
        kvcache_limit_set(row, size="3G", actor="anna")
    row.refresh_from_db()
    assert row.limit_revision == 0


def test_floor_is_the_engines_once_it_has_told() -> None:
    assert kvcache_safety_floor(make_instance()).source == "engine"


def test_floor_is_an_estimate_before() -> None:
    model = make_model(facts={"bundle_bytes": BUNDLE, "safety_floor_bytes": 9 * BUNDLE})
    floor = kvcache_safety_floor(make_instance(model=model, state=S.STARTING))
    assert (floor.source, floor.safety_floor_bytes, floor.hard_minimum_bytes) == ("estimate", 9 * BUNDLE, 2 * BUNDLE)


def test_trim_of_an_instance_without_engine_is_refused(sent: list[Any]) -> None:
    with pytest.raises(Conflict):
        kvcache_trim(make_instance(state=S.SLEEPING), actor="anna")


def _later(act: Any) -> threading.Thread:
    """Do something in another thread a moment later, as a worker would."""

    def run() -> None:
        try:
            time.sleep(0.1)
            act()
        finally:
            connection.close()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.django_db(transaction=True)
def test_answer_of_the_engine_is_waited_for(sent: list[Any]) -> None:
    row = make_instance()
    wire = {"status": "deferred", "freed_bytes": 5, "overage_bytes": 7, "message": "shrinking"}
    worker = _later(
        lambda: transitions.report(
            row.pk,
            limit_answer={"limit": wire},
            limit_acked_revision=1,
            limit_status="deferred",
            effective_limit_bytes=3 * GIB,
        )
    )
    answer = kvcache_limit_set(row, size="3G", actor="anna", wait_s=10)
    worker.join(10)
    assert (answer.status, answer.freed_bytes, answer.overage_bytes) == ("deferred", 5, 7)
    assert answer.effective_limit_bytes == 3 * GIB


@pytest.mark.django_db(transaction=True)
def test_of_two_writers_the_first_hears_that_the_other_was_last(sent: list[Any]) -> None:
    row = make_instance()
    other = _later(lambda: kvcache_limit_set(row, size="5G", actor="bert", wait_s=0))
    answer = kvcache_limit_set(row, size="3G", actor="anna", wait_s=10)
    other.join(10)
    assert answer.status == "conflict"
    assert "bert" in answer.message
    assert Instance.objects.get(pk=row.pk).limit_bytes == 5 * GIB


def test_plan_made_before_an_operators_limit_does_not_cover_it(sent: list[Any]) -> None:
    planned_from = make_instance()
    kvcache_limit_set(planned_from, size="3G", actor="anna", wait_s=0)
    with pytest.raises(Conflict, match="anna"):
        limit_write(planned_from, 5 * GIB, actor="controller", automatic=None, expected_revision=0)
    assert Instance.objects.get().limit_bytes == 3 * GIB


@pytest.mark.django_db(transaction=True)
def test_trim_waits_for_its_own_answer(sent: list[Any]) -> None:
    row = make_instance(limit_answer={"trim": {"request_id": "older", "freed_bytes": 1}})

    def answer() -> None:
        request_id = sent[-1][2]
        transitions.report(row.pk, limit_answer={"trim": {"request_id": request_id, "freed_bytes": 9}})

    worker = _later(answer)
    assert kvcache_trim(row, actor="anna", wait_s=10).freed_bytes == 9
    worker.join(10)
