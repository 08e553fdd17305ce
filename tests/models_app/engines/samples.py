# ruff: noqa: E501 - lines of logs are as long as they are
"""Logs of real starts, shortened and with neutral paths: 0.24.0 on a GPU; 0.30.0 and 0.32.0 on a CPU.

``trace`` puts the frame of a real failure around the lines that matter: harmless lines before, consequences after.
"""

from __future__ import annotations

HARMLESS = """\
INFO 11-30 15:39:34 [importing.py:98] Triton not installed or not compatible; certain GPU functions will not be available.
(APIServer pid=26246) INFO 11-30 15:39:35 [api_utils.py:286] non-default args: {'model': '/models/m', 'port': 12350}
(APIServer pid=26246) WARNING 11-30 15:39:35 [system_utils.py:255] Found ulimit of 20000 and failed to automatically \
increase with error current limit exceeds maximum limit. This can cause fd limit errors like `OSError: [Errno 24] Too many \
open files`. Consider increasing with ulimit -n
(APIServer pid=26246) INFO 11-30 15:39:35 [model.py:692] Resolved architecture: LlamaForCausalLM
(APIServer pid=26246) INFO 11-30 15:39:35 [model.py:2030] Using max model len 131072
(APIServer pid=26246) INFO 11-30 15:39:35 [model.py:99] The model's max_model_len (131072) is derived from its config
"""
CORE_FAILED = """\
(APIServer pid=26246)   File "/venv/site-packages/vllm/v1/engine/utils.py", line 1320, in wait_for_engine_startup
(APIServer pid=26246)     raise RuntimeError(
(APIServer pid=26246) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): \
{'EngineCore': 1}
/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked \
shared_memory objects to clean up at shutdown
  warnings.warn('resource_tracker: There appear to be %d '
"""


def core(*lines: str, who: str = "EngineCore", pid: int = 17853) -> str:
    """An engine process that fails to start with these lines; the API server's empty words follow."""
    head = f"({who} pid={pid}) ERROR 11-30 15:39:46 [core.py:1366] "
    text = [head + "EngineCore failed to start.", head + "Traceback (most recent call last):"]
    text += [head + '  File "/venv/site-packages/vllm/v1/engine/core.py", line 1328, in run_engine_core']
    text += [head + "    raise ValueError(", *(head + line for line in lines)]
    return HARMLESS + "\n".join(text) + "\n" + CORE_FAILED


def server(*lines: str) -> str:
    """The API server fails before any engine process: a bare traceback."""
    return HARMLESS + "Traceback (most recent call last):\n" + '  File "/venv/bin/vllm", line 10, in <module>\n' \
        + "    sys.exit(main())\n             ^^^^^^\n" + "\n".join(lines) + "\n"  # fmt: skip


def validation(text: str) -> str:
    return server(
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        f"  Value error, {text} [type=value_error, input_value=ArgsKwargs((), {{'model': ...}}), input_type=ArgsKwargs]",
        "    For further information visit https://errors.pydantic.dev/2.14/v/value_error",
    )


