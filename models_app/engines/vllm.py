"""The real engine: command line and environment of ``vllm serve``, and what can be told wrong before it starts."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from models_app.engines.arguments import check_extra_args, parse_extra_args
from models_app.engines.environment import PLUGIN, child_environment
from models_app.engines.rundir import ADDON
from models_app.engines.spec import Command, EngineSpec, FieldError, LaunchContext
from models_app.engines.versions import judge
from models_app.errors import InvalidInput

MIDDLEWARE = "models_app.kvcache_addon.middleware.KVCacheMiddleware"
ENTRY_POINT = "models_app.kvcache_addon.engine_core:register"
#: Seconds for running requests after SIGTERM. Sardeenz drains at the router first; this catches what slipped through.
SHUTDOWN_TIMEOUT_S = 10
#: What we ask every second or so: its access lines would be 86,000 a day and push out those that matter. Every
#: supported vLLM knows the flag.
QUIET_PATHS = "/health,/metrics,/kvcache/status"
_ROOT = Path(__file__).resolve().parent.parent.parent
_DIST_INFO = f"{ADDON}/sardeenz_addon-1.dist-info"
_SECRET = re.compile(r"token|secret|passw|api[-_]?key", re.IGNORECASE)
#: Flags that may come as extra arguments but have a field too: both at once is a contradiction waiting to happen.
FIELD_OF_FLAG = {
    "--dtype": "dtype",
    "--quantization": "quantization",
    "--load-format": "load_format",
    "--revision": "hf_revision",
}
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")


def serve_arguments(spec: EngineSpec, ctx: LaunchContext) -> list[str]:
    """Everything after ``vllm``. The simulated engine takes the same.

    Raises InvalidInput for extra arguments that ``check`` refuses; who may use risky ones was asked when they were
    saved.
    """
    argv = ["serve", spec.model, "--host", ctx.bind_host, "--port", str(ctx.port)]
    argv += ["--served-model-name", *spec.served_model_names]
    argv += ["--tensor-parallel-size", str(spec.tensor_parallel_size)]
    if spec.max_model_len is not None:
        argv += ["--max-model-len", str(spec.max_model_len)]
    if spec.dtype and spec.dtype != "auto":
        argv += ["--dtype", spec.dtype]
    if spec.quantization:
        argv += ["--quantization", spec.quantization]
    if spec.load_format:
        argv += ["--load-format", spec.load_format]
    if spec.hf_revision:
        argv += ["--revision", spec.hf_revision, "--tokenizer-revision", spec.hf_revision]
    if spec.enforce_eager:
        argv += ["--enforce-eager"]
    if spec.enable_sleep_mode:
        argv += ["--enable-sleep-mode"]
    # This pair of spellings is the one that every version takes.
    argv += ["--enable-prefix-caching" if spec.enable_prefix_caching else "--no-enable-prefix-caching"]
    argv += ["--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S), "--middleware", MIDDLEWARE]
    argv += ["--disable-access-log-for-endpoints", QUIET_PATHS]
    extra, errors = check_extra_args(
        spec.extra_args, vllm_version=ctx.versions.get("vllm"), allow_risky=True, kvcached=spec.kvcached
    )
    if errors:  # never dropped in silence
        raise InvalidInput({"extra_args": errors})
    return argv + extra


def masked(argv: list[str]) -> tuple[str, ...]:
    """The command line for people: values that may be secret are hidden, also in ``--flag=value``."""
    shown: list[str] = []
    hide = False
    for word in argv:
        name, equals, _value = word.partition("=")
        if hide and not word.startswith("-"):
            shown.append("***")
        elif word.startswith("-") and equals and _SECRET.search(name):
            shown.append(f"{name}=***")
        else:
            shown.append(word)
        hide = word.startswith("-") and not equals and bool(_SECRET.search(word))
    return tuple(shown)


def addon_files() -> dict[str, str]:
    """A two-file distribution, found through PYTHONPATH without being installed, that names our plug-in to vLLM."""
    return {
        f"{_DIST_INFO}/METADATA": "Metadata-Version: 2.1\nName: sardeenz-addon\nVersion: 1\n",
        f"{_DIST_INFO}/entry_points.txt": f"[vllm.general_plugins]\n{PLUGIN} = {ENTRY_POINT}\n",
    }


def addon_links(*packages: str) -> dict[str, str]:
    """Our packages for PYTHONPATH, one by one: the repository's root would bring ``tests`` and others along."""
    return {f"{ADDON}/{name}": str(_ROOT / name) for name in packages}


