"""The lower half of kvcached's pool, C++ there: pages by number, mapped on the cards, counted in the segment."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from models_app.simulator.cards import Cards
from models_app.simulator.facts import Geometry
from models_app.simulator.segment import Segment


class NoPage(Exception):
    """No page could be mapped: the card is full, or the page lies outside the reserved address range."""


class EngineFatal(Exception):
    """What vLLM's scheduler does not catch: EngineCore dies of it."""


@dataclass(slots=True)
class PoolOptions:
    """kvcached's environment variables, as far as they matter here."""

    min_reserved: int = 5
    max_reserved: int = 10
    gpu_utilization: float = 0.95
    #: Off, the segment is not watched at all: limits written to it do nothing (0.1.6).
    prealloc: bool = True
    #: Freed pages wait for the step under way before they are unmapped (async scheduling).
    deferred_release: bool = True
    #: A page beyond the start-up capacity kills the engine when its blocks are used, rather than being served silently.
    overshoot_crashes: bool = False


class PageAllocator:
    """Pages by number: in use, free, reserved (mapped and idle), or reclaimed (taken away by a lower limit)."""

    def __init__(self, geometry: Geometry, cards: Cards, segment: Segment | None, options: PoolOptions) -> None:
        self.geometry = geometry
        self.cards = cards
        self.segment = segment
        self.options = options
        self._total = geometry.num_blocks * geometry.block_bytes // geometry.page_bytes
        self._free = deque(range(self._total))
        self._reserved: deque[int] = deque()
        self._reclaimed: deque[int] = deque()
        self._free_count = self._total
        self._min_reserved = min(self._total, options.min_reserved)
        self._max_reserved = min(self._total, options.max_reserved)
        self._prealloc_due = True
        self._observed_size = geometry.num_blocks * geometry.block_bytes
        self._resize_target = -1

    # -- reading -------------------------------------------------------------------------------------------------

    def get_page_state(self) -> dict[str, int]:
        return {
            "total_pages": self._total,
            "free_pages": self._free_count,
            "inuse_pages": self._total - self._free_count,
            "reserved_pages": len(self._reserved),
        }

    def get_num_total_pages(self) -> int:
        """Pages of the limit that is allocated against at this moment."""
        return self._total

    def get_num_inuse_pages(self) -> int:
        return self._total - self._free_count

    def get_num_free_pages(self) -> int:
        return self._free_count

    def get_num_reserved_pages(self) -> int:
        return len(self._reserved)

    def get_avail_physical_pages(self) -> int:
        """Pages for which the card has room below its 95 %."""
        headroom = int(self.cards.total_bytes * (1.0 - self.options.gpu_utilization))
        return max(0, self.cards.free_bytes() - headroom) // self.geometry.bundle_bytes

    def get_resize_target(self) -> int:
        """The last limit seen in the segment, per layer and buffer; -1 until it first differed from the start."""
        return self._resize_target

    def group_indices_by_page(self, blocks: Iterable[int], block_bytes: int) -> dict[int, list[int]]:
        pages: dict[int, list[int]] = {}
        for block in blocks:
            pages.setdefault(block * block_bytes // self.geometry.page_bytes, []).append(block)
        return pages

    # -- the segment ---------------------------------------------------------------------------------------------

    def watch(self) -> bool:
        """kvcached's watcher thread, every 100 ms: remember a limit that changed. Applied at the next allocation."""
        values = self.segment.read() if self.segment and self.options.prealloc else None
        if values is None:
            return False
        size = _towards_zero(values.limit_bytes, self.geometry.num_layers * self.geometry.num_kv_buffers)
        if size == self._observed_size or size < 0:
            return False
        self._observed_size = self._resize_target = size
        return True

    def publish(self) -> None:
        """Write used and reserved bytes into the segment: at every page event, and at no other time."""
        if self.segment:
            bundle = self.geometry.bundle_bytes
            self.segment.write_usage(self.get_num_inuse_pages() * bundle, len(self._reserved) * bundle)

    # -- pages ---------------------------------------------------------------------------------------------------

    def alloc_page(self) -> int:
        """A mapped page: from the reserved ones first. Raises ``NoPage``."""
        if self._reserved:
            number = self._reserved.popleft()
            self._prealloc_due |= len(self._reserved) < self._min_reserved
        elif self._free:
            if not self._map(self._free[0]):
                raise NoPage
            number = self._free.popleft()
            self._prealloc_due = True
        else:
            raise NoPage
        self._free_count -= 1
        self.publish()
        return number

    def free_pages(self, numbers: list[int]) -> None:
        """Keep some as reserved, unmap the rest."""
        self._free_count += len(numbers)
        keep = max(0, self._max_reserved - len(self._reserved))
        self._reserved.extend(numbers[:keep])
        self._unmap(numbers[keep:])
        self.publish()

    def resize(self, layer_bytes: int) -> bool:
        """Set the number of pages. False: more are in use, nothing changed."""
        pages = layer_bytes // self.geometry.page_bytes
        if pages < self.get_num_inuse_pages():
            return False
        if pages > self._total:
            more = pages - self._total
            again = [self._reclaimed.popleft() for _ in range(min(more, len(self._reclaimed)))]
            # Pages beyond those that were taken away get new numbers counted from the present total, although some of
            # these may be in use: kvcached's own fault, and why a limit must never exceed the start-up capacity.
            self._free.extend((*again, *range(self._total, self._total + more - len(again))))
            self._free_count += more
            self._total = pages
            self.publish()
        elif pages < self._total:
            fewer = self._total - pages
            if len(self._free) < fewer:
                if not self._reserved:
                    return False
                self.trim()
                if len(self._free) < fewer:
                    return False
            self._reclaimed.extend(self._free.pop() for _ in range(fewer))
            self._free_count -= fewer
            self._total = pages
        return True

    def trim(self) -> None:
        """Unmap the reserved pages. The next preallocation may take some again."""
        numbers = list(self._reserved)
        self._reserved.clear()
        self._unmap(numbers)
        self.publish()

    def preallocate(self) -> int:
        """kvcached's background thread: refill the reserved pool to its minimum when something was taken from it."""
        if not self._prealloc_due or not self.options.prealloc:
            return 0
        self._prealloc_due = False
        wanted = min(self._min_reserved - len(self._reserved), len(self._free), self.get_avail_physical_pages())
        mapped = 0
        while mapped < wanted and self._map(self._free[0]):
            self._reserved.append(self._free.popleft())
            mapped += 1
        if mapped:
            self.publish()
        return mapped

    def _map(self, number: int) -> bool:
        # The virtual range is as large as the card: a page beyond it cannot be mapped at all.
        bundle = self.geometry.bundle_bytes
        return (number + 1) * bundle <= self.cards.total_bytes and self.cards.take(bundle)

    def _unmap(self, numbers: list[int]) -> None:
        self._free.extend(numbers)
        if numbers:
            self.cards.give(len(numbers) * self.geometry.bundle_bytes)


def _towards_zero(value: int, divisor: int) -> int:
    """C++ integer division."""
    return -(-value // divisor) if value < 0 else value // divisor