#: name → (log, code, words that the sentence or the advice must hold)
FAILURES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "gpu full at load": (
        core(
            "Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory for weights, "
            "increasing --tensor-parallel-size, or using --quantization. (original error: CUDA out of memory. Tried to "
            "allocate 32.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 6.38 MiB is free. Process 821 has "
            "5.90 GiB memory in use. Process 828 has 122.12 GiB memory in use.)",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 MiB. GPU 0 has a total capacity of "
            "139.80 GiB of which 6.38 MiB is free.",
        ),
        "gpu_out_of_memory",
        ("GPU 0 is full", "32.00 MiB", "6.38 MiB of 139.80 GiB"),
    ),
    "gpu taken by others, without kvcached": (
        core("ValueError: Free memory on device cuda:0 (3.10/79.11 GiB) on startup is less than desired GPU memory "
             "utilization (0.92, 72.79 GiB). Decrease GPU memory utilization or reduce GPU memory used by others."),
        "gpu_memory_taken",
        ("3.10 GiB", "79.11 GiB", "72.79 GiB"),
    ),
    "too little KV memory": (
        core("ValueError: To serve at least one request with the model's max seq len (131072), (16.0 GiB KV cache is needed, "
             "which is larger than the available KV cache memory (4.21 GiB). Based on the available memory, the estimated "
             "maximum model length is 34464. Try increasing `gpu_memory_utilization`"),
        "kv_memory_too_small",
        ("131072 tokens", "16.0 GiB", "4.21 GiB", "34464"),
    ),
    "no KV memory": (
        core("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
        "kv_memory_too_small",
        ("no memory was left",),
    ),
    "KV space over the machine's memory": (
        core("ValueError: Available memory on node 0 (13.9/15.71 GiB) on kv cache allocation is less than requested memory for "
             "kv (64.0 GiB). Decrease --kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE", who="Worker"),
        "kv_memory_too_small",
        ("64.0 GiB", "13.9 of 15.71 GiB"),
    ),
    "context too long": (
        validation("User-specified max_model_len (4096) is greater than the derived max_model_len (max_position_embeddings=512.0"
                   " or model_max_length=None in model's config.json). To allow overriding this maximum, set the env var"),
        "context_too_long",
        ("4096", "512"),
    ),
    "unsupported architecture": (
        validation("Model architectures ['MadeUpForCausalLM'] are not supported for now. Supported architectures: dict_keys(["),
        "unsupported_architecture",
        ("MadeUpForCausalLM",),
    ),
    "own code needed": (
        server("RuntimeError: Failed to load the model config. If the model is a custom model not yet available in the "
               "HuggingFace transformers library, consider setting `trust_remote_code=True` in LLM"),
        "remote_code_needed",
        ("--trust-remote-code",),
    ),
    "wrong path": (
        server("huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': "
               "'/models/does-not-exist'. Use `repo_type` argument if needed."),
        "model_not_found",
        ("/models/does-not-exist",),
    ),
    "no config": (
        server("pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
               "  Value error, Invalid repository ID or local directory specified: '/models/empty'.",
               "Please verify the following requirements:", "1. Provide a valid Hugging Face repository ID."),
        "no_config",
        ("/models/empty", "config.json"),
    ),
    "no weights": (
        core("RuntimeError: Cannot find any model weights with `/models/tiny`", who="Worker", pid=28239),
        "no_weights",
        ("/models/tiny",),
    ),
    "damaged weights": (
        core("safetensors_rust.SafetensorError: Error while deserializing header: InvalidHeaderDeserialization"),
        "damaged_weights",
        ("damaged",),
    ),
    "gated": (
        server("huggingface_hub.errors.GatedRepoError: 401 Client Error. (Request ID: Root=1)", "",
               "Cannot access gated repo for url https://huggingface.co/meta-llama/Llama-3.1-8B/resolve/main/config.json.",
               "Access to model meta-llama/Llama-3.1-8B is restricted. You must have access to it."),
        "gated_model",
        ("gated", "HF_TOKEN"),
    ),
    "token refused": (
        server("httpx.HTTPStatusError: 403 Client Error: Forbidden for url: https://huggingface.co/api/models/x/y"),
        "hub_refused",
        ("403", "token"),
    ),
    "unknown repository": (
        server("huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. (Request ID: Root=1)",
               "Repository Not Found for url: https://huggingface.co/api/models/no/such"),
        "model_not_found",
        ("Hugging Face does not know",),
    ),
    "no network": (
        server("OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the"),
        "no_network",
        ("https://huggingface.co",),
    ),
    "disk full": (
        server("OSError: [Errno 28] No space left on device: '/root/.cache/huggingface/hub/blobs/x.incomplete'"),
        "disk_full",
        ("full",),
    ),
    "/dev/shm too small": (
        core("OSError: [Errno 28] No space left on device: '/psm_1a2b3c4d'"),
        "shm_too_small",
        ("/dev/shm",),
    ),
    "bus error in a worker": (
        HARMLESS + "(EngineCore pid=7) ERROR 11-30 15:45:34 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly "
        "(exit code: -7), shutting down executor.\n" + CORE_FAILED,
        "shm_too_small",
        ("--shm-size",),
    ),
    "worker killed": (
        HARMLESS + "(EngineCore pid=7) ERROR 11-30 15:45:34 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly "
        "(exit code: -9), shutting down executor.\n" + CORE_FAILED,
        "killed",
        ("lack of memory",),
    ),
    "illegal instruction in a worker": (
        HARMLESS + "(EngineCore pid=7) ERROR 11-30 15:45:34 [multiproc_executor.py:315] Worker proc VllmWorker-0 died unexpectedly "
        "(exit code: -4), shutting down executor.\n" + CORE_FAILED,
        "illegal_instruction",
        ("processor",),
    ),
    "port in use": (server("    sock.bind(addr)", "OSError: [Errno 98] Address already in use"), "port_in_use", ("port",)),
    "too few GPUs": (
        validation("World size (4) is larger than the number of available GPUs (2) in this node. If this is intentional"),
        "gpu_count",
        ("4 GPUs", "only 2"),
    ),
    "no driver": (core("RuntimeError: No CUDA GPUs are available"), "gpu_unusable", ("nvidia-smi",)),
    "ECC": (core("torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"), "gpu_fault", ("ECC",)),
    "NCCL": (core("torch.distributed.DistBackendError: NCCL error in: ncclUtils.hpp:88, unhandled cuda error"),
             "gpu_communication", ("NCCL",)),
    "unknown flag": (
        "usage: vllm [-h] [-v]\n            {chat,serve}\n            ...\nvllm: error: unrecognized arguments: --no-such-flag 3\n",
        "unknown_flag",
        ("--no-such-flag 3",),
    ),
    "bad value": (
        "usage: vllm serve [model_tag] [options]\nvllm serve: error: argument --max-num-seqs: invalid int value: 'banana'\n",
        "bad_value",
        ("--max-num-seqs", "banana"),
    ),
    "heads": (
        validation("Total number of attention heads (14) must be divisible by tensor parallel size (4)."),
        "heads_not_divisible",
        ("14", "4 GPUs"),
    ),
    "bfloat16 on an old GPU": (
        core("ValueError: Bfloat16 is only supported on GPUs with compute capability of at least 8.0. Your Tesla T4 GPU has "
             "compute capability 7.5. You can use float16 instead by explicitly setting the `dtype` flag"),
        "dtype_unsupported",
        ("Tesla T4", "7.5", "float16"),
    ),
    "quantization differs": (
        validation("Quantization method specified in the model config (awq) does not match the quantization method specified in "
                   "the `quantization` argument (gptq)."),
        "quantization_mismatch",
        ("awq", "gptq"),
    ),
    "quantization too new": (
        core("ValueError: The quantization method fp8 is not supported for the current GPU. Minimum capability: 89. "
             "Current capability: 75."),
        "quantization_unsupported",
        ("fp8", "75", "89"),
    ),
    "sleep mode": (validation("Sleep mode is not supported on current platform."), "sleep_unsupported", ("sleep mode",)),
    "add-on": (
        server("ModuleNotFoundError: No module named 'models_app.kvcache_addon'"), "addon_missing", ("add-on",)
    ),
    "package": (server("ModuleNotFoundError: No module named 'flashinfer'"), "module_missing", ("flashinfer",)),
    "kvcached without adapter": (
        core("kvcached.utils.KVCachedConfigError: kvcached has no runner adapter for vLLM 0.32.0; use a supported engine version "
             "or disable kvcached"),
        "kvcached_no_adapter",
        ("0.32.0",),
    ),
    "kvcached wants runner V2": (
        core("kvcached.utils.KVCachedConfigError: kvcached on vLLM 0.30.0 requires Model Runner V2, but this configuration falls "
             "back to the V1 runner; use a supported configuration or disable kvcached"),
        "kvcached_needs_v2_runner",
        ("0.30.0",),
    ),
    "kvcached wants runner V1": (
        core("kvcached.utils.KVCachedConfigError: kvcached does not support the vLLM 0.24.0 Model Runner V2 yet; set "
             "VLLM_USE_V2_MODEL_RUNNER=0 to use the V1 model runner, or disable kvcached"),
        "kvcached_needs_v1_runner",
        ("0.24.0", "VLLM_USE_V2_MODEL_RUNNER=0"),
    ),
    "kvcached too old": (
        core("AttributeError: 'list' object has no attribute 'kv_cache_groups'"), "kvcached_too_old", ("0.1.6",)
    ),
    "kvcached page size": (
        core("kvcached.utils.KVCachedConfigError: A KV block of 2.25 MiB does not fit the 2 MiB page. Re-launch with "
             "KVCACHED_PAGE_SIZE_MB=4 or --block-size 8."),
        "kvcached_page_size",
        ("KVCACHED_PAGE_SIZE_MB=4 or --block-size 8",),
    ),
    "kvcached, anything else": (
        core("kvcached.utils.KVCachedConfigError: kvcached does not support HiSparse; remove the HiSparse config"),
        "kvcached_refused",
        ("HiSparse",),
    ),
}  # fmt: skip

