"""Engine-core half of the add-on: a ``vllm.general_plugins`` entry point (``register``) that gives EngineCore one
method.

``EngineCore.sardeenz_op(op, args)`` is called by the API server's half through vLLM's own utility calls, hence on
EngineCore's main thread, between two steps: the only place where kvcached's pool may be changed. It returns plain
values only.

vLLM runs general plugins in the API server, in EngineCore, in every worker and in a short-lived model inspector. A
forked EngineCore inherits the patched class; a spawned one runs the plugin inside ``EngineCore.__init__``, too late
to wrap that. So class attributes are set, and ``run_busy_loop`` is wrapped: it starts right after ``__init__``, and
the API server asks the engine a first question before it opens its port, so the initial limit is in force before
``/health`` can answer.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from models_app.kvcache_addon.answers import human
from models_app.kvcache_addon.demand import Demand
from models_app.kvcache_addon.limits import LimitControl
from models_app.kvcache_addon.pool import KVPool, Unsupported, find_pool
from models_app.kvcache_addon.reclaim import Reclaimer
from models_app.kvcache_addon.slumber import SELF_TEST, Slumber
from models_app.kvcache_addon.versions import kvcached_version, vllm_version
from models_app.kvcache_addon.wire import LimitOrder, Refused

log = logging.getLogger("vllm.sardeenz")

CORE_MODULE = "vllm.v1.engine.core"
INSPECTOR = "vllm.model_executor.models.registry"
INITIAL_LIMIT = "SARDEENZ_INITIAL_LIMIT_BYTES"
ATTRIBUTE = "_sardeenz"


def register() -> None:
    """The entry point. Safe to call twice and in any of vLLM's processes; does nothing where there is no EngineCore."""
    if CORE_MODULE not in sys.modules and not _may_fork_an_engine():
        return
    from vllm.v1.engine import core

    engine_class = core.EngineCore
    if "sardeenz_op" in engine_class.__dict__:
        return
    engine_class.sardeenz_op = sardeenz_op
    for name in ("EngineCoreProc", "DPEngineCoreProc"):
        kind = getattr(core, name, None)
        if kind is not None and "run_busy_loop" in kind.__dict__:
            kind.run_busy_loop = _with_start(kind.run_busy_loop)


def _may_fork_an_engine() -> bool:
    """The first process (``vllm serve``), not one of its children and not the model inspector."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return multiprocessing.parent_process() is None and getattr(spec, "name", None) != INSPECTOR


def _with_start(run_busy_loop: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run_busy_loop)
    def started(self: Any, *args: Any, **kwargs: Any) -> Any:
        addon_of(self)
        return run_busy_loop(self, *args, **kwargs)

    return started


def addon_of(engine: Any) -> Addon:
    """The engine's add-on, made (and started) at first use."""
    addon: Addon | None = engine.__dict__.get(ATTRIBUTE)
    if addon is None:
        addon = Addon(engine)
        setattr(engine, ATTRIBUTE, addon)
        addon.start()
    return addon


def sardeenz_op(self: Any, op: str, args: Any = None) -> dict[str, Any]:
    """One operation (``Addon.OPERATIONS``). A refusal is a value, ``{"refused": …}``: vLLM would log an exception as
    a crash."""
    try:
        return addon_of(self).run(op, args or {})
    except Refused as refused:
        return {"refused": {"status": refused.status, **refused.to_json()}}


