"""vLLM's V1 scheduler as far as memory and time are concerned: first come first served, chunked prefill, preemption.

A request is a number of prompt tokens and a number of output tokens; its text is made elsewhere and depends on the
prompt alone, so recomputing a preempted request cannot change it.

Each step: running requests first, in order of arrival; when one cannot get a block, the *youngest* running one is
preempted (its blocks are freed, it goes to the front of the queue and is computed again); waiting requests are taken
only in a step without preemption, in order, and the first that does not fit stops the queue.

Attributes that the add-on reads carry vLLM's names.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from types import SimpleNamespace

from models_app.simulator.blocks import BlockPool

FLOP_PER_S = 4e14
BANDWIDTH_BYTES_PER_S = 2.4e12
STEP_OVERHEAD_S = 0.003
EAGER_OVERHEAD_S = 0.012


class RequestStatus(IntEnum):
    """The few of vLLM's that are needed."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_ABORTED = auto()


class PauseState(Enum):
    """Whether new requests, or any, are scheduled."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


class FullAttentionSpec:
    """What the add-on asks of a KV group: whole contexts in blocks of so many tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size


@dataclass(slots=True, eq=False)
class Request:
    """One request inside the engine. ``hashes``: of the full blocks of its prompt, for the prefix cache."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    hashes: list[int] = field(default_factory=list)
    arrival_time: float = field(default_factory=time.time)
    priority: int = 0
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    blocks: list[int] = field(default_factory=list)
    scheduled: int = 0
    remembered: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output, all of which must be in the KV cache to go on."""
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True)
class Speed:
    """How long a step takes: reading the weights and the KV of the batch, computing the prefill tokens. Per engine."""

    weights_bytes: int
    parameters: float
    kv_bytes_per_token: int
    tensor_parallel_size: int = 1
    eager: bool = False

    def step_s(self, prefill_tokens: int, context_tokens: int) -> float:
        weights = self.weights_bytes / self.tensor_parallel_size
        read = (weights + context_tokens * self.kv_bytes_per_token) / BANDWIDTH_BYTES_PER_S
        compute = 2 * self.parameters * prefill_tokens / (FLOP_PER_S * self.tensor_parallel_size)
        return STEP_OVERHEAD_S + (EAGER_OVERHEAD_S if self.eager else 0.0) + max(read, compute)


@dataclass(slots=True)
class Step:
    """What one step did. ``tokens``: new output tokens by request; ``finished``: those that are complete."""

    tokens: dict[str, int] = field(default_factory=dict)
    finished: list[Request] = field(default_factory=list)
    prefill_tokens: int = 0
    duration_s: float = 0.0


@dataclass(frozen=True)
class Limits:
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    block_tokens: int = 16
    max_model_len: int = 32768


