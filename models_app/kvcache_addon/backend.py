"""What stands behind the ``/kvcache`` endpoints: one async interface, two implementations.

``KVCacheMiddleware`` parses, authenticates, limits time and shapes answers; a *backend* knows the KV pool. The real
one (``vllm_backend.VllmBackend``) hands every call to EngineCore's own thread; the simulated engine supplies its own,
so that both speak the same wire format through the same middleware.

Every method returns a plain dict of JSON values, in bytes and seconds, and raises ``wire.Refused`` for an answer that
is not a success (400, 409, 501 …). A method never waits for memory to come back: a limit that is not reached yet is
an answer (``deferred``), not an error. Time limits belong to the middleware: when it gives up waiting the backend may
still finish.
"""

from __future__ import annotations

from typing import Any, Protocol

from models_app.kvcache_addon.wire import LimitOrder

#: The keys of ``Backend.status()``. All must be there; ``None`` means *not known*. Bytes are per GPU (one
#: tensor-parallel rank).
STATUS_KEYS = (
    "kvcached_active",  # False: no pool of kvcached in this engine; all sizes below are None
    "provider",  # "addon" | "pr324" | "shm" | "none"
    "engine",  # {"vllm", "kvcached", "pid", "tp", "pp", "dp_rank"}
    "ipc_name",
    "limit_bytes",  # as the segment says
    "effective_limit_bytes",  # what the pool allocates against
    "used_bytes",
    "prealloc_bytes",
    "capacity_bytes",  # largest limit that can ever be honoured
    "bundle_bytes",  # the step in which memory comes and goes
    "page_bytes",
    "num_layers",
    "num_kv_buffers",
    "block_size_tokens",
    "blocks_per_page",
    "state",  # "applied" | "deferred" | "pending" | "starved" | "unknown"
    "in_shrink",
    "shrink_target_bytes",
    "prefix_cached_bytes",
    "retired_bytes",
    "hard_minimum_bytes",
    "safety_floor_bytes",
    "full_context_floor_bytes",
    "immediate_floor_bytes",  # what running requests hold: a limit from here up needs nobody to be preempted
    "wanted_limit_bytes",  # the last order's size (None: never ordered); "limit_bytes" at the top of the answer
    "limit_revision",
    "last_change",  # {"size", "revision", "by", "at"} | None
    "drift_bytes",  # segment minus what we wrote last, when a stranger wrote it; else None
    "last_drift",  # {"found_bytes", "at"} of the last stranger's limit that was put back | None
    "requests",  # {"running", "waiting", "stuck": [{"id", "needs_bytes", "since_s"}]}
    "sleep",  # {"level": None | 1 | 2, ...}
    "last_reclaim",  # {"how", "requests", "tokens", "pause_s", "open", "at"} of the last forced reclaim | None
    "warnings",  # sentences
)

#: The keys of ``Backend.limit()``; ``wire.limit_answer`` adds the human and the pull request's names.
LIMIT_KEYS = (
    "status",  # "applied" | "deferred" | "pending" | "starved"
    "requested_bytes",
    "limit_bytes",  # what was written: requested, clamped, whole bundles
    "effective_limit_bytes",  # what the pool allocates against at this moment
    "previous_limit_bytes",
    "used_bytes",
    "prealloc_bytes",
    "freed_bytes",  # measured: footprint before minus after, not below 0
    "overage_bytes",  # footprint above the limit
    "capacity_bytes",
    "bundle_bytes",
    "hard_minimum_bytes",
    "safety_floor_bytes",
    "full_context_floor_bytes",
    "clamped",
    "warnings",  # sentences
    "revision",
    "preempted",  # {"requests", "tokens", "pause_s"} | None
    "ipc_name",
)

#: The keys of ``Backend.trim()``: one pass; the middleware runs a second one for what the allocator refilled.
TRIM_KEYS = ("status", "before_bytes", "after_bytes", "limit_bytes", "used_bytes", "prealloc_bytes", "ipc_name")


class Backend(Protocol):
    """The KV pool and the engine's switches, as the middleware sees them."""

    @property
    def ipc_name(self) -> str | None:
        """The instance's own segment; None when the engine has none."""

    async def status(self) -> dict[str, Any]:
        """``STATUS_KEYS``. Must also answer (with ``kvcached_active`` False) when the engine has no kvcached."""

    async def limit(self, order: LimitOrder) -> dict[str, Any]:
        """Set the limit: ``LIMIT_KEYS``. Refuses (409) with the codes ``below_hard_minimum`` (``force`` does not
        help), ``below_safety_floor``, ``stale``, ``conflict``, ``rejected`` (pages in quarantine), ``unavailable``
        (no pool)."""

    async def trim(self) -> dict[str, Any]:
        """One pass: give back what is mapped and not needed; the limit stays. ``TRIM_KEYS``."""

    async def safety_floor(self) -> dict[str, Any]:
        """``hard_minimum_bytes``, ``safety_floor_bytes``, ``full_context_floor_bytes``, ``immediate_floor_bytes``,
        ``bundle_bytes``, ``capacity_bytes``, ``ipc_name`` and ``description`` (a sentence)."""

    async def gpus(self) -> list[dict[str, Any]]:
        """The instance's own GPUs: ``{"index", "uuid", "total", "free"}``. Empty when they cannot be read."""

    async def sleep(self, level: int, mode: str) -> dict[str, Any]:
        """``status`` "asleep", ``level``, ``before_bytes``, ``after_bytes``, ``freed_bytes`` (KV, per GPU, measured).
        ``mode``: requests under way finish first ("wait"), are kept for later ("keep") or end ("abort")."""

    async def wake(self, tags: tuple[str, ...] | None) -> dict[str, Any]:
        """``status`` "awake" or "partly_awake", ``level`` (None when awake), ``asleep_tags``."""

    async def pause(self, mode: str) -> dict[str, Any]:
        """Stop scheduling; ``mode`` as above. ``status`` "paused"."""

    async def resume(self) -> dict[str, Any]:
        """Schedule again. ``status`` "running"."""

    async def reset_prefix_cache(self) -> dict[str, Any]:
        """``status`` "reset" or "partial", ``before_bytes``, ``after_bytes``, ``freed_bytes``."""

    async def abort_stuck(self) -> dict[str, Any]:
        """End the waiting requests that can never fit in the limit in force. ``status`` "done", ``aborted``: their
        ids."""
