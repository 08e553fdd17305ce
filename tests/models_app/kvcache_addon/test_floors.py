"""How much memory a request needs: the formulas, held against what an H200 showed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from models_app.kvcache_addon.floors import Geometry, Need, group_blocks

MIB = 2**20


def geometry(blocks_per_page: int = 64, capacity: int = 1000) -> Geometry:
    """Qwen3-0.6B: 28 layers, K and V, bundles of 112 MiB."""
    return Geometry(2 * MIB, 28, 2, 2 * MIB // blocks_per_page, capacity)


class FullAttentionSpec:
    block_size = 16


class SlidingWindowSpec:
    block_size = 16
    sliding_window = 1024


class SlidingWindowMLASpec(SlidingWindowSpec):
    pass


class ChunkedLocalAttentionSpec:
    block_size = 16
    attention_chunk_size = 4096


class MambaSpec:
    block_size = 16
    mamba_cache_mode = "none"
    num_speculative_blocks = 0


class EncoderOnlyAttentionSpec:
    block_size = 16


def need(*specs: object, max_model_len: int = 32768, max_batched: int = 2048) -> Need:
    return Need(tuple(specs), max_model_len, max_batched)


def test_bundle_is_a_page_in_every_layer_and_buffer() -> None:
    """F9 of the peers: a change by 10 MB is no change at all."""
    assert geometry().bundle_bytes == 117_440_512


@pytest.mark.parametrize(("tokens", "bundles"), [(8192, 9), (32768, 33)])
def test_pages_of_a_full_context_are_those_that_served_it_on_a_gpu(tokens: int, bundles: int) -> None:
    """One bundle less and the request hung."""
    assert geometry().pages_for(need(FullAttentionSpec()).blocks(tokens)) == bundles


def test_floor_adds_a_bundle_for_fragmentation() -> None:
    g = geometry()
    assert g.floor_bytes(512) == 10 * g.bundle_bytes


def test_floor_is_never_below_two_bundles_nor_above_capacity() -> None:
    g = geometry(capacity=6)
    assert g.floor_bytes(0) == 2 * g.bundle_bytes
    assert g.floor_bytes(10**6) == 6 * g.bundle_bytes


def test_blocks_that_do_not_tile_a_page_count_by_the_worst_page() -> None:
    """A block across a page's edge belongs to neither page."""
    g = Geometry(2 * MIB, 4, 1, 384 * 1024, 100)
    usable = []
    for page in range(30):
        first = -(-page * g.page_bytes // g.block_bytes)
        last = (page + 1) * g.page_bytes // g.block_bytes
        usable.append(last - first)
    assert g.blocks_per_page == min(usable)


def test_sliding_window_takes_no_more_than_its_window() -> None:
    assert group_blocks(SlidingWindowSpec(), 32768, 2048) == (1023 + 2048 + 15) // 16 + 1
    assert group_blocks(SlidingWindowMLASpec(), 32768, 2048) == group_blocks(SlidingWindowSpec(), 32768, 2048)
    assert group_blocks(SlidingWindowSpec(), 160, 2048) == 10


def test_chunked_attention_takes_no_more_than_a_chunk() -> None:
    assert group_blocks(ChunkedLocalAttentionSpec(), 32768, 2048) == (4096 + 2048) // 16


@pytest.mark.parametrize(("mode", "blocks"), [("none", 1), ("align", 2), ("all", 2048)])
def test_state_space_layers_take_a_state_not_a_length(mode: str, blocks: int) -> None:
    spec = MambaSpec()
    spec.mamba_cache_mode = mode
    assert group_blocks(spec, 32768, 2048) == blocks


def test_encoder_only_layers_take_nothing() -> None:
    assert group_blocks(EncoderOnlyAttentionSpec(), 32768, 2048) == 0


def test_need_is_the_sum_over_all_groups() -> None:
    assert need(FullAttentionSpec(), SlidingWindowSpec()).blocks(160) == 20


def test_lookahead_of_speculative_decoding_counts() -> None:
    assert Need((FullAttentionSpec(),), 32768, 2048, lookahead_tokens=5).blocks(16) == 2


def test_safety_floor_serves_a_prefill_step_or_the_longest_request() -> None:
    n = need(FullAttentionSpec())
    assert n.floor_tokens([]) == 2048
    assert n.floor_tokens([100, 9000]) == 9000
    assert n.floor_tokens([10**6]) == 32768
    assert need(FullAttentionSpec(), max_model_len=512).floor_tokens([]) == 512


def test_unknown_spec_counts_as_full_attention() -> None:
    assert group_blocks(SimpleNamespace(block_size=32), 320, 2048) == 10
