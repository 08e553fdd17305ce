"""The elastic pool: what the released kvcached 0.1.6 was seen to do, on a GPU and with its own allocator on a CPU."""

from __future__ import annotations

import uuid

import pytest

from models_app.simulator.cards import LooseCards
from models_app.simulator.facts import GIB
from models_app.simulator.pages import EngineFatal
from models_app.simulator.segment import SHM_FOLDER, Segment
from tests.models_app.simulator.helpers import H200_BYTES, make_geometry, make_pool

BUNDLE = 117_440_512


@pytest.fixture
def name():
    name = f"sztest-{uuid.uuid4().hex[:12]}"
    yield name
    (SHM_FOLDER / name).unlink(missing_ok=True)


@pytest.fixture
def segment(name: str) -> Segment:
    return Segment(name, make_geometry(pages=20).capacity_bytes)


def release(pool) -> None:
    pool.release_retired_pages_through(pool.capture_physical_release_marker())


def limit(pool, segment: Segment, pages: float) -> None:
    """A limit as ``kvctl`` writes it, and the watcher's next look."""
    segment.write_limit(int(pages * BUNDLE))
    pool.page_allocator.watch()


# -- at rest -----------------------------------------------------------------------------------------------------


def test_idle_pool_holds_one_bundle_and_five_in_reserve(segment: Segment) -> None:
    cards = LooseCards(H200_BYTES)
    make_pool(segment=segment, cards=cards)
    assert segment.read() == (20 * BUNDLE, 117_440_512, 587_202_560)
    assert cards.taken_bytes == 117_440_512 + 587_202_560


def test_after_load_ten_bundles_stay_in_reserve(segment: Segment) -> None:
    pool = make_pool(segment=segment)
    blocks = pool.alloc(15 * 64)
    assert blocks
    pool.free(blocks)
    assert segment.read() == (20 * BUNDLE, BUNDLE, 10 * BUNDLE)


def test_used_and_reserve_are_exactly_what_the_card_gave() -> None:
    cards = LooseCards(H200_BYTES)
    pool = make_pool(cards=cards, deferred=True)
    held = []
    for size in (1, 63, 64, 65, 200):
        held.append(pool.alloc(size))
        assert cards.taken_bytes == pool.used_bytes + pool.prealloc_bytes
    for blocks in held:
        pool.free(blocks)
        assert cards.taken_bytes == pool.used_bytes + pool.prealloc_bytes
    release(pool)
    assert cards.taken_bytes == pool.used_bytes + pool.prealloc_bytes


def test_reserve_of_0_to_0_keeps_nothing_mapped() -> None:
    pool = make_pool(min_reserved=0, max_reserved=0)
    blocks = pool.alloc(300)
    pool.free(blocks)
    assert (pool.used_bytes, pool.prealloc_bytes) == (BUNDLE, 0)


def test_segment_changes_only_on_page_events(segment: Segment) -> None:
    pool = make_pool(segment=segment)
    before = (SHM_FOLDER / segment.name).stat().st_mtime_ns
    assert pool.alloc(10)
    pool.page_allocator.watch()
    assert (SHM_FOLDER / segment.name).stat().st_mtime_ns == before
    assert pool.alloc(64)
    assert (SHM_FOLDER / segment.name).stat().st_mtime_ns > before


# -- pages -------------------------------------------------------------------------------------------------------


