"""The live kvcached pool of this engine, on EngineCore's own thread: what it holds, and how memory leaves it.

Written against kvcached 0.1.6 (``KVCacheManager``, its C++ ``PageAllocator`` and the ``ElasticBlockPool`` that it
puts into vLLM). Without async scheduling the manager's lock is a no-op, so nothing here may run on another thread.

Words: a *page* costs a *bundle* of memory. Pages are in use, in reserve (mapped, idle: kvcached keeps up to 10) or
free. *Retired* pages are free for the pool's book-keeping but still mapped and counted as in use until the workers
have passed a barrier (batches under way may still touch them). *Evictable* blocks hold nothing but prefix cache.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from models_app.kvcache_addon.floors import Geometry
from models_app.kvcache_addon.guard import ResizeGuard
from models_app.kvcache_addon.segment import Segment

#: What the add-on needs of kvcached's manager and allocator; older versions (0.1.5 and before) lack some of it.
MANAGER_NEEDS = ("ipc_name", "mem_size", "page_size", "block_mem_size", "num_layers", "num_kv_buffers", "in_shrink",
                 "page_allocator", "resize", "trim", "release_retired_pages_through")  # fmt: skip
ALLOCATOR_NEEDS = ("get_page_state", "get_resize_target", "group_indices_by_page")
#: At start: kvcached reserves the null block in a thread of its own, which takes as long as the GPU is full.
POOL_READY_PATIENCE_S = 30.0
#: The allocator's background thread may hold a few pages between two lists for some milliseconds.
RESIZE_TRIES = 6
RESIZE_PAUSE_S = 0.002


class Unsupported(Exception):
    """There is a pool, but not of a kvcached that the add-on knows how to handle."""


class Pages(NamedTuple):
    """The allocator's counts at one moment."""

    total: int
    in_use: int
    reserved: int


class KVPool:
    """One engine's pool."""

    def __init__(self, manager: Any, block_pool: Any) -> None:
        check_supported(manager)
        self.manager = manager
        self.block_pool = block_pool
        self.geometry = Geometry(
            page_bytes=int(manager.page_size),
            num_layers=int(manager.num_layers),
            num_kv_buffers=int(manager.num_kv_buffers),
            block_bytes=int(manager.block_mem_size),
            capacity_pages=int(manager.mem_size) // int(manager.page_size),
        )
        #: The segment's limit at start: up to a bundle more than whole pages come to.
        self.start_bytes = int(manager.mem_size) * self.geometry.buffers
        self.segment = Segment(str(manager.ipc_name))
        self.guard = ResizeGuard(manager, self.geometry, self.segment, self.start_bytes)

    # --- reading -------------------------------------------------------------------------------------------------

    def ready(self, patience_s: float = 0.0) -> bool:
        """Whether the pool has its null block, waited for that long. kvcached's own calls would wait without end."""
        event = getattr(self.manager, "_post_init_done", None)
        return True if event is None else bool(event.wait(timeout=patience_s))

    def pages(self) -> Pages:
        state = self.manager.page_allocator.get_page_state()
        return Pages(int(state["total_pages"]), int(state["inuse_pages"]), int(state["reserved_pages"]))

    def retired_pages(self) -> int:
        return sum(len(ids) for _, ids in getattr(self.manager, "_retired_pages", None) or ())

    def held_pages(self) -> int:
        """Pages that requests or the prefix cache really hold: in use, less the retired."""
        return self.pages().in_use - self.retired_pages()

    def footprint_bytes(self) -> int:
        pages = self.pages()
        return (pages.in_use + pages.reserved) * self.geometry.bundle_bytes

    def evictable_blocks(self) -> list[int]:
        return list(getattr(self.block_pool, "_evictable_blocks", None) or ())

    def evictable_pages(self) -> int:
        """Whole pages that dropping the prefix cache would free."""
        blocks = self.evictable_blocks()
        if not blocks:
            return 0
        by_page = self.manager.page_allocator.group_indices_by_page(blocks, self.geometry.block_bytes)
        taken = self.manager.get_page_occupancy(list(by_page))
        return sum(1 for page, ids in by_page.items() if len(ids) >= taken.get(page, 0))

    def quarantined(self) -> bool:
        """Whether mappings failed half-way: kvcached refuses every other size from then on."""
        read = getattr(self.manager.page_allocator, "get_transaction_state", None)
        state = read() if callable(read) else None
        pages = state.get("quarantined_page_ids") if isinstance(state, dict) else None
        return bool(pages) or bool(getattr(self.manager, "_resize_rejected", False))

    # --- making room ---------------------------------------------------------------------------------------------

    def evict(self, pages: int | None = None) -> int:
        """Drop prefix cache: about so many pages' worth, whole pages first, or all of it. Returns the blocks dropped.

        Blocks that running requests share are left alone.
        """
        blocks = len(self.evictable_blocks())
        wanted = blocks if pages is None else min(blocks, pages * self.geometry.blocks_per_page)
        if wanted <= 0:
            return 0
        evict = getattr(self.block_pool, "_evict_blocks_from_pool", None)
        if callable(evict):
            return int(evict(wanted))
        self.block_pool.reset_prefix_cache()
        return blocks

    def release_retired(self) -> None:
        """Give back the retired pages now.

        Between two steps everything submitted to the workers is behind us, so the manager's own barrier (it waits for
        the batch under way) makes this as safe as at the end of a step, where kvcached itself does it.
        """
        if self.retired_pages():
            self.manager.release_retired_pages_through(self.manager.capture_physical_release_marker())

    def trim(self) -> None:
        self.manager.trim()

    def resize(self, target_pages: int) -> bool:
        """Bring the pool to so many pages and its footprint under them; False while more than that is held.

        Raises kvcached's ``QuarantinedResizeError``.
        """
        for attempt in range(RESIZE_TRIES):
            if self.manager.resize(target_pages * self.geometry.page_bytes):
                break
            self.trim()
            if self.pages().in_use > target_pages:
                return False
            if attempt:
                time.sleep(RESIZE_PAUSE_S)
        else:
            return False
        pages = self.pages()
        if pages.in_use + pages.reserved > target_pages:
            self.trim()
        return True


def check_supported(manager: Any) -> None:
    """Raise ``Unsupported`` unless the manager has what 0.1.6 has."""
    missing = [name for name in MANAGER_NEEDS if not hasattr(manager, name)]
    allocator = getattr(manager, "page_allocator", None)
    missing += [f"page_allocator.{name}" for name in ALLOCATOR_NEEDS if not hasattr(allocator, name)]
    if missing:
        raise Unsupported(f"this kvcached lacks {', '.join(missing)}: limits need kvcached 0.1.6")


def find_pool(engine: Any) -> KVPool | None:
    """The engine's pool, or None when vLLM runs with its own block pool (kvcached off, or its patch not loaded)."""
    scheduler = getattr(engine, "scheduler", None)
    block_pool = getattr(getattr(scheduler, "kv_cache_manager", None), "block_pool", None)
    manager = getattr(block_pool, "kv_cache_manager", None)
    return None if manager is None else KVPool(manager, block_pool)
