"""Three hazards of stock kvcached 0.1.6, shut where they arise: inside the pool manager, at the call that resizes it.

Every allocation in 0.1.6 first re-applies the last value its watcher thread saw in the segment (looked at every 100
ms). Hence, without this guard:

* a limit above the start-up capacity makes the allocator hand out page ids twice, or ids outside its address range;
* just after a new limit, an allocation still applies the *old* one; if that one starves the waiting request nothing
  allocates any more, and the new limit is never seen;
* while a pool shrinks, up to ten freed bundles stay mapped in its reserve.

The guard replaces two methods on the manager *instance* and calls the originals.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from models_app.kvcache_addon.floors import HARD_MINIMUM_BUNDLES, Geometry
from models_app.kvcache_addon.segment import Segment

log = logging.getLogger("vllm.sardeenz")


class ResizeGuard:
    """Stands between kvcached's allocations and its ``resize``. Used on EngineCore's thread only."""

    def __init__(self, manager: Any, geometry: Geometry, segment: Segment, start_bytes: int) -> None:
        self._manager = manager
        self._geometry = geometry
        self._segment = segment
        self._resize = manager.resize
        self._finish_shrink = getattr(manager, "_maybe_finish_shrink", None)
        #: The limit that was ordered, in pages; None until the first order.
        self.wanted_pages: int | None = None
        #: What the segment holds if nobody else has written it.
        self.written_bytes = start_bytes
        #: The last limit of a stranger's that was put back: who asks later than the moment is told all the same.
        self.last_drift: dict[str, Any] | None = None

    def install(self) -> None:
        """Put the guard in place; doing it twice does nothing."""
        if self._manager.__dict__.get("resize") == self.resize:
            return
        self._manager.resize = self.resize
        if self._finish_shrink is not None:
            self._manager._maybe_finish_shrink = self.finish_shrink

    def resize(self, new_mem_size: int) -> bool:
        """The manager's ``resize``: bytes per buffer, as kvcached counts. Never above capacity or below the hard
        minimum, and never a value that our own later order has replaced."""
        pages = int(new_mem_size) // self._geometry.page_bytes
        if self._is_outdated(int(new_mem_size), pages):
            pages = self.wanted_pages if self.wanted_pages is not None else self._geometry.capacity_pages
        pages = max(min(pages, self._geometry.capacity_pages), HARD_MINIMUM_BUNDLES)
        manager = self._manager
        if not manager.in_shrink and pages == int(manager.page_allocator.get_num_total_pages()):
            # Nothing to do. The original would also drop kvcached's cached reading of free GPU memory, and so cost a
            # driver call at every allocation once a limit was ever set.
            return True
        return bool(self._resize(pages * self._geometry.page_bytes))

    def finish_shrink(self) -> None:
        """The manager's ``_maybe_finish_shrink``, called after each release: what a shrinking pool frees is
        unmapped."""
        if self._finish_shrink is not None:
            self._finish_shrink()
        manager = self._manager
        if manager.in_shrink and manager.page_allocator.get_page_state()["reserved_pages"]:
            manager.trim()

    def write(self, limit_bytes: int) -> None:
        """Write the limit into the segment (making it again where somebody deleted it). Raises ``OSError``."""
        state = self._manager.page_allocator.get_page_state()
        bundle = self._geometry.bundle_bytes
        remade = self._segment.write_limit(
            limit_bytes,
            used_bytes=int(state["inuse_pages"]) * bundle,
            prealloc_bytes=int(state["reserved_pages"]) * bundle,
        )
        if remade:
            log.warning("sardeenz: segment %s was gone and has been made again", self._segment.name)
        self.written_bytes = limit_bytes

    def put_back(self) -> bool:
        """Write our limit over a stranger's that cannot be honoured: above capacity, below the hard minimum, or no file
        at all. A limit between the two is left alone (and shown as drift)."""
        numbers = self._segment.read()
        highest = max(self._geometry.capacity_bytes, self.written_bytes)
        if numbers is not None and self._geometry.hard_minimum_bytes <= numbers.limit_bytes <= highest:
            return False
        try:
            self.write(self.written_bytes)
        except OSError as exc:
            log.warning("sardeenz: segment %s cannot be put right: %s", self._segment.name, exc)
            return False
        self.last_drift = {"found_bytes": numbers.limit_bytes if numbers else 0, "at": time.time()}
        found = "missing" if numbers is None else f"at {numbers.limit_bytes}"
        log.warning("sardeenz: segment %s was %s; put back to %d", self._segment.name, found, self.written_bytes)
        return True

    def _is_outdated(self, new_mem_size: int, pages: int) -> bool:
        """Whether kvcached is about to apply a watched value that does not hold (any more)."""
        if pages == self.wanted_pages or new_mem_size != int(self._manager.page_allocator.get_resize_target()):
            return False  # what we want, or somebody's own call
        if not HARD_MINIMUM_BUNDLES <= pages <= self._geometry.capacity_pages:
            self.put_back()
            return True
        if self.wanted_pages is None:
            return False
        numbers = self._segment.read()
        return numbers is None or numbers.limit_bytes <= 0 or numbers.limit_bytes == self.written_bytes
