"""The environment of an engine: a list of what may pass, and what Sardeenz sets. Nothing else of ours reaches it.

A worker's own environment holds the database's address, signing keys and tokens. An engine runs code that came with a
model; so it gets an allow-list. ``SARDEENZ_ENGINE_ENV`` (names, comma-separated) adds to it on a host; names that are
ours, or that would open the engine, stay out even then.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from models_app.engines.identity import MARKER, Marker, tmp_dir
from models_app.engines.rundir import ADDON, TOKEN
from models_app.engines.spec import EngineSpec, LaunchContext
from models_app.engines.versions import needs_v1_runner

EXTRA_NAMES = "SARDEENZ_ENGINE_ENV"
PLUGIN = "sardeenz"

#: Names, or patterns with *, that pass from the worker's environment.
ALLOWED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_*", "TZ", "TERM"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "CC", "CXX", "VIRTUAL_ENV"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
    *("CUDA_HOME", "CUDA_PATH", "CUDA_MODULE_LOADING", "CUDA_CACHE_PATH", "CUDA_CACHE_MAXSIZE", "CUDACXX"),
    *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_REQUIRE_CUDA"),
    *("NCCL_*", "GLOO_SOCKET_IFNAME", "TORCH_CUDA_ARCH_LIST", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "FLASHINFER_WORKSPACE_BASE", "FLASHINFER_CUDA_ARCH_LIST"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "KMP_AFFINITY"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_HUB_ENABLE_HF_TRANSFER", "HF_XET_CACHE"),
    *("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT", "HF_HUB_DISABLE_XET", "TRANSFORMERS_OFFLINE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "no_proxy", "all_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("VLLM_CACHE_ROOT", "VLLM_CONFIG_ROOT", "VLLM_ASSETS_CACHE", "VLLM_TARGET_DEVICE", "VLLM_LOGGING_LEVEL"),
    *("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_CPU_SGL_KERNEL"),
    *("VLLM_ATTENTION_BACKEND", "VLLM_FLASH_ATTN_VERSION", "VLLM_USE_FLASHINFER_SAMPLER", "VLLM_USE_DEEP_GEMM"),
    *("VLLM_WORKER_MULTIPROC_METHOD", "VLLM_ENGINE_READY_TIMEOUT_S", "VLLM_HOST_IP", "VLLM_ALLOW_LONG_MAX_MODEL_LEN"),
    *("VLLM_PLUGINS",),
    *("KVCACHED_PAGE_SIZE_MB", "KVCACHED_GPU_UTILIZATION", "KVCACHED_MIN_RESERVED_PAGES"),
    *("KVCACHED_MAX_RESERVED_PAGES", "KVCACHED_MAX_CACHED_TOKENS", "KVCACHED_IPC_TIMEOUT", "KVCACHED_LOG_LEVEL"),
    *("KVCACHED_SANITY_CHECK",),
)
#: Never passed, whatever ``SARDEENZ_ENGINE_ENV`` says: set by us, or a way around the engine's guard.
OURS = (
    *("SARDEENZ_*", "DATABASE_URL", "REDIS_URL", "SECRET_KEY", "DJANGO_*", "CELERY_*"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TMPDIR", "PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP"),
    *("ENABLE_KVCACHED", "KVCACHED_AUTOPATCH", "KVCACHED_IPC_NAME", "KVCACHED_CONTIGUOUS_LAYOUT"),
    *("KVCACHED_PAGE_PREALLOC_ENABLED", "VLLM_USE_V2_MODEL_RUNNER", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    *("VLLM_API_KEY", "VLLM_SERVER_DEV_MODE", "VLLM_USE_RUST_FRONTEND", "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"),
    *("VLLM_PORT", "VLLM_NO_USAGE_STATS", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ALLOW_INSECURE_SERIALIZATION"),
)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def extra_names(text: str) -> tuple[list[str], list[str]]:
    """The names in ``SARDEENZ_ENGINE_ENV`` that pass, and a sentence for each that does not."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    refused = [name for name in names if _matches(name, OURS)]
    return (
        [name for name in names if name not in refused],
        [f"{EXTRA_NAMES}: {name} is set, or kept from engines, by Sardeenz itself." for name in refused],
    )


def passed_on(host: Mapping[str, str]) -> dict[str, str]:
    """What of a worker's environment an engine may see."""
    extra, _ = extra_names(host.get(EXTRA_NAMES, ""))
    patterns = (*ALLOWED, *extra)
    return {name: value for name, value in host.items() if _matches(name, patterns) and not _matches(name, OURS)}


def _cache_root(env: Mapping[str, str]) -> str | None:
    """Where vLLM keeps what it compiles; None when there is no home at all."""
    if root := env.get("VLLM_CACHE_ROOT"):
        return root
    base = env.get("XDG_CACHE_HOME") or (f"{env['HOME']}/.cache" if env.get("HOME") else None)
    return f"{base}/vllm" if base else None


def child_environment(spec: EngineSpec, ctx: LaunchContext, host: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of one engine start. Secrets come by file (engine token) or variable, never by argv."""
    env = passed_on(host)
    if "VLLM_PLUGINS" in env and PLUGIN not in env["VLLM_PLUGINS"].split(","):
        # The variable is an allow-list of plug-ins: set by the operator, it must name ours as well.
        env["VLLM_PLUGINS"] = ",".join(filter(None, (env["VLLM_PLUGINS"], PLUGIN)))
    env |= {
        MARKER: str(Marker(ctx.installation, ctx.instance_id, ctx.attempt_id)),
        "SARDEENZ_ENGINE_TOKEN_FILE": str(ctx.run_dir / TOKEN),
        "PYTHONPATH": str(ctx.run_dir / ADDON),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(tmp_dir(ctx.installation, ctx.attempt_id)),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_COLOR": "0",
        "NO_COLOR": "1",
        "KVCACHED_LOG_COLOR": "false",
        "VLLM_CONFIGURE_LOGGING": "1",
    }
    if cache := _cache_root(env):
        # TMPDIR goes with the start; what torch compiles must not go with it.
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{cache}/torchinductor")
    if ctx.gpu_uuids:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(ctx.gpu_uuids)
    if ctx.initial_limit_bytes is not None:
        env["SARDEENZ_INITIAL_LIMIT_BYTES"] = str(ctx.initial_limit_bytes)
    if ctx.hf_token:
        env["HF_TOKEN"] = ctx.hf_token
    if ctx.hf_home:
        env["HF_HOME"] = ctx.hf_home
    if ctx.offline:
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if spec.kvcached:
        env |= {"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "1", "KVCACHED_IPC_NAME": ctx.ipc_name}
        if spec.kv_layout != "default":
            env["KVCACHED_CONTIGUOUS_LAYOUT"] = "true" if spec.kv_layout == "contiguous" else "false"
        if needs_v1_runner(ctx.versions):
            env["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    else:
        env["ENABLE_KVCACHED"] = "false"
    return env