GPU_START = """\
(APIServer pid=11) INFO 11-30 15:53:51 [api_utils.py:286] non-default args: {'model': '/models/m'}
(APIServer pid=11) INFO 11-30 15:53:51 [model.py:2030] Using max model len 8192
(EngineCore pid=12) INFO 11-30 15:53:56 [core.py:123] Initializing a V1 LLM engine (v0.24.0) with config: model='/models/m'
INFO 11-30 15:53:57 [patch_base.py:178] Successfully patched vllm: elastic_block_pool, engine_core, mp_client
(EngineCore pid=12) INFO 11-30 15:54:03 [gpu_model_runner.py:5318] Starting to load model /models/m...
(EngineCore pid=12) Fetching 4 files:  50%|#####     | 2/4 [00:05<00:05]
(EngineCore pid=12) model-00003-of-00004.safetensors:  99%|#########9| 4.9G/4.95G [00:05<00:00]
(EngineCore pid=12) INFO 11-30 15:54:04 [weight_utils.py:559] Time spent downloading weights for q/w: 12.500000 seconds
(EngineCore pid=12) Loading safetensors checkpoint shards:   0% Completed | 0/4 [00:00<?, ?it/s]
(EngineCore pid=12) Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:01<00:01,  1.60it/s]
(EngineCore pid=12) INFO 11-30 15:54:06 [default_loader.py:431] Loading weights took 2.50 seconds
(EngineCore pid=12) INFO 11-30 15:54:06 [gpu_model_runner.py:5417] Model loading took 15.27 GiB memory and 3.250000 seconds
(EngineCore pid=12) INFO 11-30 15:54:16 [backends.py:1156] Dynamo bytecode transform time: 5.10 s
(EngineCore pid=12) INFO 11-30 15:54:30 [monitor.py:76] torch.compile took 16.60 s in total
(EngineCore pid=12) INFO 11-30 15:54:31 [patches.py:3013] Using kvcached process-local KV capacity: budget=138101089895 \
bytes, weights=16396369920 bytes, torch_peak=1048576 bytes, cudagraph=0 bytes (ignored), available=121000000000 bytes; x
(EngineCore pid=12) INFO 11-30 15:54:31 [kv_cache_utils.py:2395] GPU KV cache size: 820,576 tokens
Init C++ PageAllocator: num_layers=36, mem_size_per_layer=1602MB, total_mem_size=115344MB, page_size=2MB, world_size=1, \
pp_rank=0, async_sched=1, contiguous_layout=1, enable_prealloc=1, num_kv_buffers=2, group_id=0, min_reserved_pages=5
(EngineCore pid=12) Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  12%|█         | 4/35
(EngineCore pid=12) INFO 11-30 15:54:40 [gpu_model_runner.py:6930] Graph capturing finished in 3 secs, took 0.53 GiB
(EngineCore pid=12) INFO 11-30 15:54:41 [core.py:379] init engine (profile, create kv cache, warmup model) took 35.10 s
(APIServer pid=11) INFO 11-30 15:54:42 [entry.py:139] Starting vLLM server on http://127.0.0.1:12346
(APIServer pid=11) INFO:     Application startup complete.
"""

