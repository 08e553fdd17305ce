"""Which ``vllm serve`` flags are ours alone, and which need a permission: names in full, each with its reason."""

from __future__ import annotations

_PLACE = "Sardeenz chooses address and port, so that only the router can reach the engine."
_NAME = "the served model name and its aliases have fields of their own."
_GPUS = "Sardeenz chooses the GPUs; one instance is one tensor-parallel group. For more capacity use more replicas."
_KEYS = "clients come through the router with their API keys; the engine itself is guarded by a secret of its own."
_TLS = "the engine speaks plain HTTP to the router on this machine; TLS belongs in front of Sardeenz."
_PROCESSES = "an instance is exactly one API server with one engine, which Sardeenz watches."
_FIELD = "it has a field of its own in the model's form."

OWNED: dict[str, str] = {
    "--host": _PLACE,
    "--port": _PLACE,
    "--uds": _PLACE,
    "--root-path": _PLACE,
    "--grpc": _PLACE,
    "--model": "the model has a field of its own.",
    "--served-model-name": _NAME,
    "--config": "a file could set every other flag unseen.",
    "--help": "it would print the help and end the engine.",
    "-h": "it would print the help and end the engine.",
    "--tensor-parallel-size": _FIELD,
    "--max-model-len": f"{_FIELD} (KV floors and the router's length check depend on it)",
    "--enable-prefix-caching": _FIELD,
    "--enable-sleep-mode": _FIELD,
    "--enforce-eager": _FIELD,
    "--middleware": "the KV endpoints and the engine's guard are a middleware that must stay outermost.",
    "--shutdown-timeout": "Sardeenz drains at the router and sets how long an end may take.",
    "--api-key": _KEYS,
    "--hf-token": "a secret on a command line is readable by every user of the machine; set HF_TOKEN for the worker.",
    "--allow-credentials": _KEYS,
    "--allowed-origins": _KEYS,
    "--allowed-methods": _KEYS,
    "--allowed-headers": _KEYS,
    "--ssl-keyfile": _TLS,
    "--ssl-certfile": _TLS,
    "--ssl-ca-certs": _TLS,
    "--ssl-cert-reqs": _TLS,
    "--ssl-ciphers": _TLS,
    "--enable-ssl-refresh": _TLS,
    "--headless": _PROCESSES,
    "--api-server-count": _PROCESSES,
    "--pipeline-parallel-size": _GPUS,
    "--prefill-context-parallel-size": _GPUS,
    "--decode-context-parallel-size": _GPUS,
    "--device-ids": _GPUS,
    "--nnodes": _GPUS,
    "--node-rank": _GPUS,
    "--master-addr": _GPUS,
    "--master-port": _GPUS,
    "--enable-elastic-ep": _GPUS,
    "--elastic-ep-max-dp-size": _GPUS,
    "--disable-log-stats": "the dashboard lives on the engine's metrics.",
}
#: Prefixes of whole families. Engines of one data-parallel launch would share one KV segment and overwrite each other.
OWNED_PREFIXES: dict[str, str] = {"--data-parallel": _GPUS, "--dp-supervisor": _GPUS}

_KV_LIMITS = "with kvcached on, KV memory is governed by the instance's limit, which can be changed while it runs."
OWNED_WITH_KVCACHED: dict[str, str] = {
    "--gpu-memory-utilization": _KV_LIMITS,
    "--kv-cache-memory-bytes": _KV_LIMITS,
    "--num-gpu-blocks-override": _KV_LIMITS,
    "--watermark": "it is a fraction of the blocks at start and would starve requests once the limit is lowered.",
    "--kv-events-config": "kvcached does not support KV cache events.",
}

