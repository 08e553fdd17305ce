"""What an engine is asked to run (spec), where (context), and the command that comes of both."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class EngineSpec:
    """The options of one start, frozen: what a model's saved options were when the attempt was made.

    ``served_model_names``: the primary first, aliases after. ``source``: ``catalogue``, ``huggingface`` or ``local``.
    ``facts``: ``ModelFacts.to_json()``, for the simulated engine and for estimates.
    """

    model: str
    served_model_names: tuple[str, ...]
    source: str = "huggingface"
    hf_revision: str = ""
    max_model_len: int | None = None
    dtype: str = "auto"
    quantization: str = ""
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    enable_sleep_mode: bool = False
    enable_prefix_caching: bool = True
    kvcached: bool = True
    kv_layout: str = "default"
    extra_args: str = ""
    load_format: str = ""
    spec_revision: int = 1
    facts: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values, for ``LaunchAttempt.spec``."""
        return {**asdict(self), "served_model_names": list(self.served_model_names)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | str) -> EngineSpec:
        """The inverse of ``to_json``. Unknown keys (of a newer version) are passed over."""
        data: Mapping[str, Any] = json.loads(value) if isinstance(value, str) else value
        known = {f.name for f in fields(cls)}
        items = {key: item for key, item in data.items() if key in known}
        items["served_model_names"] = tuple(items["served_model_names"])
        return cls(**items)


@dataclass(frozen=True)
class LaunchContext:
    """Where and as what a spec is started.

    ``initial_limit_bytes``: KV limit in force before the engine serves, per GPU. ``vllm_command``: ``SARDEENZ_VLLM``,
    split as a shell would. ``versions``: what ``versions.detect_versions(vllm_command)`` said. ``sim``: settings of the
    simulated engine: ``sim_dir``, ``speed``, ``faults``, ``gpu_bytes``, ``vllm_version`` …, all optional.
    """

    installation: str
    instance_id: int
    attempt_id: int
    run_dir: Path
    bind_host: str
    port: int
    gpu_uuids: tuple[str, ...] = ()
    gpu_indices: tuple[int, ...] = ()
    ipc_name: str = ""
    initial_limit_bytes: int | None = None
    hf_token: str | None = None
    hf_home: str | None = None
    offline: bool = False
    vllm_command: str = "vllm"
    versions: Mapping[str, Any] = field(default_factory=dict)
    sim: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """What to exec. ``masked_argv`` is for people; ``files``, ``links`` are made in the run directory before exec."""

    argv: tuple[str, ...]
    env: dict[str, str]
    masked_argv: tuple[str, ...]
    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FieldError:
    """A sentence about one field of the spec (named as in ``EngineSpec``, empty: about the whole)."""

    field: str
    message: str


class Engine(Protocol):
    """A kind of engine. Pure: builds and judges, starts nothing."""

    @property
    def kind(self) -> str:
        """``vllm`` or ``simulated``."""

    def command(self, spec: EngineSpec, ctx: LaunchContext) -> Command:
        """The exact command line and environment of one start."""

    def check(
        self, spec: EngineSpec, versions: Mapping[str, Any] | None = None, *, allow_risky: bool = False
    ) -> list[FieldError]:
        """What is wrong with a spec before anything is started; empty when nothing is known to be."""
