"""A stand-in for vLLM's scheduler and EngineCore: one token per request and step, batches that may still be under way.

``Engine(batches=2)`` behaves as with asynchronous scheduling: a step submits one batch and takes the output of the
one before, so requests have output in flight between steps, and a request preempted then would get a token that is
not its own.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.models_app.kvcache_addon.fake_kvcached import FakeBlockPool, FakeManager, PoolExhausted

BLOCK_TOKENS = 16


class PauseState(enum.IntEnum):
    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


class RequestStatus(enum.IntEnum):
    WAITING = 1
    WAITING_FOR_REMOTE_KVS = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED_STOPPED = 5
    FINISHED_ABORTED = 6


class FullAttentionSpec:
    def __init__(self, block_size: int = BLOCK_TOKENS) -> None:
        self.block_size = block_size


class Request:
    ids = itertools.count(1)

    def __init__(self, prompt: int, answer: int, *, arrival: float, priority: int = 0) -> None:
        self.request_id = f"r{next(self.ids)}"
        self.client_index = 0
        self.num_prompt_tokens, self.max_tokens = prompt, answer
        self.arrival_time, self.priority = arrival, priority
        self.status = RequestStatus.WAITING
        self.output: list[int] = []
        self.num_computed_tokens = 0
        self.in_flight = 0
        self.blocks: list[int] = []

    @property
    def num_output_tokens(self) -> int:
        return len(self.output)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


Batch = list[tuple[Request, int]]


class Scheduler:
    """First come, first served; a request is admitted only when all that it is so far fits (as vLLM's default)."""

    def __init__(self, engine: Any, block_pool: FakeBlockPool | None, *, max_model_len: int, max_batched: int) -> None:
        self.engine = engine
        self.vllm_config = engine.vllm_config
        self.kv_cache_manager = SimpleNamespace(block_pool=block_pool)
        group = SimpleNamespace(kv_cache_spec=FullAttentionSpec())
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group])
        self.connector = None
        self.num_lookahead_tokens = 0
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.skipped_waiting: deque[Request] = deque()
        self.requests: dict[str, Request] = {}
        self.prev_step_scheduled_req_ids: set[str] = set()
        self._pause_state = PauseState.UNPAUSED
        self.finished: list[Request] = []

    @property
    def pause_state(self) -> PauseState:
        return self._pause_state

    def set_pause_state(self, state: PauseState) -> None:
        self._pause_state = state

    def add(self, request: Request) -> Request:
        self.requests[request.request_id] = request
        self.waiting.append(request)
        return request

    def has_requests(self) -> bool:
        return self._pause_state != PauseState.PAUSED_ALL and bool(self.running or self.waiting)

    def schedule(self) -> Batch:
        if self._pause_state == PauseState.PAUSED_ALL:
            return []
        chosen: list[Request] = []
        preempted = False
        for request in list(self.running):
            if request not in self.running:
                continue
            while not self._grow(request, request.num_tokens + request.in_flight):
                preempted = True
                victim = self.running.pop()
                self._preempt_request(victim, 0.0)
                if victim is request:
                    break
            if request in self.running:
                chosen.append(request)
        while self.waiting and not preempted and self._pause_state == PauseState.UNPAUSED:
            request = self.waiting[0]
            if not self._grow(request, request.num_tokens):
                break
            self.waiting.popleft()
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            chosen.append(request)
        batch = []
        for request in chosen:
            # A token is its own place in the answer: one computed for a state that is gone shows as a repetition.
            batch.append((request, request.num_output_tokens + request.in_flight))
            request.num_computed_tokens = request.num_tokens + request.in_flight
            request.in_flight += 1
        self.prev_step_scheduled_req_ids = {request.request_id for request in chosen}
        return batch

    def update_from_output(self, batch: Batch) -> None:
        for request, token in batch:
            if request.request_id not in self.requests:
                continue
            request.in_flight -= 1
            request.output.append(token)
            if request.num_output_tokens >= request.max_tokens and request in self.running:
                self.running.remove(request)
                self._finish(request, RequestStatus.FINISHED_STOPPED)

    def finish_requests(self, ids: list[str], status: RequestStatus) -> list[tuple[str, int]]:
        ended = [self.requests[each] for each in ids if each in self.requests]
        for request in ended:
            for queue in (self.running, self.waiting, self.skipped_waiting):
                if request in queue:
                    queue.remove(request)
            self._finish(request, status)
        return [(request.request_id, request.client_index) for request in ended]

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        assert request.status == RequestStatus.RUNNING
        assert request.in_flight == 0 or timestamp == 0.0, "preempted from outside with output in flight"
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        if reset_running_requests:
            while self.running:
                self._preempt_request(self.running.pop(), 1.0)
            self.prev_step_scheduled_req_ids.clear()
        pool = self.kv_cache_manager.block_pool
        return pool.reset_prefix_cache() if pool is not None else True

    def _grow(self, request: Request, tokens: int) -> bool:
        pool = self.kv_cache_manager.block_pool
        if pool is None:
            return True
        need = math.ceil((tokens + 1) / BLOCK_TOKENS) - len(request.blocks)
        if need <= 0:
            return True
        if need > pool.get_num_free_blocks():
            return False
        try:
            request.blocks += pool.get_new_blocks(need)
        except PoolExhausted:
            return False
        return True

    def _release(self, request: Request) -> None:
        if self.kv_cache_manager.block_pool is not None:
            self.kv_cache_manager.block_pool.free_blocks(request.blocks)
        request.blocks = []

    def _finish(self, request: Request, status: RequestStatus) -> None:
        self._release(request)
        request.status = status
        del self.requests[request.request_id]
        self.finished.append(request)


