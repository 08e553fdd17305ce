"""Everything that one simulated engine is started with, from its command line and its environment, in one place.

Beside vLLM's and kvcached's own variables it reads:

==============================  =====================================================================================
``SARDEENZ_SIM_DIR``            folder of the ledger of simulated GPUs; without it the engine has a card to itself
``SARDEENZ_SIM_GPU_BYTES``      size of that card (80 GiB)
``SARDEENZ_SIM_SPEED``          how much faster than the demonstration loading and tokens are (1)
``SARDEENZ_SIM_FACTS``          facts of the model, JSON (see ``facts``)
``SARDEENZ_SIM_FAULTS``         faults that are on from the start (see ``faults``)
``SARDEENZ_SIM_VLLM_VERSION``   the vLLM to behave like (0.30.0), and ``SARDEENZ_SIM_KVCACHED_VERSION`` (0.1.6)
``SARDEENZ_SIM_ORPHAN_S``       after how long an EngineCore without its API server ends by itself (900)
``SARDEENZ_ATTEMPT_DIR``        run directory, for ``faults.json``; else the folder of ``SARDEENZ_ENGINE_TOKEN_FILE``
``SARDEENZ_ENGINE_TOKEN_FILE``  the token that guards the port: read by the add-on, as in vLLM
==============================  =====================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from models_app.simulator import arguments, segment
from models_app.simulator.facts import GIB, ModelError, SimFacts, facts_for, parse_version
from models_app.simulator.faults import Faults

DEFAULT_VLLM = "0.30.0"
DEFAULT_KVCACHED = "0.1.6"
#: vLLM takes larger batches on cards from this size on.
LARGE_CARD_BYTES = 70 * GIB


def truthy(text: str | None) -> bool:
    return (text or "").strip().lower() in ("1", "true")


@dataclass
class Config:
    """What the engine is to be. Sizes in bytes, times in seconds before ``speed`` divides them."""

    model: str
    served_names: tuple[str, ...]
    facts: SimFacts
    host: str
    port: int
    max_model_len: int
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    kv_dtype_bytes: int | None = None
    block_tokens: int = 16
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    eager: bool = False
    sleep_mode: bool = False
    prefix_caching: bool = True
    load_format: str = "auto"
    shutdown_timeout_s: float = 0.0
    api_keys: tuple[str, ...] = ()
    middleware: tuple[str, ...] = ()
    root_path: str = ""
    load_tracking: bool = False
    auto_tools: bool = False
    access_log: bool = True
    quiet_paths: frozenset[str] = frozenset()  # of these no access line is written
    vllm_version: str = DEFAULT_VLLM
    kvcached_version: str = DEFAULT_KVCACHED
    kvcached: bool = False
    ipc_name: str = ""
    kvcached_env: dict[str, str] = field(default_factory=dict)
    v2_runner: bool = True
    dev_mode: bool = False
    sim_dir: Path | None = None
    gpu_uuids: tuple[str, ...] = ()
    gpu_bytes: int = 80 * GIB
    speed: float = 1.0
    faults_text: str = ""
    run_dir: Path | None = None
    orphan_s: float = 900.0
    shown_args: dict[str, object] = field(default_factory=dict)

    def open_faults(self) -> Faults:
        return Faults(self.faults_text, self.run_dir)

    def kv_number(self, name: str, default: int) -> int:
        """One of kvcached's numeric variables; a value that is no number counts as C's ``atoi``: 0."""
        text = self.kvcached_env.get(name)
        if text is None:
            return default
        try:
            return int(text)
        except ValueError:
            return 0

    @property
    def version(self) -> tuple[int, ...]:
        return parse_version(self.vllm_version)

    def batch_limits(self, card_bytes: int) -> tuple[int, int]:
        """``max_num_seqs`` and ``max_num_batched_tokens``, as vLLM's defaults for an API server on such a card."""
        large = card_bytes >= LARGE_CARD_BYTES
        tokens = self.max_num_batched_tokens or (8192 if large else 2048)
        return self.max_num_seqs or (1024 if large else 256), tokens


