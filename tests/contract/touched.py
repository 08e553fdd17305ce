"""Every name of vLLM that the add-on touches, and whether a vLLM's source has it: ``python touched.py FOLDER …``.

FOLDER holds the package ``vllm`` (a site-packages, an unpacked wheel). The source is read, never run, so versions that
cannot be installed here are looked at in the same way as the one that the contract tests run. Standard library only.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Touch:
    """``name`` of a class (``owner``) in a module; ``parameters``: those that the add-on gives, by position or name."""

    module: str
    owner: str
    name: str
    parameters: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.module}.{self.owner}.{self.name}({', '.join(self.parameters)})".replace("()", "")


def _each(module: str, owner: str, *names: str) -> list[Touch]:
    return [Touch(module, owner, name) for name in names]


CORE, SCHEDULER, REQUEST = "vllm.v1.engine.core", "vllm.v1.core.sched.scheduler", "vllm.v1.request"
#: What must be there. What the add-on only uses where it exists (``getattr`` with a default) is not listed.
TOUCHED: tuple[Touch, ...] = (
    # engine_core.py, slumber.py, reclaim.py: the engine
    *_each(CORE, "EngineCore", "scheduler", "model_executor", "vllm_config"),
    *_each(CORE, "EngineCore", "batch_queue", "batch_queue_size", "step_fn"),
    Touch(CORE, "EngineCore", "reset_prefix_cache", ("reset_running_requests",)),
    *_each(CORE, "EngineCoreProc", "run_busy_loop", "_process_engine_step"),
    Touch(CORE, "EngineCoreProc", "_send_abort_outputs", ("aborted_reqs",)),
    *_each(CORE, "DPEngineCoreProc", "run_busy_loop", "dp_group"),
    # demand.py, reclaim.py: the scheduler
    *_each(SCHEDULER, "Scheduler", "running", "waiting", "skipped_waiting", "requests", "connector", "vllm_config"),
    *_each(SCHEDULER, "Scheduler", "kv_cache_manager", "kv_cache_config", "num_lookahead_tokens", "pause_state"),
    *_each(SCHEDULER, "Scheduler", "prev_step_scheduled_req_ids", "update_from_output"),
    Touch(SCHEDULER, "Scheduler", "_preempt_request", ("request", "timestamp")),
    Touch(SCHEDULER, "Scheduler", "set_pause_state", ("pause_state",)),
    Touch(SCHEDULER, "Scheduler", "finish_requests", ("request_ids", "finished_status")),
    *_each("vllm.v1.core.sched.interface", "PauseState", "UNPAUSED", "PAUSED_ALL"),
    *_each(REQUEST, "RequestStatus", "WAITING", "PREEMPTED", "RUNNING", "FINISHED_ABORTED"),
    *_each(
        REQUEST, "Request", "request_id", "status", "priority", "arrival_time", "num_tokens", "num_computed_tokens",
        "num_output_tokens",
    ),
    # pool.py, floors.py: block pool and cache layout
    *_each("vllm.v1.core.kv_cache_manager", "KVCacheManager", "block_pool"),
    *_each("vllm.v1.core.block_pool", "BlockPool", "get_num_free_blocks", "reset_prefix_cache"),
    *_each("vllm.v1.kv_cache_interface", "KVCacheConfig", "kv_cache_groups"),
    *_each("vllm.v1.kv_cache_interface", "KVCacheGroupSpec", "kv_cache_spec"),
    *_each("vllm.v1.kv_cache_interface", "KVCacheSpec", "block_size"),
    *_each("vllm.v1.kv_cache_interface", "SlidingWindowSpec", "sliding_window"),
    *_each("vllm.v1.kv_cache_interface", "ChunkedLocalAttentionSpec", "attention_chunk_size"),
    # slumber.py: executors and workers
    *_each("vllm.v1.executor.abstract", "Executor", "is_sleeping", "sleeping_tags"),
    Touch("vllm.v1.executor.abstract", "Executor", "wake_up", ("tags",)),
    Touch("vllm.v1.executor.abstract", "Executor", "collective_rpc", ("method",)),
    *_each("vllm.v1.worker.gpu_worker", "Worker", "reload_weights"),
    # vllm_backend.py, sleep.py: the API server's side
    Touch("vllm.v1.engine.core_client", "AsyncMPClient", "call_utility_async", ("method",)),
    *_each("vllm.v1.engine.async_llm", "AsyncLLM", "engine_core", "resume_generation"),
    Touch("vllm.v1.engine.async_llm", "AsyncLLM", "sleep", ("level", "mode")),
    Touch("vllm.v1.engine.async_llm", "AsyncLLM", "wake_up", ("tags",)),
    Touch("vllm.v1.engine.async_llm", "AsyncLLM", "pause_generation", ("mode", "clear_cache")),
)  # fmt: skip
#: Words that are looked for in vLLM's own: a message told apart, the group of plug-ins that we are loaded by.
WORDS: tuple[tuple[str, str], ...] = (
    ("vllm.v1.worker.gpu_worker", "Memory usage increased after sleeping"),
    ("vllm.plugins", "vllm.general_plugins"),
)


class Source:
    """One vLLM's source tree."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cache  # noqa: B019 - a handful of trees, each for one look
    def tree(self, module: str) -> ast.Module | None:
        path = self._path(module)
        return None if path is None else ast.parse(path.read_text(encoding="utf-8"))

    def _path(self, module: str) -> Path | None:
        base = self.folder.joinpath(*module.split("."))
        return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)

    def has_words(self, module: str, words: str) -> bool:
        path = self._path(module)
        return path is not None and words in path.read_text(encoding="utf-8")

    def has(self, touch: Touch) -> bool:
        """Whether the class, or one that it inherits from, has the name, and takes what is given to it."""
        for kind in self._classes(touch.module, touch.owner):
            for node in kind.body:
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == touch.name:
                    given = node.args
                    names = {arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
                    return set(touch.parameters) <= names
            if touch.name in _attributes(kind):
                return not touch.parameters
        return False

    def _classes(self, module: str, name: str) -> Iterator[ast.ClassDef]:
        """The class and its bases, as far as they are vLLM's."""
        tree = self.tree(module)
        if tree is None:
            return
        found = next((node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name), None)
        if found is None:
            origin = _imported(tree, name)
            if origin is not None:
                yield from self._classes(*origin)
            return
        yield found
        for base in found.bases:
            if isinstance(base, ast.Name):
                yield from self._classes(module, base.id)


def _imported(tree: ast.Module, name: str) -> tuple[str, str] | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return node.module, alias.name
    return None


def _attributes(kind: ast.ClassDef) -> set[str]:
    """Fields, members and what its methods set on ``self``."""
    names: set[str] = set()
    for node in ast.walk(kind):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, (ast.AnnAssign, ast.AugAssign)):
            targets = [node.target]
        for target in [one for each in targets for one in (each.elts if isinstance(each, ast.Tuple) else [each])]:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                names.add(target.attr)
            elif isinstance(target, ast.Name) and node in kind.body:
                names.add(target.id)
    return names


def missing(folder: Path) -> list[str]:
    """What the add-on touches and this vLLM has not."""
    source = Source(folder)
    names = [str(touch) for touch in TOUCHED if not source.has(touch)]
    return names + [f"{module}: {words!r}" for module, words in WORDS if not source.has_words(module, words)]


def main() -> int:
    bad = 0
    for folder in map(Path, sys.argv[1:]):
        lacks = missing(folder)
        bad += len(lacks)
        print(
            f"{folder}: {len(TOUCHED) + len(WORDS) - len(lacks)} of {len(TOUCHED) + len(WORDS)} there",
            *lacks,
            sep="\n  ",
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
