"""Scheduling: order, preemption, starvation, and the floors that were measured on a GPU."""

from __future__ import annotations

import uuid

import pytest

from models_app.simulator.cards import LooseCards
from models_app.simulator.facts import GIB
from models_app.simulator.scheduler import PauseState, RequestStatus, Speed
from models_app.simulator.segment import SHM_FOLDER, Segment
from tests.models_app.simulator.helpers import make_geometry, make_pool, make_request, make_scheduler, run


def limited(pages: int, *, max_model_len: int = 32768, max_num_batched_tokens: int = 8192):
    pool = make_pool(pages=200)
    pool.resize(pages * pool.page_size)
    return make_scheduler(pool, max_model_len=max_model_len, max_num_batched_tokens=max_num_batched_tokens)


def test_requests_are_served_whole() -> None:
    scheduler = make_scheduler(make_pool())
    scheduler.add_request(make_request("a", 100, 7))
    scheduler.add_request(make_request("b", 1, 1))
    assert run(scheduler) == {"a": 7, "b": 1}
    assert scheduler.prompt_tokens == 101
    assert scheduler.generated_tokens == 8


@pytest.mark.parametrize(
    ("max_model_len", "prompt", "output", "bundles"), [(8192, 8172, 19, 9), (32768, 32740, 20, 33)]
)
def test_full_context_is_served_at_the_measured_floor_and_hangs_one_bundle_below(
    max_model_len: int, prompt: int, output: int, bundles: int
) -> None:
    enough = limited(bundles, max_model_len=max_model_len)
    enough.add_request(make_request("a", prompt, output))
    assert run(enough) == {"a": output}
    less = limited(bundles - 1, max_model_len=max_model_len)
    less.add_request(make_request("a", prompt, output))
    assert run(less).get("a", 0) < output
    assert less.waiting


def test_request_that_grows_past_the_limit_stops_where_measured() -> None:
    scheduler = limited(3)
    scheduler.add_request(make_request("a", 1500, 3000))
    # Measured: 1,556 tokens, then none in 45 s. 3 bundles hold 3 * 64 - 1 blocks of 16 tokens.
    assert run(scheduler)["a"] == pytest.approx(1556, abs=1)
    assert not scheduler.running
    assert len(scheduler.waiting) == 1


def test_small_request_behind_a_stuck_one_waits_too() -> None:
    scheduler = limited(4)
    scheduler.add_request(make_request("big", 8000, 10))
    scheduler.add_request(make_request("small", 10, 10))
    assert run(scheduler) == {}
    scheduler.finish_requests(["big"], RequestStatus.FINISHED_ABORTED)
    assert run(scheduler) == {"small": 10}


def test_stuck_engine_does_not_preempt_over_and_over() -> None:
    scheduler = limited(3, max_num_batched_tokens=512)
    scheduler.add_request(make_request("a", 1500, 3000))
    run(scheduler)
    before = scheduler.num_preemptions
    for _ in range(50):
        scheduler.step()
    assert scheduler.num_preemptions == before


def test_shortage_preempts_the_youngest_and_nobody_fails() -> None:
    scheduler = limited(6)
    for number in range(8):
        scheduler.add_request(make_request(str(number), 300, 900))
    got = run(scheduler)
    assert got == {str(number): 900 for number in range(8)}
    assert scheduler.num_preemptions > 0


def test_oldest_request_is_never_preempted_by_shortage() -> None:
    scheduler = limited(6)
    requests = [make_request(str(number), 300, 900) for number in range(8)]
    for request in requests:
        scheduler.add_request(request)
    run(scheduler)
    assert requests[0].num_preemptions == 0
    assert max(request.num_preemptions for request in requests) > 0


def test_preempted_request_goes_on_before_new_ones() -> None:
    scheduler = make_scheduler(make_pool())
    scheduler.add_request(make_request("old", 50, 20))
    scheduler.step()
    scheduler.add_request(make_request("new", 50, 20))
    scheduler.preempt_all()
    assert [request.request_id for request in scheduler.waiting] == ["old", "new"]


def test_preempting_everything_costs_time_but_no_token() -> None:
    scheduler = make_scheduler(make_pool())
    for number in range(6):
        scheduler.add_request(make_request(str(number), 200, 50))
    got: dict[str, int] = {}
    for number in range(200):
        for ident, count in scheduler.step().tokens.items():
            got[ident] = got.get(ident, 0) + count
        if number in (5, 20, 30):
            scheduler.preempt_all()
        if not scheduler.has_work():
            break
    assert got == {str(number): 50 for number in range(6)}
    assert scheduler.num_preemptions == 18


def test_sequences_above_max_num_seqs_wait() -> None:
    scheduler = make_scheduler(make_pool(), max_num_seqs=3)
    for number in range(5):
        scheduler.add_request(make_request(str(number), 10, 10))
    scheduler.step()
    assert (len(scheduler.running), len(scheduler.waiting)) == (3, 2)


