"""Blocks of requests on top of the pool: allocation with eviction, the bounded prefix cache, reference counts.

With prefix caching on, the full blocks of a prompt stay after the request ended: they count as *used*, can be evicted,
and are bounded by ``KVCACHED_MAX_CACHED_TOKENS`` (16,000 by default), whatever the size of the pool.

``BlockPool`` has the names of kvcached's ``ElasticBlockPool`` where the add-on calls them.
"""

from __future__ import annotations

from collections.abc import Sequence

from models_app.simulator.memory import KVCacheManager
from models_app.simulator.pages import EngineFatal

DEFAULT_MAX_CACHED_TOKENS = 16_000


class StaticManager:
    """vLLM's own KV cache: a fixed number of blocks, all mapped from the start. Block 0 is the null block here too."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, 0, -1))

    def available_size(self) -> int:
        return len(self._free)

    def alloc(self, count: int) -> list[int] | None:
        if count > len(self._free):
            return None
        blocks = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return blocks

    def free(self, blocks: list[int]) -> None:
        self._free.extend(blocks)


class BlockPool:
    """Hands out blocks, remembers which of them hold a known prefix."""

    def __init__(
        self,
        manager: KVCacheManager | StaticManager,
        num_gpu_blocks: int,
        *,
        caching: bool,
        max_cached_blocks: int = -1,
    ) -> None:
        self._manager = manager
        #: None without kvcached: that is how the add-on tells.
        self.kv_cache_manager = manager if isinstance(manager, KVCacheManager) else None
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = caching
        self.max_cached_blocks = max_cached_blocks
        #: Pull request 324: an allocation that fails after the scheduler's check kills the engine.
        self.misses_are_fatal = False
        self._by_hash: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}
        self._users: dict[int, int] = {}
        #: Cached blocks that nobody uses, oldest first.
        self._evictable_blocks: dict[int, None] = {}
        self.queries = 0
        self.hits = 0

    def get_num_free_blocks(self) -> int:
        """What the scheduler believes it can have: free in the pool, plus whatever could be evicted."""
        return self._manager.available_size() + len(self._evictable_blocks)

    def get_usage(self) -> float:
        """``vllm:kv_cache_usage_perc``: against the capacity at start, so it says little once there is a limit."""
        return 1.0 - self.get_num_free_blocks() / max(1, self.num_gpu_blocks)

    def known_prefix(self, hashes: Sequence[int]) -> list[int]:
        """The cached blocks of the longest known beginning; not taken yet."""
        found: list[int] = []
        if not self.enable_caching:
            return found
        for block_hash in hashes:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def fits(self, count: int, known: Sequence[int] = ()) -> bool:
        """Whether ``count`` new blocks could be had beside the ``known`` ones, which then cannot be evicted."""
        return count <= self.get_num_free_blocks() - sum(block in self._evictable_blocks for block in known)

    def take(self, count: int, known: Sequence[int] = ()) -> list[int] | None:
        """``known`` cached blocks plus ``count`` new ones, or None and nothing changed."""
        if not self.fits(count, known):
            return None
        for block in known:
            self._users[block] = self._users.get(block, 0) + 1
            self._evictable_blocks.pop(block, None)
        blocks: list[int] | None = []
        if count:
            for _attempt in range(2):
                short = count - self._manager.available_size()
                if short > 0:
                    self._evict_blocks_from_pool(short, page_aware=False)
                blocks = self._manager.alloc(count)
                if blocks is not None:
                    break
        if blocks is None:
            if self.misses_are_fatal:
                raise EngineFatal(f"ValueError: Cannot get {count} free blocks from the pool")
            self.give(known)
            return None
        return [*known, *blocks]

    def remember(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        """These full blocks now hold these prefixes."""
        if not self.enable_caching:
            return
        for block, block_hash in zip(blocks, hashes, strict=False):
            if block in self._hash_of or block_hash in self._by_hash:
                continue
            self._by_hash[block_hash] = block
            self._hash_of[block] = block_hash
            self._users[block] = 1

    def give(self, blocks: Sequence[int]) -> None:
        """A request is done with these: cached ones stay, evictable now; the others go back to the pool."""
        gone: list[int] = []
        # vLLM frees the tail first, so that the beginning of a prompt is evicted last.
        for block in reversed(blocks):
            if block not in self._hash_of:
                gone.append(block)
                continue
            self._users[block] -= 1
            if self._users[block] <= 0:
                self._evictable_blocks[block] = None
        if gone:
            self._manager.free(gone)
        if 0 <= self.max_cached_blocks < len(self._evictable_blocks):
            self._evict_blocks_from_pool(len(self._evictable_blocks) - self.max_cached_blocks)

    def reset_prefix_cache(self) -> bool:
        """Forget all prefixes. Blocks in use stay with their requests."""
        self._evict_blocks_from_pool(len(self._evictable_blocks))
        self._by_hash.clear()
        self._hash_of.clear()
        self._users.clear()
        return True

    def _evict_blocks_from_pool(self, count: int, page_aware: bool = True) -> int:
        """Give up to ``count`` cached blocks back to the pool: whole pages first when memory is the aim, else
        oldest.
        """
        victims = list(self._evictable_blocks)
        if page_aware and self.kv_cache_manager:
            victims = self._whole_pages_first(victims, count, self.kv_cache_manager)
        victims = victims[: max(0, count)]
        for block in victims:
            del self._evictable_blocks[block]
            del self._by_hash[self._hash_of.pop(block)]
            del self._users[block]
        if victims:
            self._manager.free(victims)
        return len(victims)

    @staticmethod
    def _whole_pages_first(blocks: list[int], count: int, manager: KVCacheManager) -> list[int]:
        """Only a wholly empty page returns memory: pages that can be emptied go first, the cheapest of them ahead."""
        by_page = manager.page_allocator.group_indices_by_page(blocks, manager.block_mem_size)
        occupied = manager.get_page_occupancy(by_page)
        first: list[int] = []
        for page in sorted(by_page, key=lambda number: len(by_page[number])):
            if len(by_page[page]) >= occupied[page]:
                if len(first) + len(by_page[page]) > count:
                    break
                first += by_page[page]
        chosen = set(first)
        return first + [block for block in blocks if block not in chosen]
