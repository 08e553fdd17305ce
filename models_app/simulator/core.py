"""EngineCore's state and its utility methods, under vLLM's names: what the API server and the add-on call."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from models_app.simulator import logs
from models_app.simulator.channel import CoreChannel
from models_app.simulator.config import Config
from models_app.simulator.executor import Executor
from models_app.simulator.faults import Faults
from models_app.simulator.loading import Loaded
from models_app.simulator.scheduler import PauseState, Request, RequestStatus

_PAUSES = {"abort": PauseState.PAUSED_ALL, "keep": PauseState.PAUSED_ALL, "wait": PauseState.PAUSED_NEW}


class EngineCore:
    """The engine's state and its utility methods. The add-on puts one more method on this class."""

    def __init__(self, config: Config, channel: CoreChannel, log: logs.Log, faults: Faults, loaded: Loaded) -> None:
        self.config = config
        self.channel = channel
        self.log = log
        self.faults = faults
        self.cards = loaded.cards
        self.scheduler = loaded.scheduler
        self.pool = loaded.pool
        self.num_blocks = loaded.num_blocks
        #: No batches in flight between two steps: none has to be finished before memory is taken.
        self.batch_queue: list[Any] = []
        self.model_executor = Executor(
            loaded.cards,
            log,
            weights_bytes=loaded.weights_bytes,
            workspace_bytes=loaded.workspace_bytes,
            speed=config.speed,
        )
        self.vllm_config = vllm_config(config, loaded.scheduler.limits.max_num_batched_tokens)

    # -- utility methods, by vLLM's names ------------------------------------------------------------------------

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget the prefix cache; with ``reset_running_requests`` also preempt everything that runs."""
        if reset_running_requests:
            self.scheduler.preempt_all()
        done = self.scheduler.reset_prefix_cache()
        self.release_retired()
        return done

    def pause_scheduler(self, mode: str = "abort", clear_cache: bool = True) -> Any:
        """Stop scheduling. ``wait`` is answered when what runs has ended."""
        if mode not in _PAUSES:
            raise ValueError(f"Invalid pause mode: {mode}")
        scheduler = self.scheduler
        if mode == "abort":
            self.abort(list(scheduler.requests))
        scheduler.set_pause_state(_PAUSES[mode])

        def finish() -> None:
            scheduler.set_pause_state(PauseState.PAUSED_ALL)
            if clear_cache:
                scheduler.reset_prefix_cache()

        return Later(lambda: mode != "wait" or not scheduler.running, finish)

    def resume_scheduler(self) -> None:
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def is_scheduler_paused(self) -> bool:
        return self.scheduler.pause_state is not PauseState.UNPAUSED

    def sleep(self, level: int = 1, mode: str = "abort") -> Any:
        """Pause, then let the executor give back what the level says. KV bundles stay."""
        paused = self.pause_scheduler(mode, clear_cache=level >= 1)

        def finish() -> None:
            paused.finish()
            self.release_retired()
            if level >= 1:
                self.model_executor.sleep(level)

        return Later(paused.ready, finish)

    def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None or set(tags) - {"scheduling"}:
            self.model_executor.wake_up(tags)
        if not self.model_executor.is_sleeping:
            self.resume_scheduler()

    def is_sleeping(self) -> bool:
        return self.model_executor.is_sleeping or self.is_scheduler_paused()

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, message: dict[str, Any]) -> None:
        self.scheduler.add_request(
            Request(message["id"], message["prompt"], message["max"], hashes=message.get("hashes") or [])
        )

    def abort(self, ids: list[str]) -> None:
        """End requests and tell their clients."""
        ended = self.scheduler.finish_requests(ids, RequestStatus.FINISHED_ABORTED)
        self._send_abort_outputs(ended)

    def _send_abort_outputs(self, ended: list[tuple[str, int]]) -> None:
        if ended:
            self.channel.send(
                {"k": "out", "tokens": {}, "aborted": [ident for ident, _ in ended], "stats": self.stats()}
            )

    def release_retired(self) -> None:
        """No step is under way: what was freed can be unmapped."""
        if self.pool:
            self.pool.release_retired_pages_through(self.pool.capture_physical_release_marker())

    def stats(self) -> dict[str, Any]:
        scheduler, blocks = self.scheduler, self.scheduler.block_pool
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "usage": scheduler.usage,
            "preemptions": scheduler.num_preemptions,
            "prompt_tokens": scheduler.prompt_tokens,
            "generation_tokens": scheduler.generated_tokens,
            "prefix_queries": blocks.queries,
            "prefix_hits": blocks.hits,
        }


class Later:
    """The answer of a utility that has to wait for requests to end."""

    def __init__(self, ready: Callable[[], bool], finish: Callable[[], Any]) -> None:
        self.ready = ready
        self.finish = finish


def vllm_config(config: Config, max_num_batched_tokens: int) -> SimpleNamespace:
    """As much of vLLM's configuration object as others look at, in either process."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=config.model, max_model_len=config.max_model_len, enable_sleep_mode=config.sleep_mode
        ),
        load_config=SimpleNamespace(load_format=config.load_format),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_num_batched_tokens),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_rank=0,
        ),
    )