def check_spec(
    spec: EngineSpec, versions: Mapping[str, Any] | None = None, *, allow_risky: bool = False
) -> Iterator[FieldError]:
    """What both kinds of engine refuse."""
    if spec.model.startswith("-"):
        yield FieldError("model", "A model cannot begin with a dash.")
    elif spec.source == "local":
        if not spec.model.startswith("/"):
            yield FieldError("model", "Give the folder's full path.")
    elif not _HUB_ID.fullmatch(spec.model):
        yield FieldError("model", f"{spec.model!r} is not a Hugging Face id (owner/name, or name).")
    if not spec.served_model_names:
        yield FieldError("served_model_names", "A served model name is needed.")
    if spec.max_model_len is not None and spec.max_model_len < 1:
        yield FieldError("max_model_len", "The context length must be at least 1 token.")
    yield from _check_shape(spec)
    vllm_version = (versions or {}).get("vllm")
    _, errors = check_extra_args(
        spec.extra_args, vllm_version=vllm_version, allow_risky=allow_risky, kvcached=spec.kvcached
    )
    yield from (FieldError("extra_args", error) for error in errors)
    for argument in parse_extra_args(spec.extra_args, vllm_version=vllm_version)[0]:
        field = FIELD_OF_FLAG.get(argument.flag.name)
        if field and getattr(spec, field) not in ("", "auto"):
            yield FieldError(
                "extra_args", f"{argument.spelling} is set by its own field already ({getattr(spec, field)}): keep one."
            )


def _check_shape(spec: EngineSpec) -> Iterator[FieldError]:
    heads = spec.facts.get("num_attention_heads")
    if isinstance(heads, int) and heads > 0 and heads % spec.tensor_parallel_size:
        fitting = [n for n in (1, 2, 4, 8, 16) if heads % n == 0]
        yield FieldError(
            "tensor_parallel_size",
            f"The model's {heads} attention heads cannot be split over {spec.tensor_parallel_size} GPUs evenly; "
            f"{', '.join(map(str, fitting))} would do.",
        )
    longest = spec.facts.get("max_position_embeddings")
    if isinstance(longest, int) and spec.max_model_len and spec.max_model_len > longest > 0:
        yield FieldError(
            "max_model_len", f"The model was made for at most {longest} tokens; {spec.max_model_len} is more."
        )


class VllmEngine:
    """``vllm serve`` of the environment that ``SARDEENZ_VLLM`` names."""

    @property
    def kind(self) -> str:
        return "vllm"

    def command(self, spec: EngineSpec, ctx: LaunchContext) -> Command:
        argv = [*shlex.split(ctx.vllm_command), *serve_arguments(spec, ctx)]
        return Command(
            argv=tuple(argv),
            env=child_environment(spec, ctx, os.environ),
            masked_argv=masked(argv),
            files=addon_files(),
            links=addon_links("models_app"),
        )

    def check(
        self, spec: EngineSpec, versions: Mapping[str, Any] | None = None, *, allow_risky: bool = False
    ) -> list[FieldError]:
        errors = list(check_spec(spec, versions, allow_risky=allow_risky))
        if versions:
            verdict = judge(versions, kvcached=spec.kvcached)
            if not verdict.ok:
                errors.append(FieldError("kvcached" if spec.kvcached else "", verdict.sentence))
        return errors