_CODE = "runs code that comes with the model or that the argument names"
_FILES = "lets the engine read or write files of this machine"
_NET = "makes the engine talk to other machines"
RISKY: dict[str, str] = {
    "--trust-remote-code": _CODE,
    "--code-revision": _CODE,
    "--tool-parser-plugin": _CODE,
    "--reasoning-parser-plugin": _CODE,
    "--io-processor-plugin": _CODE,
    "--logits-processors": _CODE,
    "--worker-cls": _CODE,
    "--worker-extension-cls": _CODE,
    "--scheduler-cls": _CODE,
    "--distributed-executor-backend": _CODE,
    "--model-class-overrides": _CODE,
    "--model-impl": _CODE,
    "--kv-transfer-config": _CODE,
    "--ec-transfer-config": _CODE,
    "--weight-transfer-config": _CODE,
    "--additional-config": _CODE,
    "--compilation-config": _CODE,
    "--profiler-config": _FILES,
    "--hf-overrides": _CODE,
    "--hf-config-path": _CODE,
    "--config-format": _CODE,
    "--tokenizer": _CODE,
    "--tokenizer-mode": _CODE,
    "--speculative-config": _CODE,
    "--spec-model": _CODE,
    "--lora-modules": _FILES,
    "--default-mm-loras": _FILES,
    "--model-loader-extra-config": _FILES,
    "--chat-template": _FILES,
    "--generation-config": _FILES,
    "--trust-request-chat-template": "lets a request bring its own template",
    "--allowed-local-media-path": _FILES,
    "--allowed-media-domains": _NET,
    "--download-dir": _FILES,
    "--log-config-file": _FILES,
    "--mm-encoder-fp8-scale-path": _FILES,
    "--mm-encoder-fp8-scale-save-path": _FILES,
    "--kv-offloading-backend": _FILES,
    "--tool-server": _NET,
    "--otlp-traces-endpoint": _NET,
    "--enable-log-requests": "writes what users ask into the log",
    "--enable-log-outputs": "writes what users are answered into the log",
    "--enable-log-deltas": "writes what users are answered into the log",
    "--enable-scale-out": "opens more endpoints on the engine",
    "--enable-tokenizer-info-endpoint": "opens more endpoints on the engine",
    "--enable-offline-docs": "opens more endpoints on the engine",
    "--ray-workers-use-nsight": _CODE,
    "--enable-prompt-embeds": "takes tensors from clients, which may crash the engine",
    "--enable-mm-embeds": "takes tensors from clients, which may crash the engine",
}

#: What people copy from old documents, and what to write today.
HINTS: dict[str, str] = {
    "--disable-prefix-caching": "Use the model's prefix caching setting (vLLM's own: --no-enable-prefix-caching).",
    "--disable-log-requests": "Requests are not logged unless asked for (vLLM's own: --no-enable-log-requests).",
    "--task": "For embedding, reranking or reward models use --runner pooling (and --convert embed or classify).",
    "--device": "vLLM finds the device by itself; Sardeenz chooses the GPUs.",
    "--use-v2-block-manager": "It is vLLM's only block manager now; leave it out.",
    "--swap-space": "vLLM has no swap space any more; leave it out.",
    "--num-scheduler-steps": "Multi-step scheduling is gone from vLLM; leave it out.",
    "--guided-decoding-backend": "It is part of --structured-outputs-config now.",
    "--rope-scaling": "Give it as part of --hf-overrides.",
    "--rope-theta": "Give it as part of --hf-overrides.",
    "--max-seq-len-to-capture": "Use --max-cudagraph-capture-size.",
}


def owned_reason(name: str, *, kvcached: bool) -> str | None:
    """Why a flag is ours, as the end of a sentence; None when it is not."""
    if name in OWNED:
        return OWNED[name]
    for prefix, reason in OWNED_PREFIXES.items():
        if name.startswith(prefix):
            return reason
    return OWNED_WITH_KVCACHED.get(name) if kvcached else None


def risky_reason(name: str) -> str | None:
    """What a flag does that not every operator may; None when it is harmless."""
    return RISKY.get(name)
