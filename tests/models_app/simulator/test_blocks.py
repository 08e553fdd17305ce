"""The prefix cache on top of the pool."""

from __future__ import annotations

import pytest

from models_app.simulator.blocks import BlockPool, StaticManager
from models_app.simulator.pages import EngineFatal
from tests.models_app.simulator.helpers import make_pool

BUNDLE = 117_440_512


def make_blocks(pages: int = 20, *, bound: int = 1000, **options: object) -> BlockPool:
    pool = make_pool(pages=pages, **options)  # type: ignore[arg-type]
    return BlockPool(pool, pool.geometry.num_blocks, caching=True, max_cached_blocks=bound)


def serve(blocks: BlockPool, hashes: list[int]) -> list[int]:
    """One request whose blocks all have hashes: taken, filled, given back."""
    known = blocks.known_prefix(hashes)
    got = blocks.take(len(hashes) - len(known), known)
    assert got is not None
    blocks.remember(got, hashes)
    blocks.give(got)
    return got


def test_same_prompt_finds_its_blocks_again() -> None:
    blocks = make_blocks()
    first = serve(blocks, [1, 2, 3])
    assert blocks.known_prefix([1, 2, 3]) == first
    assert blocks.known_prefix([1, 2, 9]) == first[:2]
    assert blocks.known_prefix([9, 2, 3]) == []


def test_cached_blocks_count_as_used_and_as_free_for_the_scheduler() -> None:
    blocks = make_blocks()
    free = blocks.get_num_free_blocks()
    serve(blocks, list(range(100, 400)))
    assert blocks.kv_cache_manager
    assert blocks.kv_cache_manager.used_bytes > BUNDLE
    assert blocks.get_num_free_blocks() == free


def test_cache_is_bounded_whatever_the_size_of_the_pool() -> None:
    blocks = make_blocks(bound=100)
    serve(blocks, list(range(500)))
    assert len(blocks._evictable_blocks) == 100


def test_bound_of_0_keeps_nothing() -> None:
    blocks = make_blocks(bound=0)
    serve(blocks, [1, 2, 3])
    assert blocks.known_prefix([1]) == []


def test_eviction_for_memory_prefers_pages_that_become_empty() -> None:
    blocks = make_blocks(bound=64, min_reserved=0, max_reserved=0)
    serve(blocks, list(range(64 + 32)))
    assert blocks.kv_cache_manager
    assert len(blocks._evictable_blocks) == 64
    # 96 blocks lay on two pages beside the null block; what was evicted emptied one of them.
    assert blocks.kv_cache_manager.used_bytes == 2 * BUNDLE


def test_shortage_evicts_the_oldest() -> None:
    blocks = make_blocks(pages=3)
    serve(blocks, [1])
    serve(blocks, [2])
    assert blocks.take(190) is not None
    assert blocks.known_prefix([1]) == []
    assert blocks.known_prefix([2]) != []


def test_block_in_use_is_never_evicted() -> None:
    blocks = make_blocks(pages=2)
    got = blocks.take(1)
    assert got
    blocks.remember(got, [7])
    assert blocks.take(126) is not None
    assert blocks.known_prefix([7]) == got
    assert blocks.take(1) is None


def test_shared_prefix_stays_until_its_last_user_is_done() -> None:
    blocks = make_blocks()
    first = blocks.take(2)
    assert first
    blocks.remember(first, [1, 2])
    second = blocks.take(0, blocks.known_prefix([1, 2]))
    assert second == first
    blocks.give(first)
    assert len(blocks._evictable_blocks) == 0
    blocks.give(second)
    assert len(blocks._evictable_blocks) == 2


def test_reset_gives_idle_blocks_back_and_leaves_those_in_use() -> None:
    blocks = make_blocks(min_reserved=0, max_reserved=0)
    serve(blocks, list(range(200)))
    held = blocks.take(1)
    assert blocks.reset_prefix_cache()
    assert blocks.kv_cache_manager
    assert blocks.kv_cache_manager.used_bytes == 2 * BUNDLE
    blocks.give(held or [])
    assert blocks.kv_cache_manager.used_bytes == BUNDLE


def test_usage_is_measured_against_the_start_so_a_low_limit_reads_as_full() -> None:
    blocks = make_blocks()
    assert blocks.get_usage() < 0.01
    assert blocks.kv_cache_manager
    blocks.kv_cache_manager.resize(2 * blocks.kv_cache_manager.page_size)
    assert blocks.get_usage() > 0.9


def test_failed_allocation_is_fatal_with_pull_request_324_only() -> None:
    blocks = make_blocks()
    blocks.kv_cache_manager.alloc = lambda count: None  # type: ignore[union-attr, method-assign, assignment]
    assert blocks.take(5) is None
    blocks.misses_are_fatal = True
    with pytest.raises(EngineFatal, match="ValueError"):
        blocks.take(5)


def test_static_pool_reserves_its_null_block_and_runs_dry() -> None:
    blocks = BlockPool(StaticManager(10), 10, caching=False)
    got = blocks.take(9)
    assert got
    assert 0 not in got
    assert blocks.take(1) is None
    blocks.give(got)
    assert blocks.get_num_free_blocks() == 9
    assert blocks.kv_cache_manager is None
