"""kvcached's part of a start: the segment, the sockets' folder, the pool with its null block and its reserve."""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from pathlib import Path

from models_app.simulator import logs, segment
from models_app.simulator.blocks import DEFAULT_MAX_CACHED_TOKENS
from models_app.simulator.cards import Cards
from models_app.simulator.config import Config
from models_app.simulator.facts import MIB, Geometry
from models_app.simulator.faults import Faults
from models_app.simulator.memory import KVCacheManager
from models_app.simulator.pages import PoolOptions

#: Where kvcached makes the folder of its workers' sockets, whatever TMPDIR says.
SOCKETS_ROOT = Path("/tmp")  # noqa: S108
NULL_BLOCK_RETRY_S = 0.01
NULL_BLOCK_LOG_S = 10.0


def max_cached_blocks(config: Config) -> int:
    """The bound of the prefix cache in blocks: -1 none, 0 no cache."""
    tokens = config.kv_number("KVCACHED_MAX_CACHED_TOKENS", DEFAULT_MAX_CACHED_TOKENS)
    return tokens if tokens <= 0 else max(1, tokens // config.block_tokens)


def sockets_folder(name: str) -> Path:
    """The folder that belongs to a segment; it stays after the end, also of an orderly one (measured with 0.1.6)."""
    return SOCKETS_ROOT / f"kvcached-tp-{name}-{uuid.uuid5(uuid.NAMESPACE_DNS, name).hex[:8]}"


class ElasticStart:
    """Makes what kvcached makes, in its order."""

    def __init__(self, config: Config, log: logs.Log, faults: Faults) -> None:
        self._config = config
        self._log = log
        self._faults = faults
        env = config.kvcached_env
        self._sockets: list[socket.socket] = []
        self._options = PoolOptions(
            min_reserved=config.kv_number("KVCACHED_MIN_RESERVED_PAGES", 5),
            max_reserved=config.kv_number("KVCACHED_MAX_RESERVED_PAGES", 10),
            gpu_utilization=float(env.get("KVCACHED_GPU_UTILIZATION") or 0.95),
            prealloc=env.get("KVCACHED_PAGE_PREALLOC_ENABLED", "true").lower() in ("true", "1"),
            overshoot_crashes="overshoot" in faults,
        )

    def make_segment(self, shape: Geometry) -> segment.Segment:
        """The file in /dev/shm with the capacity as its limit, and the workers' listening sockets."""
        name = self._config.ipc_name or segment.default_name()
        self._listen(name)
        minimum = 2 * shape.bundle_bytes if "pr324" in self._faults else None
        return segment.Segment(name, shape.capacity_bytes, min_safe_limit=minimum)

    def _listen(self, name: str) -> None:
        folder = sockets_folder(name)
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            for rank in range(self._config.tensor_parallel_size):
                path = folder / f"w{rank}.sock"
                path.unlink(missing_ok=True)
                listener = socket.socket(socket.AF_UNIX)
                listener.bind(str(path))
                self._sockets.append(listener)

    def close(self) -> None:
        """Stop listening; files stay."""
        for listener in self._sockets:
            listener.close()

    def make_pool(self, shape: Geometry, cards: Cards, seg: segment.Segment) -> KVCacheManager:
        """The pool, once it has its null block; waits for that as long as it takes."""
        config, options = self._config, self._options
        contiguous = config.kvcached_env.get("KVCACHED_CONTIGUOUS_LAYOUT", "true").lower() == "true"
        logs.write(
            f"Init C++ PageAllocator: num_layers={shape.num_layers}, "
            f"mem_size_per_layer={shape.num_blocks * shape.block_bytes // MIB}MB, "
            f"total_mem_size={shape.capacity_bytes // MIB}MB, page_size={shape.page_bytes // MIB}MB, "
            f"world_size={config.tensor_parallel_size}, pp_rank=0, async_sched=1, "
            f"contiguous_layout={int(contiguous)}, enable_prealloc={int(options.prealloc)}, "
            f"num_kv_buffers={shape.num_kv_buffers}, group_id=0, min_reserved_pages={options.min_reserved}, "
            f"max_reserved_pages={options.max_reserved}\n"
        )
        pool = KVCacheManager(shape, cards, seg, options)
        self._wait_for_null_block(pool)
        pool.page_allocator.preallocate()
        return pool

    def _wait_for_null_block(self, pool: KVCacheManager) -> None:
        """On a card past its 95 % the start waits here without end, and says so every ten seconds."""
        started = time.monotonic()
        logged: float | None = None
        while not pool.reserve_null_block():
            waited = time.monotonic() - started
            if logged is None or waited - logged >= NULL_BLOCK_LOG_S:
                logged = waited
                self._log.kvcached(
                    "kv_cache_manager.py:382",
                    "Waiting for physical KV capacity to reserve null block: reason=no_effective_capacity, "
                    f"elapsed={waited:.1f}s",
                    "WARNING",
                )
            time.sleep(NULL_BLOCK_RETRY_S)
