"""What the requests of this engine ask of the pool: read from vLLM's scheduler, never changed here. EngineCore's
thread."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

from models_app.kvcache_addon.floors import Geometry, Need

#: Queues can hold tens of thousands; a request far back tells nothing that the first ones do not.
LOOK_AT = 2000
#: Statuses in which a queued request waits for nothing but KV memory.
WAITS_FOR_MEMORY = ("WAITING", "PREEMPTED")


class Demand:
    """Running and waiting requests, measured against a pool's geometry (None: vLLM's own static pool)."""

    def __init__(self, engine: Any, geometry: Geometry | None) -> None:
        self._engine = engine
        self._geometry = geometry
        scheduler = engine.scheduler
        config = scheduler.vllm_config if hasattr(scheduler, "vllm_config") else engine.vllm_config
        groups = getattr(getattr(scheduler, "kv_cache_config", None), "kv_cache_groups", None) or ()
        self.need = Need(
            specs=tuple(group.kv_cache_spec for group in groups),
            max_model_len=int(config.model_config.max_model_len),
            max_batched_tokens=int(config.scheduler_config.max_num_batched_tokens),
            lookahead_tokens=int(getattr(scheduler, "num_lookahead_tokens", 0) or 0),
        )

    def running(self) -> list[Any]:
        return list(self._engine.scheduler.running)

    def waiting(self) -> Iterator[Any]:
        """In the order in which they will be tried."""
        scheduler = self._engine.scheduler
        return itertools.chain(getattr(scheduler, "skipped_waiting", None) or (), scheduler.waiting)

    def waiting_count(self) -> int:
        scheduler = self._engine.scheduler
        return len(getattr(scheduler, "skipped_waiting", None) or ()) + len(scheduler.waiting)

    def lengths(self) -> Iterator[int]:
        """Tokens of each request so far (prompt and answer)."""
        return (int(request.num_tokens) for request in itertools.chain(self.running(), self._queued()))

    def paused(self) -> bool:
        """Whether scheduling is switched off (pause, sleep): then waiting tells nothing about memory."""
        state = getattr(self._engine.scheduler, "pause_state", None)
        return getattr(state, "name", "UNPAUSED") != "UNPAUSED"

    def busy(self) -> bool:
        """Whether the engine will take a step without being asked, in which kvcached releases what it retired."""
        return bool(self.running()) or bool(getattr(self._engine, "batch_queue", None))

    def stuck(self, limit_pages: int, since: float) -> list[dict[str, Any]]:
        """Waiting requests that can never fit in so many pages: ``id``, ``needs_bytes``, ``since_s``.

        ``since``: when the limit was set (epoch seconds); a request cannot have been stuck for longer.
        """
        if self._geometry is None:
            return []
        now = time.time()
        found = []
        for request in self._queued():
            pages = self._geometry.pages_for(self.need.blocks(int(request.num_tokens)))
            if pages > limit_pages:
                start = max(float(request.arrival_time), since)
                found.append(
                    {
                        "id": request.request_id,
                        "needs_bytes": pages * self._geometry.bundle_bytes,
                        "since_s": round(max(now - start, 0.0), 3),
                    }
                )
        return found

    def starved_by(self, limit_pages: int) -> str | None:
        """Why nothing runs though something waits: ``"limit"``, ``"gpu"`` (the card is full), or None."""
        if self._geometry is None or self.running() or self.paused():
            return None
        head = next(self._queued(), None)
        if head is None:
            return None
        blocks = self.need.blocks(int(head.num_tokens))
        if self._geometry.pages_for(blocks) > limit_pages:
            return "limit"
        # A first step needs no more than one step's tokens; vLLM asks for the whole prompt's blocks to be there.
        available = int(self._engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
        return "gpu" if available < blocks else None

    def _queued(self) -> Iterator[Any]:
        """Requests that wait for memory; those that wait for a grammar or a transfer are left out."""
        for request in itertools.islice(self.waiting(), LOOK_AT):
            if request.status.name in WAITS_FOR_MEMORY:
                yield request
