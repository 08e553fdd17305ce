"""How much KV memory an engine needs to make progress: pure functions over the pool's geometry and the KV groups.

Blocks of all groups come from one pool, so a request's need is the sum over its groups. One block (the null block) is
always taken. Measured on an H200: 8,192 tokens in blocks of 16, 64 blocks to a bundle, are served with 9 bundles and
hang with 8; that is ``ceil((512 + 1) / 64)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

#: The null block's bundle and one more: below this nothing can be served at all.
HARD_MINIMUM_BUNDLES = 2
#: A request's blocks need not fill whole bundles: neighbours leave holes.
FRAGMENTATION_BUNDLES = 1


@dataclass(frozen=True)
class Geometry:
    """The pool's measures, which never change after start. Bytes are per GPU."""

    page_bytes: int
    num_layers: int
    num_kv_buffers: int
    block_bytes: int  # one block in one layer's K (or V)
    capacity_pages: int

    @property
    def bundle_bytes(self) -> int:
        """What one page costs: it is mapped in every layer and buffer at once."""
        return self.page_bytes * self.num_layers * self.num_kv_buffers

    @property
    def capacity_bytes(self) -> int:
        return self.capacity_pages * self.bundle_bytes

    @property
    def buffers(self) -> int:
        return self.num_layers * self.num_kv_buffers

    @property
    def blocks_per_page(self) -> int:
        """Usable blocks of the worst page: a block across a page's edge belongs to neither page."""
        if self.page_bytes % self.block_bytes == 0:
            return self.page_bytes // self.block_bytes
        lost = self.block_bytes - math.gcd(self.page_bytes, self.block_bytes)
        return max((self.page_bytes - lost) // self.block_bytes, 1)

    @property
    def hard_minimum_bytes(self) -> int:
        return HARD_MINIMUM_BUNDLES * self.bundle_bytes

    def pages(self, size_bytes: int) -> int:
        """Whole pages that fit in so many bytes."""
        return size_bytes // self.bundle_bytes

    def pages_for(self, blocks: int) -> int:
        """Pages that hold so many blocks beside the null block."""
        return math.ceil((1 + blocks) / self.blocks_per_page)

    def floor_bytes(self, blocks: int) -> int:
        """The limit that lets a request of so many blocks finish, with a bundle for fragmentation; at most the
        capacity."""
        pages = max(self.pages_for(blocks) + FRAGMENTATION_BUNDLES, HARD_MINIMUM_BUNDLES)
        return min(pages, max(self.capacity_pages, HARD_MINIMUM_BUNDLES)) * self.bundle_bytes


@dataclass(frozen=True)
class Need:
    """How many blocks a request of some length takes in this engine."""

    specs: tuple[Any, ...]  # vLLM's KVCacheSpec of each group
    max_model_len: int
    max_batched_tokens: int
    lookahead_tokens: int = 0

    def blocks(self, tokens: int) -> int:
        """Blocks for a request that is ``tokens`` long, over all groups."""
        tokens = min(tokens + self.lookahead_tokens, self.max_model_len + self.lookahead_tokens)
        return sum(group_blocks(spec, tokens, self.max_batched_tokens) for spec in self.specs)

    def floor_tokens(self, lengths: Iterable[int]) -> int:
        """The length that the safety floor has to serve: a whole prefill step, or the longest request there is."""
        return min(self.max_model_len, max([self.max_batched_tokens, *lengths]))


def group_blocks(spec: Any, tokens: int, max_batched_tokens: int) -> int:
    """Blocks of one KV group for a request of ``tokens``; windows and states are bounded whatever the length."""
    kinds = {kind.__name__ for kind in type(spec).__mro__}
    block = max(int(getattr(spec, "block_size", 1) or 1), 1)
    whole = math.ceil(tokens / block)
    if "MambaSpec" in kinds:
        extra = int(getattr(spec, "num_speculative_blocks", 0) or 0)
        mode = getattr(spec, "mamba_cache_mode", "none")
        return whole + extra if mode == "all" else (2 if mode == "align" else 1) + extra
    if "SlidingWindowSpec" in kinds:
        window = int(spec.sliding_window) - 1 + max_batched_tokens
        return min(whole, math.ceil(window / block) + 1)
    if "ChunkedLocalAttentionSpec" in kinds:
        return min(whole, math.ceil((int(spec.attention_chunk_size) + max_batched_tokens) / block))
    if "EncoderOnlyAttentionSpec" in kinds:
        return 0
    return whole
