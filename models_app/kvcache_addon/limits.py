"""The limit of one pool: who ordered what with which revision, and how an order is carried out. On EngineCore's thread.

Both of kvcached's ways are always taken together, with the same number: the segment (what every outside tool reads,
and what each allocation re-applies) and the manager's own ``resize`` (which alone reaches an idle or a starved
engine). kvcached's ``set_instance_memory_limit`` is not used: it leaves the segment as it was and then loses against
it.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from models_app.kvcache_addon.demand import Demand
from models_app.kvcache_addon.pool import POOL_READY_PATIENCE_S, KVPool
from models_app.kvcache_addon.reclaim import Reclaimer
from models_app.kvcache_addon.wire import LimitOrder, Refused

log = logging.getLogger("vllm.sardeenz")


class LimitControl:
    """The last order, and how to carry out the next."""

    def __init__(self, pool: KVPool, demand: Demand, reclaimer: Reclaimer) -> None:
        self.pool = pool
        self.demand = demand
        self.reclaimer = reclaimer
        self.requested_bytes: int | None = None
        self.revision: int | None = None
        self.last_change: dict[str, Any] | None = None
        self.changed_at = 0.0
        self._segment_failed = ""
        #: The launch's limit, when the card was so full that the pool had no page yet.
        self._at_first_page: LimitOrder | None = None

    # --- orders --------------------------------------------------------------------------------------------------

    def apply_initial(self, size_bytes: int) -> dict[str, Any]:
        """The launch's limit, before anything is served: raised to the hard minimum, cut to the capacity, never
        refused.

        A start must not fail over its limit; what is wrong with it is in the answer's warnings and in the log.
        """
        size = max(size_bytes, self.pool.geometry.hard_minimum_bytes)
        order = LimitOrder(size_bytes=size, revision=0, force=True, by="launch")
        if not self.pool.ready(POOL_READY_PATIENCE_S):
            self._at_first_page = order
        return self.apply(order)

    def apply(self, order: LimitOrder) -> dict[str, Any]:
        """Carry out an order: ``backend.LIMIT_KEYS``. Raises ``Refused`` with nothing changed."""
        pool, geometry = self.pool, self.pool.geometry
        revision = self._check_revision(order)
        raw_capacity = max(pool.start_bytes, geometry.capacity_bytes)
        target_pages = geometry.pages(min(order.size_bytes, geometry.capacity_bytes))
        limit_bytes = target_pages * geometry.bundle_bytes
        floors = self.floors()
        warnings = self._check_floors(order, limit_bytes, floors)
        previous = pool.segment.read()
        before = pool.footprint_bytes()

        resized = self._resize(target_pages)
        self._remember(order, revision)
        try:
            pool.guard.write(limit_bytes)
            self._segment_failed = ""
        except OSError as exc:
            self._segment_failed = f"the segment could not be written ({exc}): outside tools show another limit"
            log.warning("sardeenz: %s", self._segment_failed)
        preempted = None
        if not resized:
            resized, preempted = self._make_room(target_pages, order.reclaim, warnings)
        if self._segment_failed:
            warnings.append(self._segment_failed)
        if order.size_bytes > raw_capacity:
            warnings.append(
                f"cut to the capacity at start, {geometry.capacity_bytes} bytes: more can never be honoured"
            )

        pages = pool.pages()
        used, prealloc = pages.in_use * geometry.bundle_bytes, pages.reserved * geometry.bundle_bytes
        answer = {
            "status": self.state(),
            "requested_bytes": order.size_bytes,
            "limit_bytes": limit_bytes,
            "effective_limit_bytes": self.effective_bytes(),
            "previous_limit_bytes": previous.limit_bytes if previous else 0,
            "used_bytes": used,
            "prealloc_bytes": prealloc,
            "freed_bytes": max(before - used - prealloc, 0),
            "overage_bytes": max(used + prealloc - limit_bytes, 0),
            "capacity_bytes": geometry.capacity_bytes,
            "bundle_bytes": geometry.bundle_bytes,
            **floors,
            "clamped": order.size_bytes > raw_capacity,
            "warnings": warnings,
            "revision": revision,
            "preempted": preempted,
            "ipc_name": pool.segment.name,
        }
        log.info(
            "sardeenz: limit %d (revision %s, by %s, reclaim %s): %s, %d freed, %d over",
            limit_bytes, revision, order.by or "-", order.reclaim,
            answer["status"], answer["freed_bytes"], answer["overage_bytes"],
        )  # fmt: skip
        return answer

    def settle(self) -> None:
        """Bring a limit that is still to come nearer, without taking anything from anybody; called whenever status is
        asked.

        Does what kvcached leaves to the next allocation: an idle engine has none, and a starved one cannot have one.
        """
        pool, late = self.pool, self._at_first_page
        if late is not None and pool.ready():
            self._at_first_page = None
            if self.revision is None:
                self.apply(late)
        wanted = pool.guard.wanted_pages
        pool.guard.put_back()
        if wanted is None or self.drift_bytes() is not None:
            return  # nothing was ordered, or a stranger's limit stands: shown as drift, not fought over
        if not (pool.manager.in_shrink or pool.pages().total != wanted):
            return
        if pool.manager.in_shrink:
            pool.evict()
        if not self.demand.busy():
            pool.release_retired()
        self._try_resize(wanted)

    # --- how things stand ----------------------------------------------------------------------------------------

    def state(self) -> str:
        """``applied``, ``deferred`` (over the limit, shrinking), ``starved`` or ``pending`` (segment and pool
        differ)."""
        pool, wanted = self.pool, self.pool.guard.wanted_pages
        pages = pool.pages()
        if self.demand.starved_by(self.limit_pages()) is not None:
            return "starved"
        target = pages.total if wanted is None else wanted
        if pool.manager.in_shrink or pages.in_use + pages.reserved > target:
            return "deferred"
        if self.drift_bytes() is not None or self._segment_failed or pages.total != target:
            return "pending"
        return "applied"

    def limit_pages(self) -> int:
        """Pages that requests can count on: the ordered limit, a stranger's, or what the pool has."""
        drift, guard, geometry = self.drift_bytes(), self.pool.guard, self.pool.geometry
        if drift is not None:
            return min(geometry.pages(guard.written_bytes + drift), geometry.capacity_pages)
        return self.pool.pages().total if guard.wanted_pages is None else guard.wanted_pages

    def effective_bytes(self) -> int:
        """What the pool hands out against: while it shrinks, no more than is in use."""
        pages = self.pool.pages()
        held = pages.in_use if self.pool.manager.in_shrink else pages.total
        return held * self.pool.geometry.bundle_bytes

    def drift_bytes(self) -> int | None:
        """The segment's limit minus what we wrote last; None when they agree. A missing segment counts as 0."""
        numbers = self.pool.segment.read()
        found = numbers.limit_bytes if numbers else 0
        return None if found == self.pool.guard.written_bytes else found - self.pool.guard.written_bytes

    def floors(self) -> dict[str, int]:
        """``hard_minimum_bytes``, ``safety_floor_bytes`` and ``full_context_floor_bytes``."""
        geometry, need = self.pool.geometry, self.demand.need
        tokens = need.floor_tokens(self.demand.lengths())
        return {
            "hard_minimum_bytes": geometry.hard_minimum_bytes,
            "safety_floor_bytes": geometry.floor_bytes(need.blocks(tokens)),
            "full_context_floor_bytes": geometry.floor_bytes(need.blocks(need.max_model_len)),
        }

    def immediate_floor_bytes(self) -> int:
        """What running requests hold: a limit from here up takes nothing from anybody."""
        return (self.pool.held_pages() - self.pool.evictable_pages()) * self.pool.geometry.bundle_bytes

    # --- steps of an order ---------------------------------------------------------------------------------------

    def _check_revision(self, order: LimitOrder) -> int:
        last = self.revision
        if order.revision is None:
            return 1 if last is None else last + 1
        if last is not None and order.revision < last:
            raise Refused(
                409, "stale", f"revision {order.revision} is older than {last}, which is in force",
                revision=last, limit_bytes=self.requested_bytes, last_change=self.last_change,
            )  # fmt: skip
        if order.revision == last and order.size_bytes != self.requested_bytes:
            raise Refused(
                409, "conflict", f"revision {last} was already used for {self.requested_bytes} bytes",
                revision=last, limit_bytes=self.requested_bytes, last_change=self.last_change,
            )  # fmt: skip
        return order.revision

    def _check_floors(self, order: LimitOrder, limit_bytes: int, floors: dict[str, int]) -> list[str]:
        warnings = []
        if limit_bytes < floors["hard_minimum_bytes"]:
            raise Refused(
                409, "below_hard_minimum",
                f"{order.size_bytes} bytes are less than two bundles of {self.pool.geometry.bundle_bytes}: "
                "nothing could be served, so this cannot be forced",
                requested_bytes=order.size_bytes, bundle_bytes=self.pool.geometry.bundle_bytes, **floors,
            )  # fmt: skip
        if limit_bytes < floors["safety_floor_bytes"]:
            if not order.force:
                raise Refused(
                    409, "below_safety_floor",
                    f"{limit_bytes} bytes are below the safety floor of {floors['safety_floor_bytes']}: "
                    "requests of ordinary size would wait for ever (send force to insist)",
                    requested_bytes=order.size_bytes, limit_bytes=limit_bytes, **floors,
                )  # fmt: skip
            warnings.append("below the safety floor: a request that needs more than this waits for ever")
        elif limit_bytes < floors["full_context_floor_bytes"]:
            warnings.append("below the full-context floor: the longest requests that the model takes cannot be served")
        return warnings

    def _resize(self, target_pages: int) -> bool:
        pool, guard = self.pool, self.pool.guard
        was, guard.wanted_pages = guard.wanted_pages, target_pages
        if not pool.ready():
            guard.wanted_pages = was
            raise Refused(409, "unavailable", "the pool still waits for its first page: the GPU is full")
        try:
            return pool.resize(target_pages)
        except Exception as exc:
            guard.wanted_pages = was
            if not isinstance(exc, ValueError):  # kvcached's QuarantinedResizeError is one
                raise
            raise Refused(409, "rejected", f"kvcached refuses another size: {exc}; the engine needs a restart") from exc

    def _remember(self, order: LimitOrder, revision: int) -> None:
        self.requested_bytes, self.revision = order.size_bytes, revision
        self.changed_at = time.time()
        self.last_change = {
            "size": order.size_bytes,
            "revision": revision,
            "by": order.by,
            "at": self.changed_at,
        }

    def _make_room(self, target_pages: int, reclaim: str, warnings: list[str]) -> tuple[bool, dict[str, Any] | None]:
        """More is held than the limit allows: first what costs little, then, if so ordered, running requests."""
        pool = self.pool
        over = pool.held_pages() - target_pages
        if over > 0:
            pool.evict(over)
            if pool.held_pages() > target_pages:
                pool.evict()
        taken = None
        if reclaim != "wait" and pool.held_pages() > target_pages:
            taken = self.reclaimer.reclaim(reclaim, lambda: pool.held_pages() > target_pages, pool.evict)
            warnings += taken.pop("warnings")
        if pool.held_pages() <= target_pages:
            pool.release_retired()
        return self._try_resize(target_pages), taken

    def _try_resize(self, target_pages: int) -> bool:
        try:
            return self.pool.resize(target_pages)
        except ValueError as exc:  # pages went into quarantine since the order was taken
            log.warning("sardeenz: kvcached refuses to resize: %s", exc)
            return False
