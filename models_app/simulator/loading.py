"""EngineCore's start: the stages, their log lines in vLLM's order and words, and the memory that each of them takes.

Lines of vLLM 0.24 and 0.30 on a GPU. Durations are those of a small demonstration (two to four seconds in all, longer
with larger weights) divided by ``speed``; what the lines report is what it took.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from models_app.simulator import logs, segment
from models_app.simulator.blocks import BlockPool, StaticManager
from models_app.simulator.cards import Cards, LedgerCards
from models_app.simulator.config import Config
from models_app.simulator.elastic import ElasticStart, max_cached_blocks
from models_app.simulator.facts import GIB, MIB, Geometry, geometry
from models_app.simulator.faults import Faults
from models_app.simulator.memory import KVCacheManager
from models_app.simulator.scheduler import Limits, Scheduler, Speed

#: CUDA context and libraries: what a sleeping engine keeps beside its KV bundles (measured with vLLM 0.24 on an H200).
CONTEXT_BYTES = 1_075_838_976
SHARD_BYTES = 5 * 10**9
#: Models for which vLLM 0.24 picks Model Runner V2 by itself, which kvcached 0.1.6 only knows from 0.28 on.
V2_BY_DEFAULT = ("Qwen3For", "LlamaFor", "MistralFor", "DeepseekV2For", "Qwen2MoeFor", "GraniteMoeFor")
_PATCHES = (
    "nixl_connector_compat, elastic_block_pool, engine_core, mp_client, core_engine_proc_manager, gpu_model_runner, "
    "gpu_worker, hybrid_block_size_align, kv_cache_coordinator, kv_cache_manager, allocate_slots"
)


class StartFailed(Exception):
    """EngineCore cannot start; what there is to say has been logged."""


@dataclass
class Loaded:
    """What a successful start leaves behind. Sizes are per GPU."""

    cards: Cards
    scheduler: Scheduler
    pool: KVCacheManager | None
    weights_bytes: int
    workspace_bytes: int
    num_blocks: int


def workspace_bytes(config: Config, card_bytes: int) -> int:
    """The activation peak of the profiling run: logits of a full batch several times, and hidden states.

    Within 3 % of what an H200 showed: 2.0 GB for a 151,936-word vocabulary, 1.9 GB for 128,256 words.
    """
    sequences, tokens = config.batch_limits(card_bytes)
    logits = 3 * sequences * config.facts.vocab_size * 4
    hidden = 16 * tokens * config.facts.hidden_size
    return _whole_pages((logits + hidden) // config.tensor_parallel_size)


def graph_bytes(config: Config) -> int:
    """Memory of the captured CUDA graphs; none in eager mode."""
    if config.eager:
        return 0
    return _whole_pages(300 * MIB + config.facts.weights_bytes // (100 * config.tensor_parallel_size))


def _whole_pages(amount: int) -> int:
    return -(-amount // (2 * MIB)) * 2 * MIB


class Loader:
    """One start of EngineCore."""

    def __init__(self, config: Config, log: logs.Log, faults: Faults, cards: Cards) -> None:
        self.config = config
        self.log = log
        self.faults = faults
        self.cards = cards
        self.weights_bytes = _whole_pages(config.facts.weights_bytes // config.tensor_parallel_size)
        self.workspace_bytes = workspace_bytes(config, cards.total_bytes)
        #: Left in place for whoever tidies up when the start fails after it was made.
        self.segment: segment.Segment | None = None
        self.elastic = ElasticStart(config, log, faults)
        self.kvcached = config.kvcached and "kvcached_inactive" not in faults

    def run(self) -> Loaded:
        """All stages. Raises ``StartFailed``."""
        config, log = self.config, self.log
        self._patches()
        log.say(
            "core.py:123",
            f"Initializing a V1 LLM engine (v{config.vllm_version}) with config: model='{config.model}', "
            f"tokenizer='{config.model}', dtype=torch.bfloat16, max_seq_len={config.max_model_len}, "
            f"load_format={config.load_format}, tensor_parallel_size={config.tensor_parallel_size}, "
            f"enforce_eager={config.eager}, served_model_name={config.served_names[0]}, "
            f"enable_prefix_caching={config.prefix_caching}",
        )
        self._check_versions()
        self.pause(0.15)
        if not self.kvcached:
            self._startup_guard()
        self._take(CONTEXT_BYTES)
        self._load_weights()
        started = time.monotonic()
        self._compile()
        self._take(self.workspace_bytes)
        self.pause(0.15)
        log.say("monitor.py:76", f"Initial profiling/warmup run took {time.monotonic() - started:.2f} s")
        budget = self._kv_budget()
        shape = self._geometry(budget)
        self._check_context(shape, budget)
        self._capture_graphs()
        self.crash_point("warming_up")
        took = time.monotonic() - started
        unit = "s" if config.version >= (0, 30) else "seconds"
        log.say("core.py:379", f"init engine (profile, create kv cache, warmup model) took {took:.2f} {unit}")
        loaded = self._build(shape)
        self.crash_point("serving")
        return loaded

    # -- time and trouble ----------------------------------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        """Let simulated time pass; a signal ends the wait."""
        self.faults.refresh()
        time.sleep(seconds * self.faults.number("slow_load", 1.0) / self.config.speed)

    def crash_point(self, stage: str) -> None:
        """Die here when the fault says so, with a traceback of EngineCore."""
        self.faults.refresh()
        if self.faults.text("crash_at") == stage:
            self.fail(f"RuntimeError: simulated fault: crash while {stage.replace('_', ' ')}")

    def fail(self, error: str, *frames: str) -> None:
        """Log an exception as EngineCore does and give up."""
        frames = frames or ('  File "vllm/v1/engine/core.py", line 1144, in run_engine_core',)
        self.log.bad("core.py:1366", "EngineCore failed to start.")
        self.log.traceback("core.py:1366", frames, error)
        self.log.raw("\n".join(("Process EngineCore:", "Traceback (most recent call last):", *frames, error)))
        raise StartFailed(error)

    def _take(self, amount: int) -> None:
        if "oom_at_load" in self.faults or not self.cards.take(amount):
            self._out_of_memory(amount)

    def _out_of_memory(self, amount: int) -> None:
        holders = self.cards.holders() if isinstance(self.cards, LedgerCards) else []
        tried = f"{amount / MIB:.2f} MiB" if amount < GIB else logs.gib(amount)
        others = " ".join(f"Process {row.pid} has {logs.gib(row.bytes)} memory in use." for row in holders)
        free = max(0, self.cards.free_bytes())
        shown = f"{free / MIB:.2f} MiB" if free < GIB else logs.gib(free)
        hint = (
            "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory for "
            "weights, increasing --tensor-parallel-size, or using --quantization."
        )
        self.log.bad("gpu_model_runner.py:4671", hint)
        self.fail(
            f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of "
            f"{logs.gib(self.cards.total_bytes)} of which {shown} is free. {others}".rstrip(),
            '  File "vllm/v1/worker/gpu_worker.py", line 347, in load_model',
        )

    # -- stages --------------------------------------------------------------------------------------------------

    def _patches(self) -> None:
        if self.kvcached:
            self.log.kvcached("patch_base.py:98", "Applying 16 patches for vllm")
            self.log.kvcached("patch_base.py:178", f"Successfully patched vllm: {_PATCHES}")

    def _check_versions(self) -> None:
        """The pairs that kvcached 0.1.6 refuses, before anything is loaded."""
        config = self.config
        if not self.kvcached:
            return
        text = ""
        if config.version >= (0, 31):
            text = (
                f"kvcached has no runner adapter for vLLM {config.vllm_version}; use a supported engine version or "
                "disable kvcached"
            )
        elif config.version < (0, 28) and config.v2_runner and self._picks_v2():
            text = (
                f"kvcached does not support the vLLM {config.vllm_version} Model Runner V2 yet; set "
                "VLLM_USE_V2_MODEL_RUNNER=0 to use the V1 model runner, or disable kvcached"
            )
        if text:
            self.pause(0.1)
            self.fail(f"kvcached.utils.KVCachedConfigError: {text}")

    def _picks_v2(self) -> bool:
        return self.config.version >= (0, 24) and self.config.facts.architecture.startswith(V2_BY_DEFAULT)

    def _startup_guard(self) -> None:
        """vLLM's own check of the whole card, which kvcached bypasses."""
        total, free = self.cards.total_bytes, self.cards.free_bytes()
        share = self.config.gpu_memory_utilization
        if free < math.ceil(total * share):
            self.fail(
                f"ValueError: Free memory on device cuda:0 ({free / GIB:.2f}/{total / GIB:.2f} GiB) on startup is less "
                f"than desired GPU memory utilization ({share:g}, {total * share / GIB:.2f} GiB). Decrease GPU memory "
                "utilization or reduce GPU memory used by other processes."
            )

    def _load_weights(self) -> None:
        log, started = self.log, time.monotonic()
        log.say("gpu_model_runner.py:4566", f"Starting to load model {self.config.model}...")
        log.say("cuda.py:423", "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN']")
        self.crash_point("loading_weights")
        shards = max(1, min(64, round(self.config.facts.weights_bytes / SHARD_BYTES)))
        seconds = 0.4 + 0.03 * self.config.facts.weights_bytes / 1e9
        dummy = self.config.load_format == "dummy"
        self._take(self.weights_bytes - (self.weights_bytes // shards) * shards)
        for shard in range(shards + 1):
            if not dummy:
                log.raw(logs.shard_line(shard, shards, time.monotonic() - started))
            if shard < shards:
                self.pause(seconds / shards)
                self._take(self.weights_bytes // shards)
        took = time.monotonic() - started
        if not dummy:
            log.say("default_loader.py:384", f"Loading weights took {took:.2f} seconds")
        log.say(
            "gpu_model_runner.py:4663",
            f"Model loading took {logs.gib(self.weights_bytes)} memory and {took:.6f} seconds",
        )

    def _compile(self) -> None:
        if self.config.eager:
            return
        log, started = self.log, time.monotonic()
        log.say("backends.py:988", "Using cache directory: ~/.cache/vllm/torch_compile_cache for vLLM's torch.compile")
        self.pause(0.25)
        log.say("backends.py:1048", f"Dynamo bytecode transform time: {time.monotonic() - started:.2f} s")
        self.crash_point("compiling")
        middle = time.monotonic()
        self.pause(0.45)
        tokens = self.config.batch_limits(self.cards.total_bytes)[1]
        compiled = time.monotonic() - middle
        log.say("backends.py:388", f"Compiling a graph for compile range (1, {tokens}) takes {compiled:.2f} s")
        log.say("monitor.py:48", f"torch.compile took {time.monotonic() - started:.2f} s in total")

    def _kv_budget(self) -> int:
        """KV bytes per GPU: a growth ceiling with kvcached, a reservation without."""
        config = self.config
        if config.kv_cache_memory_bytes is not None:
            return config.kv_cache_memory_bytes
        requested = math.ceil(self.cards.total_bytes * config.gpu_memory_utilization)
        available = requested - self.weights_bytes - self.workspace_bytes
        if not self.kvcached:
            available -= CONTEXT_BYTES + graph_bytes(config)
            self.log.say("gpu_worker.py:436", f"Available KV cache memory: {logs.gib(available)}")
        else:
            self.log.kvcached(
                "patches.py:3012",
                f"Using kvcached process-local KV capacity: budget={requested} bytes, weights={self.weights_bytes} "
                f"bytes, torch_peak={self.workspace_bytes} bytes, cudagraph=0 bytes (ignored), "
                f"available={available} bytes; whole-device non-torch and CUDA Graph deltas are ignored",
                "WARNING",
            )
        if available <= 0:
            self.fail(
                "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
                "initializing the engine."
            )
        return available

    def _geometry(self, budget: int) -> Geometry:
        config = self.config
        return geometry(
            config.facts,
            kv_budget_bytes=budget,
            # Without kvcached the page of the pool is the block itself, so the number of buffers tells nothing.
            vllm_version=config.vllm_version,
            tensor_parallel_size=config.tensor_parallel_size,
            kv_dtype_bytes=config.kv_dtype_bytes,
            block_tokens=config.block_tokens,
            page_bytes=config.kv_number("KVCACHED_PAGE_SIZE_MB", 2) * MIB,
        )

    def _check_context(self, shape: Geometry, budget: int) -> None:
        """A single request of full length must fit, or vLLM does not start; says what was found when it does."""
        config = self.config
        length = config.max_model_len
        needed = -(-length // shape.block_tokens) * shape.whole_block_bytes
        if shape.num_blocks * shape.whole_block_bytes < needed:
            longest = max(0, shape.num_blocks * shape.block_tokens)
            self.fail(
                f"ValueError: To serve at least one request with the models's max seq len ({length}), "
                f"({logs.gib(needed)} KV cache is needed, which is larger than the available KV cache memory "
                f"({logs.gib(budget)}). Based on the available memory, the estimated maximum model length is "
                f"{longest}. Try increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing "
                "the engine."
            )
        tokens = shape.num_blocks * shape.block_tokens
        size = f"GPU KV cache size: {tokens:,} tokens"
        concurrency = f"Maximum concurrency for {length:,} tokens per request: {tokens / length:.2f}x"
        if config.version >= (0, 30):
            self.log.say("kv_cache_utils.py:2395", f"{size}, {concurrency}")
        else:
            self.log.say("kv_cache_utils.py:1319", size)
            self.log.say("kv_cache_utils.py:1324", concurrency)

    def _capture_graphs(self) -> None:
        if self.config.eager:
            return
        self.crash_point("capturing_graphs")
        started = time.monotonic()
        total, steps = 51, 8
        for kind in ("mixed prefill-decode, PIECEWISE", "decode, FULL"):
            began = time.monotonic()
            for step in range(steps + 1):
                done = total * step // steps
                text = logs.bar(f"Capturing CUDA graphs ({kind})", done, total, time.monotonic() - began)
                # A progress bar rewrites its line; only its end is a new one.
                logs.write(f"{self.log.prefix if step == 0 else ''}\r{text}" + ("\n" if step == steps else ""))
                self.pause(0.3 / steps)
        self._take(graph_bytes(self.config))
        took = time.monotonic() - started
        self.log.say(
            "gpu_model_runner.py:5587",
            f"Graph capturing finished in {took:.0f} secs, took {logs.gib(graph_bytes(self.config))}",
        )

    # -- the scheduler and its memory ----------------------------------------------------------------------------

    def _build(self, shape: Geometry) -> Loaded:
        config = self.config
        sequences, tokens = config.batch_limits(self.cards.total_bytes)
        pool: KVCacheManager | None = None
        if self.kvcached:
            self.segment = self.elastic.make_segment(shape)
            pool = self.elastic.make_pool(shape, self.cards, self.segment)
        else:
            self._take(_whole_pages(shape.capacity_bytes))
        blocks = BlockPool(
            pool or StaticManager(shape.num_blocks),
            shape.num_blocks,
            caching=config.prefix_caching,
            max_cached_blocks=max_cached_blocks(config) if pool else -1,
        )
        blocks.misses_are_fatal = "pr324" in self.faults
        speed = Speed(
            weights_bytes=config.facts.weights_bytes,
            parameters=config.facts.parameters,
            kv_bytes_per_token=shape.kv_bytes_per_token,
            tensor_parallel_size=config.tensor_parallel_size,
            eager=config.eager,
        )
        limits = Limits(sequences, tokens, shape.block_tokens, config.max_model_len)
        return Loaded(
            cards=self.cards,
            scheduler=Scheduler(blocks, speed, limits),
            pool=pool,
            weights_bytes=self.weights_bytes,
            workspace_bytes=self.workspace_bytes,
            num_blocks=shape.num_blocks,
        )