class Scheduler:
    """Requests in, steps out."""

    def __init__(self, block_pool: BlockPool, speed: Speed, limits: Limits) -> None:
        self.block_pool = block_pool
        self.speed = speed
        self.limits = limits
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.requests: dict[str, Request] = {}
        self.pause_state = PauseState.UNPAUSED
        self.kv_cache_manager = SimpleNamespace(block_pool=block_pool)
        group = SimpleNamespace(kv_cache_spec=FullAttentionSpec(limits.block_tokens))
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group])
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        #: Seconds that requests waited for their first step, since someone last took the list.
        self.queued_s: list[float] = []
        #: As of the last step, like vLLM's gauge: an idle engine shows its last value for ever.
        self.usage = 0.0

    def add_request(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def finish_requests(self, ids: Iterable[str], status: RequestStatus) -> list[tuple[str, int]]:
        """End requests and give their blocks back. Unknown ids are ones that have just finished."""
        ended = [request for ident in ids if (request := self.requests.pop(ident, None))]
        for request in ended:
            if request.status is RequestStatus.RUNNING:
                self.running.remove(request)
            else:
                self.waiting.remove(request)
            request.status = status
            self._drop_blocks(request)
        return [(request.request_id, 0) for request in ended]

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state

    def has_work(self) -> bool:
        """Whether a step could do anything."""
        if self.pause_state is PauseState.PAUSED_ALL:
            return False
        return bool(self.running or (self.waiting and self.pause_state is PauseState.UNPAUSED))

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_tokens)

    # -- a step --------------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """Schedule, compute and account for one step. A step that could schedule nothing lasts 0 s."""
        return self.update_from_output(self.schedule())

    def schedule(self) -> list[Request]:
        """Give this step's tokens their blocks, preempting where there are none."""
        budget = self.limits.max_num_batched_tokens
        scheduled: list[Request] = []
        preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            request.scheduled = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self._get_slots(request):
                victim = self.running.pop()
                self._preempt_request(victim, time.monotonic())
                preempted = True
                if victim in scheduled:
                    scheduled.remove(victim)
                    budget += victim.scheduled
                if victim is request:
                    break
            if request.status is not RequestStatus.RUNNING:
                break
            budget -= request.scheduled
            scheduled.append(request)
            index += 1
        if not preempted and self.pause_state is PauseState.UNPAUSED:
            self._take_waiting(budget, scheduled)
        self.usage = self.block_pool.get_usage()
        return scheduled

    def _get_slots(self, request: Request) -> bool:
        missing = self.blocks_for(request.num_computed_tokens + request.scheduled) - len(request.blocks)
        if missing <= 0:
            return True
        blocks = self.block_pool.take(missing)
        request.blocks += blocks or ()
        return blocks is not None

    def _take_waiting(self, budget: int, scheduled: list[Request]) -> None:
        pool = self.block_pool
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_num_seqs:
            request = self.waiting[0]
            known = pool.known_prefix(request.hashes)
            # At least one token has to be computed to have something to sample from.
            known = known[: (request.num_tokens - 1) // self.limits.block_tokens]
            hit = len(known) * self.limits.block_tokens
            tokens = min(request.num_tokens - hit, budget)
            # vLLM admits a request only when all of its tokens would fit, not just the first chunk of them.
            if not pool.fits(self.blocks_for(request.num_tokens) - len(known), known):
                return
            blocks = pool.take(self.blocks_for(hit + tokens) - len(known), known)
            if blocks is None:
                return
            if pool.enable_caching:
                pool.queries += request.num_tokens
                pool.hits += hit
            if not request.num_preemptions:
                request.num_cached_tokens = hit
                self.prompt_tokens += request.num_prompt_tokens
                self.queued_s.append(time.time() - request.arrival_time)
            request.blocks = blocks
            request.num_computed_tokens = hit
            request.remembered = len(known)
            request.scheduled = tokens
            request.status = RequestStatus.RUNNING
            budget -= tokens
            self.waiting.popleft()
            self.running.append(request)
            scheduled.append(request)

    def update_from_output(self, scheduled: list[Request]) -> Step:
        """Account for a step: tokens computed, tokens produced, requests finished."""
        step = Step()
        if not scheduled:
            return step
        context = 0
        for request in scheduled:
            step.prefill_tokens += request.scheduled - 1
            request.num_computed_tokens += request.scheduled
            context += request.num_computed_tokens
            self._remember(request)
            if request.num_computed_tokens < request.num_tokens:
                continue
            request.num_output_tokens += 1
            self.generated_tokens += 1
            step.tokens[request.request_id] = 1
            if request.num_output_tokens >= request.max_tokens:
                step.finished.append(request)
        for request in step.finished:
            self.running.remove(request)
            del self.requests[request.request_id]
            request.status = RequestStatus.FINISHED_STOPPED
            self._drop_blocks(request)
        step.duration_s = self.speed.step_s(step.prefill_tokens, context)
        return step

    def _remember(self, request: Request) -> None:
        full = request.num_computed_tokens // self.limits.block_tokens
        if not self.block_pool.enable_caching or full <= request.remembered:
            return
        hashes = [
            # Blocks of an answer are cached too; under a hash that no prompt will ever ask for.
            request.hashes[number] if number < len(request.hashes) else hash((request.request_id, number))
            for number in range(request.remembered, full)
        ]
        self.block_pool.remember(request.blocks[request.remembered : full], hashes)
        request.remembered = full

    def _drop_blocks(self, request: Request) -> None:
        blocks, request.blocks = request.blocks, []
        request.remembered = 0
        if blocks:
            self.block_pool.give(blocks)

    # -- preemption ----------------------------------------------------------------------------------------------

    def _preempt_request(self, request: Request, timestamp: float, **_options: object) -> None:
        """Take a request's blocks; it waits at the front and is computed again. It is out of ``running`` already."""
        self._drop_blocks(request)
        self.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        self.waiting.appendleft(request)

    def reset_prefix_cache(self) -> bool:
        return self.block_pool.reset_prefix_cache()

    def preempt_all(self) -> None:
        """What ``reset_prefix_cache(reset_running_requests=True)`` does first."""
        while self.running:
            self._preempt_request(self.running.pop(), time.monotonic())