CPU_EAGER_START = """\
(APIServer pid=6996) WARNING 11-30 15:53:51 [vllm.py:1547] Enforce eager set, disabling torch.compile and CUDAGraphs.
(EngineCore_DP0 pid=7101) INFO 11-30 15:53:56 [core.py:123] Initializing a V1 LLM engine (v0.30.0) with config: x
(Worker_TP0 pid=7112) INFO 11-30 15:54:03 [cpu_model_runner.py:130] Starting to load model /models/tiny...
(EngineCore_DP0 pid=7101) INFO 11-30 15:54:03 [kv_cache_utils.py:2395] CPU KV cache size: 2,097,152 tokens, Maximum \
concurrency for 512 tokens per request: 4096.00x
(EngineCore_DP0 pid=7101) INFO 11-30 15:54:04 [core.py:379] init engine (profile, create kv cache, warmup model) took 1.07 s
INFO:     Application startup complete.
"""

ENGINE_CORE_KILLED = CPU_EAGER_START + """\
INFO:     127.0.0.1:57782 - "GET /health HTTP/1.1" 200 OK
(APIServer pid=32188) ERROR 11-30 15:37:48 [validation.py:151] fastapi.exceptions.RequestValidationError: 1 validation error:
(Worker pid=606) INFO 11-30 15:44:34 [multiproc_executor.py:843] Parent process exited, terminating worker queues
(APIServer pid=32188) WARNING 11-30 15:44:34 [core_client.py:817] [shutdown] MPClient: engine core exited unexpectedly
(APIServer pid=32188) ERROR 11-30 15:44:34 [async_llm.py:906] AsyncLLM output_handler failed.
(APIServer pid=32188) ERROR 11-30 15:44:34 [async_llm.py:906] Traceback (most recent call last):
(APIServer pid=32188) ERROR 11-30 15:44:34 [async_llm.py:906]     raise self._format_exception(outputs) from None
(APIServer pid=32188) ERROR 11-30 15:44:34 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore \
encountered an issue. See stack trace (above) for the root cause.
INFO:     127.0.0.1:50674 - "GET /health HTTP/1.1" 503 Service Unavailable
INFO:     Application shutdown complete.
"""  # fmt: skip

ENGINE_CORE_OOM_WHILE_SERVING = CPU_EAGER_START + """\
(EngineCore pid=12) ERROR 11-30 16:00:00 [core.py:1368] EngineCore encountered a fatal error.
(EngineCore pid=12) ERROR 11-30 16:00:00 [core.py:1368] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-30 16:00:00 [core.py:1368] IndexError: list index out of range
(APIServer pid=11) ERROR 11-30 16:00:00 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered
"""  # fmt: skip
