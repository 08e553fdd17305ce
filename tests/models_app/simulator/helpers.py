"""Builders for the simulator's tests: shapes that were measured on a GPU, pools on a card of their own."""

from __future__ import annotations

from models_app.simulator.blocks import BlockPool
from models_app.simulator.cards import LooseCards
from models_app.simulator.facts import GIB, Geometry, SimFacts, geometry
from models_app.simulator.memory import KVCacheManager
from models_app.simulator.pages import PoolOptions
from models_app.simulator.scheduler import Limits, Request, Scheduler, Speed
from models_app.simulator.segment import Segment

#: The card and the shapes of the measurements (vLLM 0.24.0, kvcached 0.1.6, one H200).
H200_BYTES = 150_109_880_320


def shape(layers: int, kv_heads: int, head_dim: int, *, hidden: int = 1024, vocab: int = 151_936) -> SimFacts:
    return SimFacts(
        architecture="Qwen3ForCausalLM",
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        vocab_size=vocab,
        max_position_embeddings=40960,
        weights_bytes=1_500_000_000,
    )


QWEN3_06B = shape(28, 8, 128)
LLAMA_1B = shape(16, 8, 64, hidden=2048, vocab=128_256)
QWEN25_05B = shape(24, 2, 64)
QWEN3_8B = shape(36, 8, 128, hidden=4096)


def make_geometry(*, pages: int | None = None, facts: SimFacts = QWEN3_06B, budget: int | None = None) -> Geometry:
    """The measured geometry (64 blocks to a page); ``pages`` of capacity, or what ``budget`` bytes give."""
    bundle = geometry(facts, kv_budget_bytes=0, vllm_version="0.24.0").bundle_bytes
    size = budget if budget is not None else (pages or 20) * bundle
    return geometry(facts, kv_budget_bytes=size, vllm_version="0.24.0")


def make_pool(
    *,
    pages: int = 20,
    card_bytes: int = 80 * GIB,
    segment: Segment | None = None,
    cards: LooseCards | None = None,
    deferred: bool = False,
    **options: object,
) -> KVCacheManager:
    """A pool that has its null block and its reserve, as after a start."""
    pool = KVCacheManager(
        make_geometry(pages=pages),
        cards or LooseCards(card_bytes),
        segment,
        PoolOptions(deferred_release=deferred, **options),  # type: ignore[arg-type]
    )
    assert pool.reserve_null_block()
    pool.page_allocator.preallocate()
    return pool


def make_scheduler(
    pool: KVCacheManager,
    *,
    caching: bool = False,
    max_cached_blocks: int = -1,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 8192,
    max_model_len: int = 32768,
) -> Scheduler:
    blocks = BlockPool(pool, pool.geometry.num_blocks, caching=caching, max_cached_blocks=max_cached_blocks)
    speed = Speed(weights_bytes=10**9, parameters=5e8, kv_bytes_per_token=114_688)
    return Scheduler(blocks, speed, Limits(max_num_seqs, max_num_batched_tokens, 16, max_model_len))


def make_request(ident: str, prompt: int, output: int, *, hashes: list[int] | None = None) -> Request:
    return Request(ident, prompt, output, hashes=hashes or [])


def run(scheduler: Scheduler, steps: int = 10_000) -> dict[str, int]:
    """Take steps until nothing moves; the tokens that each request got."""
    got: dict[str, int] = {}
    for _ in range(steps):
        if not scheduler.has_work():
            break
        step = scheduler.step()
        manager = scheduler.block_pool.kv_cache_manager
        if manager:
            manager.release_retired_pages_through(manager.capture_physical_release_marker())
        for ident, count in step.tokens.items():
            got[ident] = got.get(ident, 0) + count
        if not step.duration_s:
            break
    return got
