"""A stand-in for kvcached 0.1.6's pool, for tests without a GPU: what its allocator, manager and block pool do,
hazards included.

Behaves as the released package was seen to: pages cost a bundle each, page 0 holds the null block, up to 10 freed
pages stay in reserve, a watcher copies the segment's limit into a target that the next allocation applies without any
bound, shrinking waits for pages to be freed, freed pages are only retired while batches may be under way, growing
re-issues page ids.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

MIN_RESERVED, MAX_RESERVED = 5, 10


class QuarantinedResizeError(ValueError):
    """kvcached's own name for it."""


class PoolExhausted(ValueError):
    """kvcached's ``KVCachePoolExhausted``, which its patch turns into *not now*."""


class FakePageAllocator:
    """Pages of one pool and the segment that tells of them."""

    def __init__(self, segment: Path, *, pages: int, page_bytes: int, buffers: int, start_bytes: int) -> None:
        self.segment, self.page_bytes, self.buffers = segment, page_bytes, buffers
        self.total = pages
        self.free_list = list(range(pages))
        self.reserved: list[int] = []
        self.reclaimed: list[int] = []
        self.quarantined: list[int] = []
        self.resize_target = -1
        self.observed = start_bytes // buffers
        self.mapped: set[int] = set()
        self.handed_out: set[int] = set()
        self.physical_pages = 10**9
        segment.write_bytes(struct.pack("<qqq", start_bytes, 0, 0))

    # --- what EngineCore's thread calls ---
    def alloc_page(self) -> int:
        if self.reserved:
            page = self.reserved.pop(0)
        elif self.free_list:
            page = self.free_list.pop(0)
            self._map(page)
        else:
            raise RuntimeError("No free pages left")
        if page in self.handed_out:
            raise AssertionError(f"page {page} was handed out twice")
        self.handed_out.add(page)
        self.publish()
        return page

    def free_pages(self, pages: list[int]) -> None:
        self.handed_out -= set(pages)
        room = max(MAX_RESERVED - len(self.reserved), 0)
        self.reserved += pages[:room]
        for page in pages[room:]:
            self.mapped.discard(page)
            self.free_list.append(page)
        self.publish()

    def resize(self, new_mem_size: int) -> bool:
        wanted = new_mem_size // self.page_bytes
        if self.quarantined:
            if wanted == self.total:
                return True
            raise QuarantinedResizeError("cannot resize a pool with quarantined pages")
        if wanted < self.in_use:
            return False
        if wanted > self.total:
            more = wanted - self.total
            again, self.reclaimed = self.reclaimed[:more], self.reclaimed[more:]
            self.free_list += again
            self.free_list += range(self.total, self.total + more - len(again))  # the re-issue of ids above capacity
        elif wanted < self.total:
            fewer = self.total - wanted
            if len(self.free_list) < fewer:
                if not self.reserved:
                    return False
                self._unmap_reserved()
                self.publish()
            if len(self.free_list) < fewer:
                return False
            for _ in range(fewer):
                self.reclaimed.append(self.free_list.pop())
        self.total = wanted
        return True

    def trim(self) -> None:
        self._unmap_reserved()
        self.publish()

    def get_page_state(self) -> dict[str, int]:
        return {
            "total_pages": self.total,
            "free_pages": self.total - self.in_use,
            "inuse_pages": self.in_use,
            "reserved_pages": len(self.reserved),
        }

    def get_num_total_pages(self) -> int:
        return self.total

    def get_resize_target(self) -> int:
        return self.resize_target

    def get_transaction_state(self) -> dict[str, Any]:
        return {"quarantined_page_ids": self.quarantined}

    def group_indices_by_page(self, blocks: list[int], block_bytes: int) -> dict[int, list[int]]:
        pages: dict[int, list[int]] = {}
        for block in blocks:
            pages.setdefault(block * block_bytes // self.page_bytes, []).append(block)
        return pages

    # --- what its own threads do, at the test's word ---
    def watch(self) -> None:
        """One look of the watcher thread (every 100 ms in kvcached)."""
        try:
            limit = struct.unpack("<q", self.segment.read_bytes()[:8])[0]
        except OSError:
            return
        if limit // self.buffers != self.observed:
            self.observed = self.resize_target = limit // self.buffers

    def refill(self) -> None:
        """One pass of the preallocation thread."""
        for _ in range(min(max(MIN_RESERVED - len(self.reserved), 0), len(self.free_list), self.physical_pages)):
            page = self.free_list.pop(0)
            self._map(page)
            self.reserved.append(page)
        self.publish()

    @property
    def in_use(self) -> int:
        return len(self.handed_out)

    def publish(self) -> None:
        bundle = self.page_bytes * self.buffers
        numbers = (self.in_use * bundle, len(self.reserved) * bundle)
        # A deleted segment comes back with no limit.
        limit = self.segment.read_bytes()[:8] if self.segment.exists() else struct.pack("<q", 0)
        self.segment.write_bytes(limit + struct.pack("<qq", *numbers))

    def _map(self, page: int) -> None:
        if page in self.mapped:
            raise AssertionError(f"page {page} was mapped twice")
        self.mapped.add(page)

    def _unmap_reserved(self) -> None:
        self.mapped -= set(self.reserved)
        self.free_list += self.reserved
        self.reserved = []


class FakeManager:
    """kvcached's ``KVCacheManager``: blocks inside pages, shrinking, retirement."""

    def __init__(
        self,
        directory: Path,
        *,
        capacity: int = 100,
        layers: int = 28,
        buffers: int = 2,
        page_bytes: int = 2 * 2**20,
        blocks_per_page: int = 64,
        deferred: bool = False,
        name: str = "sz-test-i1-a1",
    ) -> None:
        self.ipc_name = name
        self.num_layers, self.num_kv_buffers = layers, buffers
        self.page_size, self.block_mem_size = page_bytes, page_bytes // blocks_per_page
        self.mem_size = capacity * page_bytes
        self.page_allocator = FakePageAllocator(
            directory / name,
            pages=capacity,
            page_bytes=page_bytes,
            buffers=layers * buffers,
            start_bytes=self.mem_size * layers * buffers,
        )
        self.blocks_per_page = blocks_per_page
        self.free_blocks: dict[int, list[int]] = {}  # page -> its free blocks
        self.in_shrink = False
        self.target_num_blocks: int | None = None
        self.defer_physical_release = deferred
        self._retired_pages: list[tuple[int, list[int]]] = []
        self._epoch = 0
        self._resize_rejected = False
        self.barriers = 0
        self.resizes: list[int] = []
        self.null_block = self.alloc(1)
        self.page_allocator.refill()

    def alloc(self, need: int) -> list[int] | None:
        target = self.page_allocator.get_resize_target()
        if target > 0:
            self.resize(target)
        if self.available_size() < need:
            return None
        blocks: list[int] = []
        while len(blocks) < need:
            page = next((page for page, free in self.free_blocks.items() if free), None)
            if page is None:
                page = self.page_allocator.alloc_page()
                first = page * self.blocks_per_page
                self.free_blocks[page] = list(range(first, first + self.blocks_per_page))
            self._retired_pages = [
                (epoch, left) for epoch, pages in self._retired_pages if (left := [p for p in pages if p != page])
            ]
            take = self.free_blocks[page][: need - len(blocks)]
            del self.free_blocks[page][: len(take)]
            blocks += take
        return blocks

    def free(self, blocks: list[int]) -> None:
        empty: list[int] = []
        for block in blocks:
            page = block // self.blocks_per_page
            self.free_blocks[page].append(block)
            if len(self.free_blocks[page]) == self.blocks_per_page:
                empty.append(page)
        if empty and self.defer_physical_release:
            self._epoch += 1
            self._retired_pages.append((self._epoch, empty))
        elif empty:
            self._drop(empty)
        self._maybe_finish_shrink()

    def available_size(self) -> int:
        partly = sum(len(free) for free in self.free_blocks.values())
        if self.in_shrink:
            return partly
        allocator = self.page_allocator
        free = allocator.total - allocator.in_use
        return partly + min(free, allocator.physical_pages + len(allocator.reserved)) * self.blocks_per_page

    def get_page_occupancy(self, pages: list[int]) -> dict[int, int]:
        return {page: self.blocks_per_page - len(self.free_blocks[page]) for page in pages}

    def resize(self, new_mem_size: int) -> bool:
        self.resizes.append(new_mem_size // self.page_size)
        try:
            done = self.page_allocator.resize(new_mem_size)
        except QuarantinedResizeError:
            self.in_shrink, self.target_num_blocks = False, None
            raise
        if done:
            self.in_shrink, self.target_num_blocks = False, None
            return True
        self.in_shrink, self.target_num_blocks = True, new_mem_size // self.block_mem_size
        return False

    def trim(self) -> None:
        self.page_allocator.trim()

    def capture_physical_release_marker(self) -> int:
        return self._epoch

    def release_retired_pages_through(self, marker: int) -> None:
        pages = [page for epoch, ids in self._retired_pages for page in ids if epoch <= marker]
        self._retired_pages = [(epoch, ids) for epoch, ids in self._retired_pages if epoch > marker]
        if pages:
            self.barriers += 1
            self._drop(pages)
        self._maybe_finish_shrink()

    def _drop(self, pages: list[int]) -> None:
        for page in pages:
            del self.free_blocks[page]
        self.page_allocator.free_pages(pages)

    def _maybe_finish_shrink(self) -> None:
        if self._retired_pages or not self.in_shrink or self.target_num_blocks is None:
            return
        taken = sum(self.blocks_per_page - len(free) for free in self.free_blocks.values())
        if taken <= self.target_num_blocks and self.page_allocator.resize(self.target_num_blocks * self.block_mem_size):
            self.in_shrink, self.target_num_blocks = False, None


class FakeBlockPool:
    """kvcached's ``ElasticBlockPool``: prefix-cached blocks that nobody uses stay, and count as used, until evicted."""

    def __init__(self, manager: FakeManager, *, caching: bool = False) -> None:
        self.kv_cache_manager = manager
        self.caching = caching
        self._evictable_blocks: OrderedDict[int, None] = OrderedDict()

    def get_num_free_blocks(self) -> int:
        return self.kv_cache_manager.available_size() + len(self._evictable_blocks)

    def get_new_blocks(self, count: int) -> list[int]:
        short = count - self.kv_cache_manager.available_size()
        if short > 0:
            self._evict_blocks_from_pool(short, page_aware=False)
        blocks = self.kv_cache_manager.alloc(count)
        if blocks is None:
            raise PoolExhausted
        return blocks

    def free_blocks(self, blocks: list[int]) -> None:
        if self.caching:
            self._evictable_blocks.update(dict.fromkeys(blocks))
        elif blocks:
            self.kv_cache_manager.free(blocks)

    def _evict_blocks_from_pool(self, count: int, page_aware: bool = True) -> int:
        blocks = list(self._evictable_blocks)
        if page_aware:
            manager = self.kv_cache_manager
            by_page = manager.page_allocator.group_indices_by_page(blocks, manager.block_mem_size)
            taken = manager.get_page_occupancy(list(by_page))
            whole = [b for page, ids in by_page.items() if len(ids) >= taken[page] for b in ids]
            blocks = whole + [block for block in blocks if block not in set(whole)]
        chosen = blocks[:count]
        for block in chosen:
            del self._evictable_blocks[block]
        if chosen:
            self.kv_cache_manager.free(chosen)
        return len(chosen)

    def reset_prefix_cache(self) -> bool:
        self._evict_blocks_from_pool(len(self._evictable_blocks))
        return True