def read(argv: Sequence[str], env: Mapping[str, str] = os.environ) -> Config:
    """Parse the arguments after ``serve``. Raises ``ModelError`` for a model that vLLM would refuse to serve."""
    vllm_version = env.get("SARDEENZ_SIM_VLLM_VERSION") or DEFAULT_VLLM
    options = arguments.parse(argv, vllm_version)
    facts = facts_for(options.model, env.get("SARDEENZ_SIM_FACTS"), load_format=options.load_format)
    token_file = env.get("SARDEENZ_ENGINE_TOKEN_FILE")
    run_dir = env.get("SARDEENZ_ATTEMPT_DIR") or (str(Path(token_file).parent) if token_file else None)
    kvcached_env = {name: value for name, value in env.items() if name.startswith("KVCACHED_")}
    keys = options.api_key or ([env["VLLM_API_KEY"]] if env.get("VLLM_API_KEY") else [])
    ipc_name = kvcached_env.get("KVCACHED_IPC_NAME")
    config = Config(
        model=options.model,
        served_names=tuple(options.served_model_name or (options.model,)),
        facts=facts,
        host=options.host or "0.0.0.0",  # noqa: S104 - vLLM's default; the launcher always passes --host
        port=options.port,
        max_model_len=_max_model_len(options.max_model_len, facts, env),
        tensor_parallel_size=options.tensor_parallel_size,
        gpu_memory_utilization=options.gpu_memory_utilization,
        kv_cache_memory_bytes=options.kv_cache_memory_bytes,
        kv_dtype_bytes=1 if options.kv_cache_dtype.startswith("fp8") else None,
        block_tokens=options.block_size or 16,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        eager=options.enforce_eager,
        sleep_mode=options.enable_sleep_mode,
        prefix_caching=options.enable_prefix_caching,
        load_format=options.load_format,
        shutdown_timeout_s=options.shutdown_timeout,
        api_keys=tuple(key for key in keys if key),
        middleware=tuple(options.middleware),
        root_path=options.root_path.rstrip("/"),
        load_tracking=options.enable_server_load_tracking,
        auto_tools=options.enable_auto_tool_choice and bool(options.tool_call_parser),
        access_log=not options.disable_uvicorn_access_log,
        quiet_paths=frozenset(path for path in options.disable_access_log_for_endpoints.split(",") if path),
        vllm_version=vllm_version,
        kvcached_version=env.get("SARDEENZ_SIM_KVCACHED_VERSION") or DEFAULT_KVCACHED,
        kvcached=truthy(env.get("ENABLE_KVCACHED")),
        ipc_name=segment.sanitized(ipc_name) if ipc_name else "",
        kvcached_env=kvcached_env,
        v2_runner=env.get("VLLM_USE_V2_MODEL_RUNNER", "1") not in ("0", "false"),
        dev_mode=truthy(env.get("VLLM_SERVER_DEV_MODE")),
        sim_dir=Path(env["SARDEENZ_SIM_DIR"]) if env.get("SARDEENZ_SIM_DIR") else None,
        gpu_bytes=int(env.get("SARDEENZ_SIM_GPU_BYTES") or 80 * GIB),
        speed=float(env.get("SARDEENZ_SIM_SPEED") or 1.0),
        faults_text=env.get("SARDEENZ_SIM_FAULTS", ""),
        run_dir=Path(run_dir) if run_dir else None,
        orphan_s=float(env.get("SARDEENZ_SIM_ORPHAN_S") or 900.0),
        shown_args=_shown(options),
    )
    config.gpu_uuids = _gpu_uuids(config, env.get("CUDA_VISIBLE_DEVICES"))
    return config


def _max_model_len(asked: int | None, facts: SimFacts, env: Mapping[str, str]) -> int:
    derived = facts.max_position_embeddings
    if asked is None or asked < 0:
        return derived
    if asked > derived and not truthy(env.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN")):
        raise ModelError(
            "model_config",
            f"User-specified max_model_len ({asked}) is greater than the derived max_model_len "
            f"(max_position_embeddings={derived}.0 or model_max_length=None in model's config.json). To allow "
            "overriding this maximum, set the env var VLLM_ALLOW_LONG_MAX_MODEL_LEN=1.",
        )
    return asked


def _gpu_uuids(config: Config, visible: str | None) -> tuple[str, ...]:
    """The cards by UUID, from ``CUDA_VISIBLE_DEVICES`` (UUIDs or indices) and the ledger's list."""
    if config.sim_dir is None:
        return ()
    from gpus_app.probes.sim_ledger import Ledger

    cards = Ledger(config.sim_dir).gpus()
    if visible is None:
        return tuple(card.uuid for card in cards[: config.tensor_parallel_size])
    by_index = {str(card.index): card.uuid for card in cards}
    wanted = [name.strip() for name in visible.split(",") if name.strip()]
    return tuple(by_index.get(name, name) for name in wanted)[: config.tensor_parallel_size]


def _shown(options: object) -> dict[str, object]:
    """vLLM's *non-default args*: without the keys."""
    hidden = {"api_key", "model", "hf_token"}
    return {name: value for name, value in vars(options).items() if value not in (None, [], "") and name not in hidden}