class Executor:
    """What sleeps and wakes."""

    def __init__(self) -> None:
        self.is_sleeping = False
        self.sleeping_tags: set[str] = set()
        self.calls: list[Any] = []
        self.fail_on = ""

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))
        self.is_sleeping, self.sleeping_tags = True, {"weights", "kv_cache"}

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", *tags))
        if self.fail_on in tags:
            raise RuntimeError("CUDA out of memory")
        self.sleeping_tags -= set(tags)
        self.is_sleeping = bool(self.sleeping_tags)

    def collective_rpc(self, method: str) -> None:
        self.calls.append(method)
        if method == self.fail_on:
            raise RuntimeError("shard 1 of 2 is gone")


class Engine:
    """EngineCore with a pool of kvcached (``manager``), or with vLLM's own (None)."""

    def __init__(
        self,
        manager: FakeManager | None = None,
        *,
        batches: int = 1,
        caching: bool = False,
        max_model_len: int = 8192,
        max_batched: int = 2048,
        sleep_mode: bool = True,
    ) -> None:
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=max_model_len, enable_sleep_mode=sleep_mode),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=max_batched),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, data_parallel_rank=0
            ),
            load_config=SimpleNamespace(load_format="auto"),
        )
        pool = FakeBlockPool(manager, caching=caching) if manager else None
        self.manager = manager
        self.scheduler = Scheduler(self, pool, max_model_len=max_model_len, max_batched=max_batched)
        self.model_executor = Executor()
        self.batch_queue_size = batches
        self.batch_queue: deque[Batch] | None = deque() if batches > 1 else None
        if manager is not None:
            manager.defer_physical_release = batches > 1
        self.step_fn = self._step
        self.aborted: list[tuple[str, int]] = []
        self._clock = itertools.count(1)

    def add(self, prompt: int, answer: int, **more: Any) -> Request:
        return self.scheduler.add(Request(prompt, answer, arrival=float(next(self._clock)), **more))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self._process_engine_step()

    def finish_all(self, limit: int = 20000) -> None:
        """Step until nothing is left; fails when nothing moves."""
        for _ in range(limit):
            if not self.scheduler.has_requests() and not self.batch_queue:
                return
            self._process_engine_step()
        raise AssertionError("requests do not end")

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return self.scheduler.reset_prefix_cache(reset_running_requests)

    def _process_engine_step(self) -> None:
        self.step_fn()

    def _send_abort_outputs(self, ended: list[tuple[str, int]]) -> None:
        self.aborted += ended

    def _step(self) -> None:
        if self.batch_queue is None:
            self.scheduler.update_from_output(self.scheduler.schedule())
            return
        if self.scheduler.has_requests():
            self.batch_queue.appendleft(self.scheduler.schedule())
            if len(self.batch_queue) < self.batch_queue_size:
                return
        if self.batch_queue:
            self.scheduler.update_from_output(self.batch_queue.pop())
        manager = self.manager
        if manager is not None:  # kvcached's patch of the step
            manager.release_retired_pages_through(manager.capture_physical_release_marker())


def make_engine(directory: Path, **options: Any) -> Engine:
    """An engine with a pool whose segment lies in ``directory``; options of ``FakeManager`` and ``Engine`` alike."""
    of_manager = {"capacity", "layers", "buffers", "page_bytes", "blocks_per_page", "name"}
    manager = FakeManager(directory, **{key: value for key, value in options.items() if key in of_manager})
    return Engine(manager, **{key: value for key, value in options.items() if key not in of_manager})
