"""kvcached's own ``KVCacheManager`` and ours, over the same page allocator, through the same random histories.

Run with the released kvcached on the path. Its C++ extension is replaced by our ``PageAllocator``, so what is
compared is everything above pages: which blocks come from which page, what is available, when a shrink ends, what
stays retired.
"""

from __future__ import annotations

import random
import sys
import threading
from types import ModuleType
from typing import Any

from models_app.simulator.cards import LooseCards
from models_app.simulator.facts import GIB, Geometry
from models_app.simulator.memory import KVCacheManager
from models_app.simulator.pages import NoPage, PageAllocator, PoolOptions
from tests.models_app.simulator.helpers import make_geometry

PAGES = 24


class InternalPage:
    """kvcached's page object, as its extension offers it to Python."""

    def __init__(self, page_id: int, page_size: int) -> None:
        self.page_id = page_id
        self.page_size = page_size
        self._free: list[int] = []
        self._size = 0

    @staticmethod
    def get_block_range(page_id: int, page_size: int, block: int) -> tuple[int, int]:
        return -(-page_id * page_size // block), (page_id + 1) * page_size // block

    @staticmethod
    def get_num_blocks(page_size: int, block: int) -> int:
        return page_size // block

    def init(self, block: int) -> None:
        first, end = self.get_block_range(self.page_id, self.page_size, block)
        self._free = list(range(first, end))
        self._size = end - first

    def alloc(self, count: int) -> list[int]:
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def free_batch(self, blocks: list[int]) -> None:
        self._free += blocks

    def empty(self) -> bool:
        return len(self._free) == self._size

    def full(self) -> bool:
        return not self._free

    def num_free_blocks(self) -> int:
        return len(self._free)


class Allocator(PageAllocator):
    """Ours, called as kvcached calls its own."""

    def alloc_page(self) -> Any:
        try:
            return InternalPage(super().alloc_page(), self.geometry.page_bytes)
        except NoPage as error:
            raise RuntimeError("No free pages left") from error

    def set_use_worker_ipc(self, _value: bool) -> None: ...
    def start_prealloc_thread(self) -> None: ...
    def stop_prealloc_thread(self) -> None: ...


def install(geometry: Geometry, cards: LooseCards, options: PoolOptions) -> None:
    """Put the stand-in for the extension where kvcached imports it from."""
    module = ModuleType("kvcached.vmm_ops")
    module.PageAllocator = lambda *_given, **_named: Allocator(geometry, cards, None, options)  # type: ignore[attr-defined]
    module.InternalPage = InternalPage  # type: ignore[attr-defined]
    module.kv_tensors_created = lambda *_given, **_named: True  # type: ignore[attr-defined]
    for name in ("StateConsistencyError", "QuarantinedResizeError", "MapQuarantinedError"):
        setattr(module, name, type(name, (RuntimeError,), {}))
    module.__getattr__ = lambda name: None  # type: ignore[attr-defined]
    sys.modules["kvcached.vmm_ops"] = module
    # It needs all of torch; kvcached falls back to one process without it, which is what is compared here.
    sys.modules["kvcached.integration.vllm.interfaces"] = None  # type: ignore[assignment]


def theirs(geometry: Geometry, cards: LooseCards, options: PoolOptions) -> Any:
    """A released manager after its start."""
    install(geometry, cards, options)
    from kvcached import kv_cache_manager

    kv_cache_manager.PageAllocator = sys.modules["kvcached.vmm_ops"].PageAllocator
    manager = kv_cache_manager.KVCacheManager(
        num_blocks=geometry.num_blocks,
        block_size=geometry.block_tokens,
        cell_size=geometry.block_bytes // geometry.block_tokens,
        num_layers=geometry.num_layers,
        num_kv_buffers=geometry.num_kv_buffers,
        reserve_null_block=True,
        async_sched=True,
        defer_physical_release=options.deferred_release,
    )
    assert manager._post_init_done.wait(20)
    manager.page_allocator.preallocate()
    return manager


def ours(geometry: Geometry, cards: LooseCards, options: PoolOptions) -> KVCacheManager:
    manager = KVCacheManager(geometry, cards, None, options)
    assert manager.reserve_null_block()
    manager.page_allocator.preallocate()
    return manager


def state(manager: Any) -> dict[str, Any]:
    """What both can be asked."""
    manager._avail_physical_pages_cache = None
    manager._card_pages = None
    return {
        **manager.page_allocator.get_page_state(),
        "available": manager.available_size(),
        "in_shrink": manager.in_shrink,
        "target": manager.target_num_blocks,
        "allocated": manager._get_num_alloced_blocks(),
        "retired": sorted(page for _, pages in manager._retired_pages for page in pages),
        "card": manager.page_allocator.cards.taken_bytes,
    }


def history(seed: int, steps: int) -> None:
    """One random history through both. Raises ``AssertionError`` at the first difference."""
    dice = random.Random(seed)
    geometry = make_geometry(pages=PAGES)
    options = PoolOptions(
        deferred_release=dice.random() < 0.5,
        min_reserved=dice.choice((0, 2, 5)),
        max_reserved=dice.choice((0, 5, 10)),
    )
    # Sometimes the card is the limit, sometimes the pool.
    size = dice.choice((4 * GIB, 80 * GIB))
    pair = (theirs(geometry, LooseCards(size), options), ours(geometry, LooseCards(size), options))
    held: list[list[int]] = []
    for step in range(steps):
        action = dice.choice(
            ("alloc", "alloc", "alloc", "free", "free", "release", "resize", "trim", "prealloc", "part")
        )
        where = f"seed {seed}, step {step}: {action}"
        if action == "alloc":
            count = dice.choice((1, 1, 3, 64, 100, 300))
            for manager in pair:
                manager._avail_physical_pages_cache = manager._card_pages = None
            got = [manager.alloc(count) for manager in pair]
            assert got[0] == got[1], f"{where}: {got}"
            if got[0]:
                held.append(list(got[0]))
        elif action in ("free", "part") and held:
            blocks = held.pop(dice.randrange(len(held)))
            if action == "part" and len(blocks) > 1:
                dice.shuffle(blocks)
                keep = blocks[len(blocks) // 2 :]
                held.append(keep)
                blocks = blocks[: len(blocks) // 2]
            for manager in pair:
                manager.free(list(blocks))
        elif action == "release":
            for manager in pair:
                manager.release_retired_pages_through(manager.capture_physical_release_marker())
        elif action == "resize":
            layer = int(dice.choice((0.5, 1, 2, 3.5, 6, 12, PAGES)) * geometry.page_bytes)
            results = [manager.resize(layer) for manager in pair]
            assert results[0] == results[1], where
        elif action == "trim":
            for manager in pair:
                manager.trim()
        elif action == "prealloc":
            for manager in pair:
                manager.page_allocator.preallocate()
        seen = [state(manager) for manager in pair]
        assert seen[0] == seen[1], f"{where}: kvcached {seen[0]} != simulator {seen[1]}"


def main(*, seeds: int, steps: int) -> None:
    """Many histories; prints how many were alike."""
    threading.excepthook = lambda problem: sys.exit(f"kvcached's thread failed: {problem.exc_value!r}")
    for seed in range(seeds):
        history(seed, steps)
    print(f"{seeds} histories alike")
