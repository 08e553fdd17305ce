"""The elastic KV pool of kvcached 0.1.6: pages that are mapped and unmapped in bundles, limits, shrinking, starvation.

Modelled on how the released allocator behaves, awkward sides included, since the product exists to handle them:

* a page gives its memory back only when every block on it is free, so requests that ended leave half-empty pages
  behind;
* freed pages stay mapped as the *reserved* pool (refilled to 5, kept up to 10); block 0 is never free, so one bundle
  always stays;
* a new limit is picked up from the segment every 100 ms and applied **only inside the next allocation**: an idle pool
  does not shrink, and a pool whose scheduler sees too few blocks to even try does not notice a raised limit;
* a limit below use puts the pool into *shrink*: no new page is taken until enough blocks were freed;
* growing stops at 95 % of the card, whoever fills it.

``KVCacheManager`` and ``PageAllocator`` carry kvcached's own names where the add-on calls them, so that its EngineCore
half manages this pool with the same code as the real one. Bytes are per GPU. Not thread-safe: one thread owns it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from models_app.simulator.cards import Cards
from models_app.simulator.facts import Geometry
from models_app.simulator.pages import EngineFatal, NoPage, PageAllocator, PoolOptions
from models_app.simulator.segment import Segment

#: Seconds for which the free memory of the card is believed before it is asked again.
FREE_MEMORY_TTL_S = 0.1
NULL_BLOCK = 0


@dataclass(slots=True)
class _Page:
    number: int
    capacity: int
    free: list[int]


class KVCacheManager:
    """Blocks on pages: which page a block comes from, when a page is empty, and the lazy shrink."""

    def __init__(
        self, geometry: Geometry, cards: Cards, segment: Segment | None = None, options: PoolOptions | None = None
    ) -> None:
        self.geometry = geometry
        self.options = options or PoolOptions()
        self.page_allocator = PageAllocator(geometry, cards, segment, self.options)
        self.ipc_name = segment.name if segment else ""
        self.page_size = geometry.page_bytes
        self.block_mem_size = geometry.block_bytes
        self.mem_size = geometry.num_blocks * geometry.block_bytes
        self.num_layers = geometry.num_layers
        self.num_kv_buffers = geometry.num_kv_buffers
        self.in_shrink = False
        self.target_num_blocks: int | None = None
        self._partial: dict[int, _Page] = {}
        self._full: dict[int, _Page] = {}
        self._partial_free = 0
        self._retired_pages: list[tuple[int, list[int]]] = []
        self._release_epoch = 0
        self._card_pages: tuple[float, int] | None = None

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """In use, as the segment says: with the null block, half-empty pages, cached prefixes and retired pages."""
        return self.page_allocator.get_num_inuse_pages() * self.geometry.bundle_bytes

    @property
    def prealloc_bytes(self) -> int:
        return self.page_allocator.get_num_reserved_pages() * self.geometry.bundle_bytes

    @property
    def retired_bytes(self) -> int:
        return sum(len(numbers) for _, numbers in self._retired_pages) * self.geometry.bundle_bytes

    def available_size(self) -> int:
        """Blocks that could be had now; while shrinking only those on pages that are in use anyway."""
        blocks = self._partial_free
        if not self.in_shrink:
            allocator = self.page_allocator
            physical = self._physical_pages() + allocator.get_num_reserved_pages()
            blocks += min(allocator.get_num_free_pages(), physical) * self.geometry.blocks_per_page
        return blocks

    def _physical_pages(self) -> int:
        now = time.monotonic()
        if self._card_pages is None or now - self._card_pages[0] >= FREE_MEMORY_TTL_S:
            self._card_pages = (now, self.page_allocator.get_avail_physical_pages())
        return self._card_pages[1]

    def get_page_occupancy(self, numbers: Iterable[int]) -> dict[int, int]:
        """Blocks handed out on each of these pages."""
        known = {number: self._full.get(number) or self._partial.get(number) for number in numbers}
        return {number: page.capacity - len(page.free) if page else 0 for number, page in known.items()}

    def _get_num_alloced_blocks(self) -> int:
        pages = (*self._full.values(), *self._partial.values())
        return sum(page.capacity for page in pages) - self._partial_free

    # -- blocks --------------------------------------------------------------------------------------------------

    def reserve_null_block(self) -> bool:
        """Take block 0 for padding. False: the card has no room, and the start has to wait."""
        return self.available_size() >= 1 and self.alloc(1) == [NULL_BLOCK]

    def alloc(self, count: int) -> list[int] | None:
        """``count`` blocks, or None. Applies a limit seen in the segment first: this is the only place that does."""
        target = self.page_allocator.get_resize_target()
        if target > 0:
            self.resize(target)
        if self.available_size() < count:
            return None
        blocks: list[int] = []
        while len(blocks) < count:
            missing = count - len(blocks)
            if self._partial:
                page = self._partial.pop(self._best_page(missing))
                if self._retired_pages and len(page.free) == page.capacity:
                    self._unretire(page.number)
            else:
                try:
                    page = self._new_page()
                except NoPage:
                    if blocks:
                        self.free(blocks)
                    return None
            taken, page.free = page.free[:missing], page.free[missing:]
            blocks += taken
            self._partial_free -= len(taken)
            (self._partial if page.free else self._full)[page.number] = page
        if self.options.overshoot_crashes and max(blocks) >= self.geometry.num_blocks:
            # vLLM's own list of blocks ends before this one.
            raise EngineFatal("IndexError: list index out of range")
        return blocks

    def _best_page(self, missing: int) -> int:
        """The fullest page that still holds all of it, else the emptiest: keeps the blocks of a request together."""
        # Of equals the one touched longest ago: dictionaries keep that order.
        free = {number: len(page.free) for number, page in self._partial.items()}
        fits = [number for number, count in free.items() if count >= missing]
        return min(fits, key=free.__getitem__) if fits else max(free, key=free.__getitem__)

    def _new_page(self) -> _Page:
        number = self.page_allocator.alloc_page()
        self._card_pages = None
        block, size = self.geometry.block_bytes, self.geometry.page_bytes
        # A block across the edge of two pages belongs to neither.
        first, end = -(-number * size // block), (number + 1) * size // block
        self._partial_free += end - first
        return _Page(number, end - first, list(range(first, end)))

    def free(self, blocks: list[int]) -> None:
        """Give blocks back. Pages that become empty are unmapped now, or when the step under way is over."""
        empty: list[int] = []
        for number, indices in self.page_allocator.group_indices_by_page(blocks, self.block_mem_size).items():
            page = self._full.pop(number, None) or self._partial.pop(number)
            self._partial[number] = page
            page.free += indices
            self._partial_free += len(indices)
            if len(page.free) == page.capacity:
                empty.append(number)
        if not empty:
            self._maybe_finish_shrink()
        elif self.options.deferred_release:
            self._release_epoch += 1
            self._retired_pages.append((self._release_epoch, empty))
        else:
            self._release(empty)
            self._maybe_finish_shrink()

    def _unretire(self, number: int) -> None:
        left = [(epoch, [each for each in numbers if each != number]) for epoch, numbers in self._retired_pages]
        self._retired_pages = [(epoch, numbers) for epoch, numbers in left if numbers]

    def capture_physical_release_marker(self) -> int:
        return self._release_epoch

    def release_retired_pages_through(self, marker: int) -> None:
        """The steps up to ``marker`` are over: unmap what was freed during them."""
        due = [number for epoch, numbers in self._retired_pages if epoch <= marker for number in numbers]
        self._retired_pages = [(epoch, numbers) for epoch, numbers in self._retired_pages if epoch > marker]
        if due:
            self._release(due)
        self._maybe_finish_shrink()

    def _release(self, numbers: list[int]) -> None:
        for number in numbers:
            self._partial_free -= self._partial.pop(number).capacity
        self.page_allocator.free_pages(numbers)
        self._card_pages = None

    # -- limits --------------------------------------------------------------------------------------------------

    def resize(self, layer_bytes: int) -> bool:
        """Set the limit, in bytes of one layer and buffer. False: more is in use, the pool now shrinks as blocks go."""
        self._card_pages = None
        if self.page_allocator.resize(layer_bytes):
            self.in_shrink, self.target_num_blocks = False, None
            return True
        self.in_shrink = True
        self.target_num_blocks = layer_bytes // self.block_mem_size
        return False

    def _maybe_finish_shrink(self) -> None:
        if self._retired_pages or not self.in_shrink or self.target_num_blocks is None:
            return
        if self._get_num_alloced_blocks() <= self.target_num_blocks and self.page_allocator.resize(
            self.target_num_blocks * self.block_mem_size
        ):
            self.in_shrink, self.target_num_blocks = False, None
            self._card_pages = None

    def trim(self) -> None:
        self.page_allocator.trim()
        self._card_pages = None
