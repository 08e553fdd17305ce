"""How KV memory is cut: bytes per token, bundles, and the limits below which an engine cannot make progress.

All bytes are per GPU (one tensor-parallel rank). kvcached moves memory in *bundles*: one page for every layer of a
group and every KV buffer (K and V apart; from vLLM 0.26 on both packed into one). Layers with a window and layers
without form groups of their own, cut to one size; groups share the bundles, so a bundle has as many layers as one
group.

Estimates for placement and forms. A running engine tells its own numbers, and those count.
"""

from __future__ import annotations

import math
from typing import Protocol

from models_app.engines.versions import PACKED_KV_SINCE, parse

PAGE_BYTES = 2 * 1024 * 1024
BLOCK_TOKENS = 16
#: vLLM's usual batch on a large GPU: the longest prefill that must fit at once.
BATCHED_TOKENS = 8192


class Shape(Protocol):
    """What of ``ModelFacts`` the formulas need."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype_bytes(self) -> int: ...
    @property
    def mla(self) -> bool: ...
    @property
    def kv_lora_rank(self) -> int | None: ...
    @property
    def qk_rope_head_dim(self) -> int | None: ...
    @property
    def sliding_window(self) -> int | None: ...
    @property
    def full_attention_layers(self) -> int | None: ...


def cell_bytes(facts: Shape, tp: int = 1) -> int:
    """KV bytes of one token in one layer on one GPU, K and V together."""
    if facts.mla:
        return ((facts.kv_lora_rank or 0) + (facts.qk_rope_head_dim or 0)) * facts.dtype_bytes
    heads = max(1, math.ceil(facts.num_kv_heads / max(1, tp)))  # fewer KV heads than GPUs: each holds a copy
    return 2 * heads * facts.head_dim * facts.dtype_bytes


def kv_bytes_per_token(facts: Shape, tp: int = 1) -> int:
    """KV bytes that one more token costs on one GPU, while it is inside every layer's window."""
    return facts.num_layers * cell_bytes(facts, tp)


def kv_bytes_for(facts: Shape, tokens: int, tp: int = 1) -> int:
    """KV bytes of one sequence of this length on one GPU: layers with a window stop growing at it."""
    full, windowed = _layers(facts)
    inside = min(tokens, facts.sliding_window) if facts.sliding_window else tokens
    return cell_bytes(facts, tp) * (full * tokens + windowed * inside)


def _layers(facts: Shape) -> tuple[int, int]:
    """Layers that keep everything, and layers that keep a window."""
    if facts.sliding_window is None or facts.full_attention_layers is None:
        return facts.num_layers, 0
    return facts.full_attention_layers, facts.num_layers - facts.full_attention_layers


def groups(facts: Shape) -> list[tuple[int, int | None]]:
    """KV groups as vLLM makes them: (layers in a group, window). All groups have as many layers, padded if need be.

    The size is that of the rarer kind; when both kinds are about as many (within a quarter), that of the commoner.
    """
    full, windowed = _layers(facts)
    if not full or not windowed:
        return [(facts.num_layers, facts.sliding_window if windowed else None)]
    size = min(full, windowed)
    if max(full, windowed) < size * 1.25:
        size = max(full, windowed)
    return [(size, None)] * math.ceil(full / size) + [(size, facts.sliding_window)] * math.ceil(windowed / size)


def kv_buffers(facts: Shape, vllm_version: str | None = None) -> int:
    """2 when K and V lie apart, 1 when they are packed or one latent. Apart, when the version is not known."""
    version = parse(vllm_version)
    return 1 if facts.mla or (version is not None and version >= PACKED_KV_SINCE) else 2


def bundle_bytes(facts: Shape, tp: int = 1, page: int = PAGE_BYTES, *, vllm_version: str | None = None) -> int:
    """The step in which memory comes and goes on one GPU."""
    return page * groups(facts)[0][0] * kv_buffers(facts, vllm_version)


def blocks_per_page(facts: Shape, tp: int = 1, page: int = PAGE_BYTES, *, vllm_version: str | None = None) -> int:
    """Blocks of 16 tokens that one bundle holds; at least 1 (kvcached refuses to start when none fits)."""
    block = cell_bytes(facts, tp) * BLOCK_TOKENS // kv_buffers(facts, vllm_version)
    return max(1, page // max(1, block))


def _blocks(facts: Shape, tokens: int, batched: int) -> int:
    """Blocks of one sequence over all groups, and the one that is always reserved."""
    total = 1
    for _, window in groups(facts):
        kept = tokens if window is None else min(tokens, window - 1 + batched)
        total += math.ceil(kept / BLOCK_TOKENS) + (0 if window is None else 1)
    return total


def full_context_floor_bytes(
    facts: Shape, max_model_len: int, tp: int = 1, *, page: int = PAGE_BYTES, vllm_version: str | None = None
) -> int:
    """The limit from which on one request of full length fits. Below it a long request waits for ever, in silence.

    Measured for a plain model on a GPU: 8,192 tokens of Qwen3-0.6B were served from 9 bundles, and not from 8.
    """
    blocks = _blocks(facts, max_model_len, min(BATCHED_TOKENS, max_model_len))
    per_bundle = blocks_per_page(facts, tp, page, vllm_version=vllm_version)
    return math.ceil(blocks / per_bundle) * bundle_bytes(facts, tp, page, vllm_version=vllm_version)


def hard_minimum_bytes(facts: Shape, tp: int = 1, *, page: int = PAGE_BYTES, vllm_version: str | None = None) -> int:
    """Two bundles: the one that block 0 pins, and one to work with."""
    return 2 * bundle_bytes(facts, tp, page, vllm_version=vllm_version)


def safety_floor_bytes(
    facts: Shape,
    max_model_len: int,
    tp: int = 1,
    *,
    max_num_batched_tokens: int = BATCHED_TOKENS,
    page: int = PAGE_BYTES,
    vllm_version: str | None = None,
) -> int:
    """The lowest limit at which an engine still makes progress: one batch of prefill, and a bundle to spare."""
    bundle = bundle_bytes(facts, tp, page, vllm_version=vllm_version)
    blocks = _blocks(facts, min(max_model_len, max_num_batched_tokens), max_num_batched_tokens)
    need = math.ceil(blocks / blocks_per_page(facts, tp, page, vllm_version=vllm_version)) + 1
    return max(need, 2) * bundle