def test_long_prompt_is_computed_in_chunks() -> None:
    scheduler = make_scheduler(make_pool(), max_num_batched_tokens=512)
    scheduler.add_request(make_request("a", 2000, 1))
    produced = [sum(scheduler.step().tokens.values()) for _ in range(4)]
    assert produced == [0, 0, 0, 1]


def test_client_that_leaves_frees_its_blocks_at_once() -> None:
    pool = make_pool()
    scheduler = make_scheduler(pool)
    scheduler.add_request(make_request("a", 3000, 500))
    scheduler.step()
    used = pool.used_bytes
    assert scheduler.finish_requests(["a", "unknown"], RequestStatus.FINISHED_ABORTED) == [("a", 0)]
    assert pool.used_bytes < used
    assert not scheduler.has_work()


def test_second_request_with_the_same_prefix_computes_less() -> None:
    scheduler = make_scheduler(make_pool(), caching=True, max_cached_blocks=1000)
    hashes = list(range(10))
    for ident in ("a", "b"):
        scheduler.add_request(make_request(ident, 160, 4, hashes=hashes))
        assert run(scheduler) == {ident: 4}
    # All but the last block: one token at least has to be computed.
    assert scheduler.block_pool.hits == 9 * 16


def test_idle_engine_with_prefix_cache_keeps_its_bound_mapped_until_it_is_reset() -> None:
    pool = make_pool()
    scheduler = make_scheduler(pool, caching=True, max_cached_blocks=1000)
    for number in range(6):
        prompt = 4000
        scheduler.add_request(make_request(str(number), prompt, 20, hashes=[number * 1000 + n for n in range(250)]))
    run(scheduler)
    # Measured: 1,996,488,704 bytes, which is 17 bundles, for 16,000 tokens.
    assert pool.used_bytes // pool.geometry.bundle_bytes == pytest.approx(17, abs=1)
    scheduler.reset_prefix_cache()
    assert pool.used_bytes == pool.geometry.bundle_bytes


def test_two_engines_compete_for_the_last_of_the_card() -> None:
    cards = LooseCards(8 * GIB)
    first, second = (
        make_scheduler(make_pool(pages=200, cards=cards)),
        make_scheduler(make_pool(pages=200, cards=cards)),
    )
    for number in range(80):
        first.add_request(make_request(str(number), 1000, 2000))
    for _ in range(400):
        first.step()
    # The first has grown to the card's 95 %; the second still serves from its reserve, as measured.
    assert cards.free_bytes() < cards.total_bytes * 0.06
    second.add_request(make_request("b", 4000, 50))
    assert run(second) == {"b": 50}
    assert first.block_pool.get_usage() > 0.3


def test_stock_engine_gives_memory_back_slowly_under_load_and_fails_nobody() -> None:
    name = f"sztest-{uuid.uuid4().hex[:12]}"
    try:
        segment = Segment(name, make_geometry(pages=200).capacity_bytes)
        pool = make_pool(pages=200, segment=segment, deferred=True)
        scheduler = make_scheduler(pool)
        for number in range(24):
            scheduler.add_request(make_request(str(number), 2000, 1500))
        got: dict[str, int] = {}

        def take(steps: int) -> float:
            seconds = 0.0
            for _ in range(steps):
                step = scheduler.step()
                pool.release_retired_pages_through(pool.capture_physical_release_marker())
                seconds += step.duration_s
                for ident, count in step.tokens.items():
                    got[ident] = got.get(ident, 0) + count
            return seconds

        take(100)
        before = pool.used_bytes
        segment.write_limit(before // 2)
        pool.page_allocator.watch()
        assert take(300) > 1.0
        # Measured: a target of half was not reached in 43 s; what is freed first stays mapped as reserve.
        assert before // 2 < pool.used_bytes < before
        assert scheduler.num_preemptions > 0
        assert scheduler.waiting
        while scheduler.has_work():
            take(100)
        assert got == {str(number): 1500 for number in range(24)}
        assert pool.used_bytes + pool.prealloc_bytes <= before // 2
    finally:
        (SHM_FOLDER / name).unlink(missing_ok=True)


def test_paused_engine_keeps_requests_and_schedules_none() -> None:
    scheduler = make_scheduler(make_pool())
    scheduler.add_request(make_request("a", 10, 10))
    scheduler.step()
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert not scheduler.has_work()
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    scheduler.add_request(make_request("b", 10, 10))
    assert run(scheduler) == {"a": 9}
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert run(scheduler) == {"b": 10}


def test_steps_take_longer_for_prefill_for_large_models_and_for_long_contexts() -> None:
    small = Speed(weights_bytes=10**9, parameters=5e8, kv_bytes_per_token=100_000)
    large = Speed(weights_bytes=140 * 10**9, parameters=7e10, kv_bytes_per_token=100_000)
    assert small.step_s(0, 100) < small.step_s(0, 1_000_000)
    assert small.step_s(0, 100) < small.step_s(8000, 100)
    assert small.step_s(0, 100) < large.step_s(0, 100)
    halved = Speed(weights_bytes=140 * 10**9, parameters=7e10, kv_bytes_per_token=100_000, tensor_parallel_size=2)
    assert halved.step_s(0, 100) < large.step_s(0, 100)
