"""Memory back from running requests: preempted ones are computed again and none fails, and nobody pays for ever."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from models_app.kvcache_addon import reclaim
from models_app.kvcache_addon.engine_core import Addon, addon_of
from models_app.kvcache_addon.reclaim import MAX_FRUITLESS
from models_app.kvcache_addon.wire import LimitOrder, Refused
from tests.models_app.kvcache_addon.fake_vllm import Engine, Request

Make = Callable[..., tuple[Engine, Addon]]
BUNDLE = 2 * 2**20 * 28 * 2


def limit(addon: Addon, bundles: int, how: str) -> dict[str, Any]:
    assert addon.control is not None
    return addon.control.apply(LimitOrder(size_bytes=bundles * BUNDLE, force=True, reclaim=how))


def busy(engine: Engine, requests: int = 10, tokens: int = 2000, answer: int = 200) -> list[Request]:
    added = [engine.add(tokens, answer) for _ in range(requests)]
    engine.steps(10)
    assert len(engine.scheduler.running) == requests
    return added


def prefill_without_a_token(engine: Engine) -> None:
    """A step that takes the waiting in and computes no more than part of their prompts."""
    for request, _ in engine.scheduler.schedule():
        request.in_flight = 0


@pytest.mark.parametrize("batches", [1, 2, 3])
@pytest.mark.parametrize("caching", [False, True])
def test_preempt_puts_the_limit_in_force_at_once_and_every_answer_stays_whole(
    engine_with_pool: Make, batches: int, caching: bool
) -> None:
    engine, addon = engine_with_pool(batches=batches, caching=caching)
    requests = busy(engine)
    for bundles in (14, 9, 20, 6):
        answer = limit(addon, bundles, "preempt")
        assert answer["status"] == "applied"
        assert answer["used_bytes"] + answer["prealloc_bytes"] <= bundles * BUNDLE
        engine.steps(7)
    engine.finish_all()
    assert [request.output for request in requests] == [list(range(200))] * 10


def test_preempt_takes_the_youngest_and_no_more_than_needed(engine_with_pool: Make) -> None:
    engine, addon = engine_with_pool()
    requests = busy(engine)
    answer = limit(addon, 15, "preempt")
    gone = [request for request in requests if request not in engine.scheduler.running]
    assert gone == requests[-len(gone) :]
    assert answer["preempted"]["requests"] == len(gone) < 6
    assert list(engine.scheduler.waiting) == gone
    assert answer["used_bytes"] >= 13 * BUNDLE


def test_preempt_takes_the_lowest_priority_first(engine_with_pool: Make) -> None:
    engine, addon = engine_with_pool()
    engine.add(2000, 200, priority=5)
    for _ in range(4):
        engine.add(2000, 200)
    engine.steps(10)
    limit(addon, 9, "preempt")
    assert engine.scheduler.waiting[-1].priority == 5  # each goes to the head: the first taken is the last in line


def test_preempt_tells_what_it_costs(engine_with_pool: Make) -> None:
    engine, addon = engine_with_pool()
    busy(engine)
    answer = limit(addon, 16, "preempt")
    taken = answer["preempted"]
    assert taken["tokens"] >= taken["requests"] * 2000
    assert taken["pause_s"] is None
    first = addon.status()["last_reclaim"]
    assert (first["how"], first["requests"], first["open"]) == ("preempt", taken["requests"], taken["requests"])
    engine.finish_all()
    last = addon.status()["last_reclaim"]
    assert last["open"] == 0
    assert last["pause_s"] >= 0
    assert "update_from_output" not in engine.scheduler.__dict__


def test_preempted_request_is_new_to_the_next_step(engine_with_pool: Make) -> None:
    """The workers drop what they keep of a request only if the scheduler says that it was not in the last step."""
    engine, addon = engine_with_pool()
    busy(engine)
    limit(addon, 12, "preempt")
    waiting = {request.request_id for request in engine.scheduler.waiting}
    running = {request.request_id for request in engine.scheduler.running}
    assert engine.scheduler.prev_step_scheduled_req_ids == running
    assert waiting


def test_batches_under_way_are_finished_before_anything_is_taken(engine_with_pool: Make) -> None:
    engine, addon = engine_with_pool(batches=2)
    requests = busy(engine)
    assert engine.batch_queue
    assert any(request.in_flight for request in requests)
    limit(addon, 10, "preempt")
    assert not engine.batch_queue
    assert not any(request.in_flight for request in requests)
    assert engine.scheduler.pause_state.name == "UNPAUSED"


def test_a_pause_that_somebody_else_ordered_stays(engine_with_pool: Make) -> None:
    engine, addon = engine_with_pool(batches=2)
    busy(engine)
    paused = type(engine.scheduler.pause_state).PAUSED_NEW
    engine.scheduler.set_pause_state(paused)
    limit(addon, 10, "preempt")
    assert engine.scheduler.pause_state == paused


def test_failing_step_still_ends_the_engine(engine_with_pool: Make) -> None:
    """vLLM turns an exception in a utility call into an answer; the loop would go on with a broken engine."""
    engine, addon = engine_with_pool(batches=2)
    busy(engine)

    def broken() -> None:
        raise RuntimeError("CUDA error")

    engine.step_fn = broken
    with pytest.raises(Refused) as refused:
        limit(addon, 10, "preempt")
    assert refused.value.code == "step_failed"
    with pytest.raises(RuntimeError, match="CUDA error"):
        engine.steps(1)


def test_nobody_is_preempted_for_ever(engine_with_pool: Make) -> None:
    """One that lost its memory several times without a token in between is left to go on; another one pays."""
    engine, addon = engine_with_pool()
    old, young = busy(engine, requests=2)
    for _ in range(MAX_FRUITLESS):
        limit(addon, 3, "preempt")
        assert young in engine.scheduler.waiting
        limit(addon, 50, "preempt")
        prefill_without_a_token(engine)
        assert young in engine.scheduler.running
    answer = limit(addon, 3, "preempt")
    assert young in engine.scheduler.running
    assert old in engine.scheduler.waiting
    assert answer["warnings"]


def test_one_new_token_clears_the_count(engine_with_pool: Make) -> None:
    engine, addon = engine_with_pool()
    _, young = busy(engine, requests=2)
    for _ in range(MAX_FRUITLESS + 2):
        limit(addon, 3, "preempt")
        assert young in engine.scheduler.waiting
        limit(addon, 50, "preempt")
        engine.steps(2)
        assert young in engine.scheduler.running


def test_abort_ends_the_youngest_and_tells_their_clients(engine_with_pool: Make) -> None:
    engine, addon = engine_with_pool(batches=2)
    requests = busy(engine)
    answer = limit(addon, 10, "abort")
    ended = {request_id for request_id, _ in engine.aborted}
    assert answer["status"] == "applied"
    assert answer["preempted"]["requests"] == len(ended)
    assert ended == {request.request_id for request in requests[-len(ended) :]}
    engine.finish_all()
    whole = [request for request in requests if request.request_id not in ended]
    assert [request.output for request in whole] == [list(range(200))] * len(whole)


def test_wait_takes_nobody(engine_with_pool: Make) -> None:
    engine, addon = engine_with_pool(batches=2)
    busy(engine)
    assert limit(addon, 10, "wait")["preempted"] is None
    assert len(engine.scheduler.running) == 10


def test_unknown_vllm_preempts_all_by_the_public_call(engine_with_pool: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "vllm_version", lambda: "0.27.3")
    engine, addon = engine_with_pool(batches=2)
    requests = busy(engine)
    answer = limit(addon, 18, "preempt")
    assert (answer["status"], answer["preempted"]["requests"]) == ("applied", 10)
    assert not engine.scheduler.running
    engine.finish_all()
    assert [request.output for request in requests] == [list(range(200))] * 10


def test_requests_of_a_kv_connector_are_not_preempted(engine_with_pool: Make) -> None:
    engine, addon = engine_with_pool()
    busy(engine)
    engine.scheduler.connector = object()  # type: ignore[assignment]
    answer = limit(addon, 10, "preempt")
    assert answer["status"] == "deferred"
    assert "connector" in answer["warnings"][-1]


def test_data_parallel_engine_is_not_stepped_alone(engine_with_pool: Make) -> None:
    engine, addon = engine_with_pool(batches=2)
    busy(engine)
    engine.dp_group = object()  # type: ignore[attr-defined]
    answer = limit(addon, 10, "preempt")
    assert (answer["status"], len(engine.scheduler.running)) == ("deferred", 10)
    assert "batches under way" in answer["warnings"][-1]


def test_limit_flapping_under_load_loses_no_token(engine_with_pool: Make) -> None:
    engine, addon = engine_with_pool(batches=2, caching=True)
    assert engine.manager is not None
    requests = busy(engine, requests=12, tokens=900, answer=400)
    for bundles, how in itertools.islice(
        itertools.cycle([(4, "preempt"), (30, "wait"), (6, "wait"), (12, "preempt"), (100, "wait")]), 60
    ):
        limit(addon, bundles, how)
        engine.steps(5)
        engine.manager.page_allocator.watch()
        engine.manager.page_allocator.refill()
    limit(addon, 100, "wait")
    engine.finish_all()
    assert [request.output for request in requests] == [list(range(400))] * 12


def test_preempting_works_on_vllms_own_pool(shm: Any) -> None:
    engine = Engine(None, batches=2)
    addon = addon_of(engine)
    requests = busy(engine, requests=4)
    assert addon.reclaimer.preempt_count(3)["requests"] == 3
    assert len(engine.scheduler.running) == 1
    engine.finish_all()
    assert [request.output for request in requests] == [list(range(200))] * 4