class Addon:
    """What the add-on knows of one engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.warnings: list[str] = []
        self.reclaimer = Reclaimer(engine)
        self.slumber = Slumber(engine)
        self.pool = self._find_pool()
        self.demand = Demand(engine, self.pool.geometry if self.pool else None)
        self.control = LimitControl(self.pool, self.demand, self.reclaimer) if self.pool else None
        self.operations: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "status": lambda _args: self.status(),
            "limit": lambda args: self._limits().apply(LimitOrder(**args)),
            "trim": lambda _args: self.trim(),
            "floor": lambda _args: self.floor(),
            "reset_prefix_cache": lambda _args: self.reset_prefix_cache(),
            "abort_stuck": lambda _args: self.abort_stuck(),
            "sleep_prepare": lambda args: self.slumber.prepare(int(args["level"])),
            "sleep_settle": lambda args: self.slumber.settle(str(args.get("error") or "")),
            "wake": lambda args: self.slumber.wake(args.get("tags")),
            "preempt": self._preempt,
        }

    # --- start ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Put the guard in place, set the initial limit, say in one line what was found. Never fails a start."""
        try:
            limit = self._start_pool()
        except Exception as exc:
            log.exception("sardeenz: the KV pool could not be taken over")
            self.warnings.append(f"the KV pool could not be taken over: {exc}")
            limit = "failed"
        log.info("sardeenz: %s", self._found(limit))

    def _start_pool(self) -> str:
        initial = os.environ.get(INITIAL_LIMIT, "").strip()
        if self.pool is None or self.control is None:
            return f"initial limit {initial} ignored" if initial else "no limit"
        self.pool.guard.install()
        if os.environ.get("KVCACHED_PAGE_PREALLOC_ENABLED", "true").strip().lower() in ("false", "0"):
            self.warnings.append("page preallocation is off: kvcached does not watch limits that others write")
        if not initial:
            return "no initial limit"
        if not (initial.isascii() and initial.isdigit()) or int(initial) <= 0:
            self.warnings.append(f"{INITIAL_LIMIT}={initial!r} is not a number of bytes: no limit was set")
            return "no valid initial limit"
        answer = self.control.apply_initial(int(initial))
        self.warnings += answer["warnings"]
        return f"initial limit {human(answer['limit_bytes'])} {answer['status']}"

    def _found(self, limit: str) -> str:
        parts = [
            f"add-on in pid {os.getpid()}",
            f"vLLM {vllm_version() or '?'}",
            f"kvcached {kvcached_version() or 'none'}",
        ]
        if self.pool is None:
            parts.append("no pool of kvcached")
        else:
            g = self.pool.geometry
            parts.append(
                f"segment {self.pool.segment.name}, page {human(g.page_bytes)} x {g.num_layers} layers x "
                f"{g.num_kv_buffers} buffers = bundle {human(g.bundle_bytes)}, capacity {human(g.capacity_bytes)}"
            )
        parts.append(f"preemption {'of single requests' if self.reclaimer.partial else 'of all requests at once'}")
        return ", ".join([*parts, limit, *self.warnings])

    def _find_pool(self) -> KVPool | None:
        try:
            pool = find_pool(self.engine)
        except Unsupported as exc:
            self.warnings.append(str(exc))
            return None
        if pool is None and os.environ.get("ENABLE_KVCACHED", "").strip().lower() in ("true", "1"):
            self.warnings.append(
                "ENABLE_KVCACHED is set but kvcached has not taken over the block pool (is its .pth file in "
                "site-packages?): KV memory is reserved statically"
            )
        if pool is not None and self._parallel("data_parallel_size") > 1:
            self.warnings.append("data parallel: all ranks share one segment name, so limits are not offered")
        return pool

    # --- operations ----------------------------------------------------------------------------------------------

    def run(self, op: str, args: dict[str, Any]) -> dict[str, Any]:
        operation = self.operations.get(op)
        if operation is None:
            raise Refused(400, "invalid", f"no such operation: {op}")
        return operation(args)

    def status(self) -> dict[str, Any]:
        """``backend.STATUS_KEYS``; on the way a limit that is still to come is brought nearer."""
        facts: dict[str, Any] = {
            "kvcached_active": self.pool is not None,
            "provider": "addon" if self.pool else "none",
            "engine": self._engine_facts(),
            "requests": {
                "running": len(self.demand.running()),
                "waiting": self.demand.waiting_count(),
                "stuck": [],
                "starved_by": None,
            },
            "sleep": self.slumber.facts(),
            "last_reclaim": self.reclaimer.last,
            "warnings": list(self.warnings),
        }
        if self.control is not None and self.pool is not None:
            try:
                facts |= self._pool_facts(self.pool, self.control, facts)
            except RuntimeError as exc:  # kvcached's StateConsistencyError: its allocator answers nothing any more
                facts["warnings"].append(f"kvcached's pool has failed, restart the engine: {exc}")
        return facts

    def _pool_facts(self, pool: KVPool, control: LimitControl, facts: dict[str, Any]) -> dict[str, Any]:
        g = pool.geometry
        drift_seen = control.drift_bytes()
        control.settle()
        if self.reclaimer.last is not None:
            self.reclaimer.look()
        pages, numbers = pool.pages(), pool.segment.read()
        limit_pages = control.limit_pages()
        facts["requests"]["stuck"] = self.demand.stuck(limit_pages, control.changed_at)
        facts["requests"]["starved_by"] = self.demand.starved_by(limit_pages)
        if pool.quarantined():
            facts["warnings"].append("kvcached has pages in quarantine and refuses other sizes: restart the engine")
        return {
            "ipc_name": pool.segment.name,
            "limit_bytes": numbers.limit_bytes if numbers else 0,
            "effective_limit_bytes": control.effective_bytes(),
            "used_bytes": pages.in_use * g.bundle_bytes,
            "prealloc_bytes": pages.reserved * g.bundle_bytes,
            "capacity_bytes": g.capacity_bytes,
            "bundle_bytes": g.bundle_bytes,
            "page_bytes": g.page_bytes,
            "num_layers": g.num_layers,
            "num_kv_buffers": g.num_kv_buffers,
            "block_size_tokens": self._block_size_tokens(),
            "blocks_per_page": g.blocks_per_page,
            "state": control.state(),
            "in_shrink": bool(pool.manager.in_shrink),
            "shrink_target_bytes": self._shrink_target_bytes(pool),
            "prefix_cached_bytes": len(pool.evictable_blocks()) * g.block_bytes * g.buffers,
            "retired_bytes": pool.retired_pages() * g.bundle_bytes,
            **control.floors(),
            "immediate_floor_bytes": control.immediate_floor_bytes(),
            "wanted_limit_bytes": control.requested_bytes,
            "limit_revision": control.revision,
            "last_change": control.last_change,
            "drift_bytes": drift_seen,
            "last_drift": pool.guard.last_drift,
            "last_reclaim": self.reclaimer.last,
        }

    def trim(self) -> dict[str, Any]:
        """One pass: drop the prefix cache, release retired pages, unmap the reserve. The limit stays."""
        pool, control = self._pool(), self._limits()
        if not pool.ready():
            raise Refused(409, "unavailable", "the pool still waits for its first page: the GPU is full")
        before = pool.footprint_bytes()
        pool.evict()
        pool.release_retired()
        pool.trim()
        control.settle()
        return self._measured(before, control.state())

    def floor(self) -> dict[str, Any]:
        pool, control = self._pool(), self._limits()
        return {
            **control.floors(),
            "immediate_floor_bytes": control.immediate_floor_bytes(),
            "bundle_bytes": pool.geometry.bundle_bytes,
            "capacity_bytes": pool.geometry.capacity_bytes,
            "ipc_name": pool.segment.name,
            "description": (
                "hard minimum: two bundles; safety floor: one prefill step or the longest request there is, and a "
                "bundle for fragmentation; full-context floor: the same for the longest request that the model takes"
            ),
        }

    def reset_prefix_cache(self) -> dict[str, Any]:
        """Forget the prefix cache, as far as running requests do not hold it, and measure what that frees."""
        if self.pool is None:
            whole = bool(self.engine.reset_prefix_cache())
            unknown = dict.fromkeys(("before_bytes", "after_bytes", "freed_bytes"))
            return {"status": "reset" if whole else "partial", **unknown}
        before = self.pool.footprint_bytes()
        whole = bool(self.engine.reset_prefix_cache())
        self.pool.evict()
        self.pool.release_retired()
        return self._measured(before, "reset" if whole else "partial")

    def abort_stuck(self) -> dict[str, Any]:
        control = self._limits()
        stuck = self.demand.stuck(control.limit_pages(), control.changed_at)
        ended = self.reclaimer.abort([each["id"] for each in stuck]) if stuck else []
        if ended:
            log.warning("sardeenz: aborted %d requests that could never fit in the limit", len(ended))
        return {"status": "done", "aborted": ended}

    def _preempt(self, args: dict[str, Any]) -> dict[str, Any]:
        """Preempt so many requests: for the add-on's own tests on engines without kvcached."""
        if os.environ.get(SELF_TEST) != "1":
            raise Refused(403, "forbidden", f"only with {SELF_TEST}=1")
        started = time.perf_counter()
        taken = self.reclaimer.preempt_count(int(args["requests"]))
        return {**taken, "took_s": time.perf_counter() - started, "last_reclaim": self.reclaimer.last}

    # --- helpers -------------------------------------------------------------------------------------------------

    def _pool(self) -> KVPool:
        if self.pool is None:
            raise Refused(409, "unavailable", "; ".join(self.warnings) or "this engine runs without kvcached")
        return self.pool

    def _limits(self) -> LimitControl:
        self._pool()
        if self.control is None or self._parallel("data_parallel_size") > 1:
            raise Refused(409, "unavailable", "; ".join(self.warnings) or "no limits for this engine")
        return self.control

    def _measured(self, before: int, status: str) -> dict[str, Any]:
        pool = self._pool()
        pages, numbers = pool.pages(), pool.segment.read()
        after = (pages.in_use + pages.reserved) * pool.geometry.bundle_bytes
        return {
            "status": status,
            "before_bytes": before,
            "after_bytes": after,
            "freed_bytes": max(before - after, 0),
            "limit_bytes": numbers.limit_bytes if numbers else 0,
            "used_bytes": pages.in_use * pool.geometry.bundle_bytes,
            "prealloc_bytes": pages.reserved * pool.geometry.bundle_bytes,
            "ipc_name": pool.segment.name,
        }

    def _engine_facts(self) -> dict[str, Any]:
        return {
            "vllm": vllm_version(),
            "kvcached": kvcached_version(),
            "pid": os.getpid(),
            "tp": self._parallel("tensor_parallel_size"),
            "pp": self._parallel("pipeline_parallel_size"),
            "dp_rank": int(getattr(self._parallel_config(), "data_parallel_rank", 0) or 0),
        }

    def _parallel(self, name: str) -> int:
        return int(getattr(self._parallel_config(), name, 1) or 1)

    def _parallel_config(self) -> Any:
        return getattr(getattr(self.engine, "vllm_config", None), "parallel_config", None)

    def _shrink_target_bytes(self, pool: KVPool) -> int | None:
        blocks = getattr(pool.manager, "target_num_blocks", None)
        if not pool.manager.in_shrink or blocks is None:
            return None
        return int(blocks) * pool.geometry.block_bytes * pool.geometry.buffers

    def _block_size_tokens(self) -> int | None:
        specs = self.demand.need.specs
        return int(specs[0].block_size) if specs else None