def test_page_gives_its_memory_back_only_when_all_of_its_blocks_are_free() -> None:
    pool = make_pool(max_reserved=0, min_reserved=0)
    first, second = pool.alloc(60), pool.alloc(60)
    used = pool.used_bytes
    assert first
    assert second
    pool.free(first[:-1])
    pool.free(second)
    survivor = first[-1]
    assert pool.used_bytes < used
    assert pool.get_page_occupancy([survivor * pool.block_mem_size // pool.page_size]) != {0: 0}
    pool.free([survivor])
    assert pool.used_bytes == BUNDLE


def test_block_ids_are_unique_and_within_the_pool() -> None:
    pool = make_pool()
    blocks = pool.alloc(20 * 64 - 1)
    assert blocks
    assert len(set(blocks)) == len(blocks)
    assert 0 not in blocks
    assert max(blocks) < pool.geometry.num_blocks
    assert pool.alloc(1) is None


def test_freed_pages_stay_counted_until_the_step_is_over() -> None:
    pool = make_pool(deferred=True)
    blocks = pool.alloc(64 * 3)
    used = pool.used_bytes
    pool.free(blocks)
    assert pool.used_bytes == used
    assert pool.retired_bytes > 0
    release(pool)
    assert pool.used_bytes == BUNDLE
    assert pool.retired_bytes == 0


def test_retired_page_that_is_used_again_is_not_unmapped() -> None:
    pool = make_pool(deferred=True, pages=3, min_reserved=0, max_reserved=0)
    blocks = pool.alloc(64)
    pool.free(blocks)
    again = pool.alloc(64)
    assert again
    release(pool)
    assert pool.alloc(64)
    assert not set(again) & set(pool.alloc(60) or [])


def test_growth_stops_at_95_percent_of_the_card_whoever_fills_it() -> None:
    cards = LooseCards(20 * BUNDLE)
    pool = make_pool(pages=20, cards=cards)
    assert pool.alloc(64 * 17)
    pool.page_allocator.preallocate()
    # 1 of 20 bundles is the 5 % that stay free.
    assert cards.free_bytes() >= BUNDLE
    other = make_pool(pages=20, cards=LooseCards(20 * BUNDLE))
    other.page_allocator.cards.taken_bytes = 18 * BUNDLE  # type: ignore[attr-defined]
    other._card_pages = None
    # Only what is mapped already is left: the rest of the null block's page, and five pages in reserve.
    assert other.available_size() == 63 + 5 * 64 + 64


def test_free_memory_below_the_headroom_is_no_room_not_a_huge_number() -> None:
    cards = LooseCards(100 * BUNDLE)
    pool = make_pool(cards=cards, min_reserved=0)
    cards.taken_bytes = 99 * BUNDLE
    pool._card_pages = None
    assert pool.available_size() == 63


def test_page_lost_to_a_neighbour_between_check_and_mapping_is_a_miss_and_changes_nothing() -> None:
    cards = LooseCards(80 * GIB)
    pool = make_pool(cards=cards, min_reserved=0, max_reserved=0)
    assert pool.available_size() > 200
    cards.taken_bytes = cards.total_bytes - 2 * BUNDLE
    before = (pool.used_bytes, pool.available_size())
    assert pool.alloc(64 * 5) is None
    assert pool.used_bytes == before[0]
    assert pool.alloc(63) is not None


# -- limits ------------------------------------------------------------------------------------------------------


def test_limit_in_the_segment_does_nothing_to_an_idle_pool(segment: Segment) -> None:
    pool = make_pool(segment=segment)
    pool.free(pool.alloc(64 * 12) or [])
    limit(pool, segment, 3)
    assert (pool.used_bytes, pool.prealloc_bytes) == (BUNDLE, 10 * BUNDLE)
    assert pool.page_allocator.get_num_total_pages() == 20


def test_limit_in_the_segment_is_applied_by_the_next_allocation(segment: Segment) -> None:
    pool = make_pool(segment=segment)
    pool.free(pool.alloc(64 * 12) or [])
    limit(pool, segment, 3)
    assert pool.alloc(1)
    assert pool.page_allocator.get_num_total_pages() == 3
    assert pool.used_bytes + pool.prealloc_bytes <= 3 * BUNDLE


def test_limit_below_use_shrinks_as_blocks_are_freed_and_kills_nobody(segment: Segment) -> None:
    pool = make_pool(segment=segment)
    requests = [pool.alloc(64) for _ in range(16)]
    limit(pool, segment, 5)
    assert pool.alloc(1)
    assert pool.in_shrink
    # Nothing new beyond what is left on pages in use.
    assert pool.available_size() < 64
    for blocks in requests:
        pool.free(blocks or [])
    assert not pool.in_shrink
    assert pool.page_allocator.get_num_total_pages() == 5
    assert pool.used_bytes + pool.prealloc_bytes <= 5 * BUNDLE


def test_up_to_ten_freed_bundles_stay_mapped_while_shrinking(segment: Segment) -> None:
    pool = make_pool(segment=segment)
    requests = [pool.alloc(64) for _ in range(16)]
    limit(pool, segment, 2)
    assert pool.alloc(1)
    for blocks in requests[:12]:
        pool.free(blocks or [])
    assert pool.in_shrink
    assert pool.prealloc_bytes == 10 * BUNDLE
    pool.trim()
    assert pool.prealloc_bytes == 0


@pytest.mark.parametrize("pages", [2, 1, 1 - 1 / BUNDLE, 0.5, 4096 / BUNDLE])
def test_limit_of_less_than_a_bundle_still_serves_a_thousand_tokens(segment: Segment, pages: float) -> None:
    pool = make_pool(segment=segment)
    limit(pool, segment, pages)
    blocks = pool.alloc(2)
    assert blocks
    assert pool.available_size() >= 63 - 2


@pytest.mark.parametrize("value", [1, 0, -1])
def test_limits_that_come_to_nothing_are_ignored_while_the_segment_shows_them(segment: Segment, value: int) -> None:
    pool = make_pool(segment=segment)
    segment.write_limit(value)
    pool.page_allocator.watch()
    assert pool.alloc(300)
    assert pool.page_allocator.get_num_total_pages() == 20
    assert segment.read().limit_bytes == value  # type: ignore[union-attr]


def test_starved_pool_never_notices_a_raised_limit_in_the_segment(segment: Segment) -> None:
    pool = make_pool(segment=segment)
    limit(pool, segment, 1)
    assert pool.alloc(1)
    limit(pool, segment, 100)
    # The scheduler asks what is available, sees too little and never allocates.
    assert pool.available_size() == 62
    assert pool.page_allocator.get_num_total_pages() == 1


def test_resize_in_process_wakes_a_starved_pool(segment: Segment) -> None:
    pool = make_pool(segment=segment)
    limit(pool, segment, 1)
    assert pool.alloc(1)
    assert pool.resize(20 * pool.page_size)
    assert pool.available_size() > 1000


def test_start_up_limit_restored_is_applied(segment: Segment) -> None:
    pool = make_pool(segment=segment)
    limit(pool, segment, 3)
    assert pool.alloc(1)
    limit(pool, segment, 20)
    assert pool.alloc(1)
    assert pool.page_allocator.get_num_total_pages() == 20


def test_without_preallocation_the_segment_is_not_watched(segment: Segment) -> None:
    pool = make_pool(segment=segment, prealloc=False)
    limit(pool, segment, 3)
    assert pool.alloc(64 * 10)
    assert pool.page_allocator.get_num_total_pages() == 20


def test_once_a_limit_was_seen_every_allocation_applies_it_again(segment: Segment) -> None:
    pool = make_pool(segment=segment)
    limit(pool, segment, 10)
    assert pool.alloc(1)
    assert pool.resize(15 * pool.page_size)
    assert pool.alloc(1)
    assert pool.page_allocator.get_num_total_pages() == 10


def test_trim_frees_the_reserve_and_leaves_the_limit(segment: Segment) -> None:
    pool = make_pool(segment=segment)
    pool.free(pool.alloc(64 * 12) or [])
    pool.trim()
    assert segment.read() == (20 * BUNDLE, BUNDLE, 0)
    assert pool.page_allocator.get_num_total_pages() == 20


def test_reserve_is_refilled_after_the_next_allocation_that_takes_a_page() -> None:
    pool = make_pool()
    pool.trim()
    assert pool.page_allocator.preallocate() == 0
    assert pool.alloc(64)
    assert pool.page_allocator.preallocate() == 5


# -- above the capacity ------------------------------------------------------------------------------------------


def test_limit_above_capacity_hands_out_pages_twice(segment: Segment) -> None:
    pool = make_pool(segment=segment, min_reserved=0, max_reserved=0, pages=20)
    held = pool.alloc(64 * 10) or []
    limit(pool, segment, 12)
    pool.free(pool.alloc(1) or [])
    limit(pool, segment, 30)
    more = pool.alloc(64 * 18) or []
    pages = [block * pool.block_mem_size // pool.page_size for block in (*held, *more)]
    assert len(set(held) & set(more)) > 0 or max(pages) >= 20


def test_block_beyond_the_pool_kills_the_engine_when_the_fault_is_on(segment: Segment) -> None:
    pool = make_pool(segment=segment, overshoot_crashes=True, min_reserved=0, max_reserved=0)
    limit(pool, segment, 30)
    with pytest.raises(EngineFatal, match="list index out of range"):
        for _ in range(30):
            pool.alloc(64)


def test_page_outside_the_cards_address_range_fails_in_a_loop(segment: Segment) -> None:
    cards = LooseCards(25 * BUNDLE)
    pool = make_pool(segment=segment, cards=cards, min_reserved=0, max_reserved=0, gpu_utilization=1.0)
    limit(pool, segment, 60)
    held = [blocks for blocks in (pool.alloc(64) for _ in range(19)) if blocks]
    cards.taken_bytes = 0
    pool._card_pages = None
    got = [pool.alloc(64) for _ in range(8)]
    assert held
    assert got[-1] is None
    assert pool.available_size() >= 64
