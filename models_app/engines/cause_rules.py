"""What vLLM, kvcached, torch and the Hub write when a start fails, and what that means in plain words.

Texts were taken from real logs (0.24.0 on a GPU; 0.30.0 and 0.32.0 on a CPU) and from the sources of vLLM 0.30.0 and
kvcached 0.1.6. Sentences use the named groups of their pattern.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """``permanent``: the same start fails again until somebody changes something, so retrying is of no use."""

    code: str
    pattern: re.Pattern[str]
    sentence: str
    advice: str
    permanent: bool = True


def _rule(code: str, pattern: str, sentence: str, advice: str, *, permanent: bool = True) -> Rule:
    return Rule(code, re.compile(pattern), sentence, advice, permanent)


_ROOM = (
    "Lower KV limits or trim idle instances on this GPU, stop another model, or spread this one over more GPUs "
    "(tensor parallel size) or quantize it."
)
_SHORTER = "Set a shorter context length"
_ASK_HUB = "Accept the model's terms on huggingface.co and give the worker a HF_TOKEN of that account."
_NETWORK = "Check the worker's network and proxy settings, or use a model that is in a local folder."

#: Specific causes. The first line of the log that any of them matches is the cause.
RULES: tuple[Rule, ...] = (
    # --- memory of the GPU
    _rule(
        "gpu_out_of_memory",
        r"(?:CUDA|HIP) out of memory\. Tried to allocate (?P<asked>[\d.]+ [KMGT]iB)\. GPU (?P<gpu>\d+) has a "
        r"total capacity "
        r"of (?P<total>[\d.]+ [KMGT]iB) of which (?P<free>[\d.]+ (?:[KMGT]i)?B|[\d.]+ bytes) is free",
        "GPU {gpu} is full: {asked} more were needed, {free} of {total} were free.",
        _ROOM,
        permanent=False,
    ),
    _rule(
        "gpu_out_of_memory",
        r"Failed to load model - not enough GPU memory|torch(?:\.cuda)?\.OutOfMemoryError|(?:CUDA|HIP) out of memory",
        "The GPU's memory was not enough.",
        _ROOM,
        permanent=False,
    ),
    _rule(
        "gpu_memory_taken",
        r"Free memory on device \S+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired "
        r"GPU memory "
        r"utilization \((?P<share>[\d.]+), (?P<wanted>[\d.]+) GiB\)",
        "Only {free} GiB of the GPU's {total} GiB were free; without kvcached vLLM reserves {wanted} GiB at once.",
        "Switch kvcached on for this model, lower --gpu-memory-utilization, or free the GPU first.",
        permanent=False,
    ),
    _rule(
        "kv_memory_too_small",
        r"max seq len \((?P<length>\d+)\), \(?(?P<need>[\d.]+) GiB KV cache is needed, which is larger than the "
        r"available KV "
        r"cache memory \((?P<have>[\d.]+) GiB\)(?:.*?estimated maximum model length is (?P<fits>\d+))?",
        "One request of {length} tokens needs {need} GiB of KV memory, but only {have} GiB are available.",
        _SHORTER + "{fits: of at most {} tokens}, or make room on the GPU.",
    ),
    _rule(
        "kv_memory_too_small",
        r"No available memory for the cache blocks|not enough GPU memory available to serve even a single token",
        "After the weights no memory was left for the KV cache.",
        _ROOM,
        permanent=False,
    ),
    _rule(
        "kv_memory_too_small",
        r"Available memory on node (?P<node>\d+) \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on kv cache "
        r"allocation is less than "
        r"requested memory for kv \((?P<wanted>[\d.]+) GiB\)",
        "{wanted} GiB of KV memory were asked for, but {free} of {total} GiB are available on node {node}.",
        "Ask for less (VLLM_CPU_KVCACHE_SPACE), or free memory on this machine.",
    ),
    # --- the model
    _rule(
        "context_too_long",
        r"User-specified max_model_len \((?P<asked>\d+)\) is greater than the derived max_model_len "
        r"\((?:\w+=)?(?P<limit>\d+)",
        "The context length of {asked} tokens is more than the {limit} that the model was made for.",
        "Set at most {limit}, or leave it empty.",
    ),
    _rule(
        "unsupported_architecture",
        r"Model architectures \[(?P<name>.*?)\] (?:are not supported|failed to be inspected)",
        "This vLLM cannot serve the architecture {name}.",
        "Use another model, or a vLLM that supports it.",
    ),
    _rule(
        "unsupported_architecture",
        r"model type [`'](?P<name>[^`']+)[`'] but Transformers does not recognize this architecture",
        "The installed Transformers does not know models of type {name}.",
        "Use another model, or newer vLLM and Transformers.",
    ),
    _rule(
        "remote_code_needed",
        r"trust_remote_code=True|requires you to execute the (?:configuration|custom|modeling)|contains custom "
        r"code which must be",
        "The model brings its own code, which was not allowed to run.",
        "If you trust its author, let somebody with the permission add --trust-remote-code.",
    ),
    _rule(
        "model_not_found",
        r"Repo id must (?:be in the form|use alphanumeric).*?: '(?P<name>[^']+)'",
        "There is no folder {name} on this host, and it is no Hugging Face id either.",
        "Check the path; it must exist on the host that runs the instance.",
    ),
    _rule(
        "no_config",
        r"Invalid repository ID or local directory specified: '(?P<name>[^']+)'",
        "{name} holds no config.json that vLLM could read.",
        "Choose the folder that holds config.json, or give a full Hugging Face id.",
    ),
    _rule(
        "no_weights",
        r"Cannot find any model weights with [`'](?P<name>[^`']+)[`']",
        "{name} holds no model weights.",
        "Complete the download or the copy: .safetensors files are missing. Or use load format dummy to try without.",
    ),
    _rule(
        "damaged_weights",
        r"SafetensorError|Error while deserializing header|PytorchStreamReader failed",
        "A weights file is damaged or only half downloaded.",
        "Remove it and download or copy it again.",
    ),
    _rule(
        "gated_model",
        r"Access to model (?P<name>\S+) is restricted|Cannot access gated repo for url "
        r"\S*?huggingface\.co/(?:api/models/)?"
        r"(?P<repo>[^/\s]+/[^/\s]+)|GatedRepoError",
        "The model{name: {}}{repo: {}} is gated: Hugging Face wants a token of somebody who accepted its terms.",
        _ASK_HUB,
    ),
    _rule(
        "hub_refused",
        r"(?P<status>40[13]) Client Error",
        "Hugging Face refused the download ({status}): the token is missing, wrong or not allowed to read this model.",
        _ASK_HUB,
    ),
    _rule(
        "model_not_found",
        r"RepositoryNotFoundError|Repository Not Found for url: "
        r"\S*?huggingface\.co/(?:api/models/)?(?P<repo>[^/\s]+/[^/\s]+)"
        r"|RevisionNotFoundError|is not a valid model identifier",
        "Hugging Face does not know the model{repo: {}} (or its revision), or hides it from this token.",
        "Check the id and the revision. For private models give the worker a HF_TOKEN.",
    ),
    _rule(
        "no_network",
        r"LocalEntryNotFoundError|couldn't connect to '(?P<url>[^']+)'|OfflineModeIsEnabled|outgoing traffic has "
        r"been disabled"
        r"|Temporary failure in name resolution|Name or service not known|Max retries exceeded with url|Network "
        r"is unreachable",
        "The model is not on this host, and{url: {}} Hugging Face could not be reached to fetch it.",
        _NETWORK,
        permanent=False,
    ),
    # --- the machine
    _rule(
        "shm_too_small",
        r"No space left on device.*(?:/dev/shm|psm_|shared memory)|(?:unable to|could not) (?:open|write|allocate"
        r"|resize) "
        r"shared memory|Error while creating shared memory segment|died unexpectedly \(exit code: -7\)|Bus error"
        r"|insufficient shared memory",
        "/dev/shm is full or too small for the engine's processes.",  # noqa: S108
        "Give the container more shared memory (--shm-size, or shm_size in compose), or remove what fills /dev/shm.",
    ),
    _rule(
        "disk_full",
        r"No space left on device|Not enough free disk space to download",
        "A disk of this host is full.",
        "Free space where models and caches are kept (HF_HOME, ~/.cache/vllm, /tmp).",
    ),
    _rule(
        "too_many_files",
        r"OSError: \[Errno 24\] Too many open files",
        "The engine ran out of open files.",
        "Raise the limit of open files (ulimit -n) for the worker.",
    ),
    _rule(
        "permission_denied",
        r"PermissionError: \[Errno 13\] Permission denied: '(?P<path>[^']+)'",
        "The engine may not read or write {path}.",
        "Give the worker's user the right to it.",
    ),
    _rule(
        "port_in_use",
        r"\[Errno 98\].*[Aa]ddress already in use",
        "The port was taken by another program between choice and use.",
        "Start it again: another port will be chosen.",
        permanent=False,
    ),
    _rule(
        "gpu_count",
        r"World size \((?P<wanted>\d+)\) is larger than the number of available GPUs \((?P<have>\d+)\)",
        "{wanted} GPUs were asked for, but the engine sees only {have}.",
        "Lower the tensor parallel size, or check the driver and the container's GPUs.",
    ),
    _rule(
        "gpu_unusable",
        r"(?P<text>No CUDA GPUs are available|CUDA driver version is insufficient[^.]*|NVIDIA driver on your "
        r"system is too old"
        r"|no kernel image is available for execution on the device|CUDA unknown error|Failed to infer device type"
        r"|NVML: Driver/library version mismatch|Can't initialize NVML)",
        "The engine cannot use a GPU: {text}.",
        "Check nvidia-smi on the host; driver, container toolkit and vLLM's CUDA version must fit one another.",
    ),
    _rule(
        "gpu_fault",
        r"(?P<text>uncorrectable ECC error|an illegal memory access was encountered|unspecified launch failure"
        r"|GPU is lost"
        r"|device-side assert triggered|misaligned address|CUBLAS_STATUS_\w+|CUDNN_STATUS_\w+)",
        "The GPU reported a fault: {text}.",
        "Look for XID messages in the kernel log. If it comes back, cordon the GPU; else try other engine options.",
        permanent=False,
    ),
    _rule(
        "gpu_communication",
        r"NCCL error|nccl(?:UnhandledCudaError|SystemError|InternalError|RemoteError)",
        "The GPUs of this instance could not talk to one another (NCCL).",
        "Try other GPUs of the host, or NCCL_P2P_DISABLE=1 by SARDEENZ_ENGINE_ENV; see the log for NCCL's own words.",
        permanent=False,
    ),
    # --- options
    _rule(
        "unknown_flag",
        r"error: unrecognized arguments: (?P<flag>.+)",
        "This vLLM does not know: {flag}",
        "Correct the extra arguments.",
    ),
    _rule(
        "bad_value",
        r"error: argument (?P<flag>\S+): (?P<text>.+)",
        "vLLM does not accept the value of {flag}: {text}.",
        "Correct the extra arguments.",
    ),
    _rule(
        "bad_value",
        r"vllm(?: serve)?: error: (?P<text>.+)",
        "vLLM does not accept its arguments: {text}.",
        "Correct the extra arguments.",
    ),
    _rule(
        "heads_not_divisible",
        r"Total number of attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size "
        r"\((?P<size>\d+)\)",
        "The model's {heads} attention heads cannot be split evenly over {size} GPUs.",
        "Choose a tensor parallel size that divides {heads}.",
    ),
    _rule(
        "dtype_unsupported",
        r"Bfloat16 is only supported on GPUs with compute capability of at least (?P<need>[\d.]+)\. Your "
        r"(?P<gpu>.+?) GPU "
        r"(?:has compute capability (?P<have>[\d.]+)|does not)",
        "The {gpu} cannot compute in bfloat16{have: (compute capability {}, needed are 8.0)}.",
        "Set dtype to float16.",
    ),
    _rule(
        "dtype_unsupported",
        r"(?P<dtype>torch\.\w+) is not supported for quantization method (?P<method>\w+)",
        "Quantization {method} does not work with {dtype}.",
        "Set another dtype (float16 is the usual one).",
    ),
    _rule(
        "quantization_mismatch",
        r"Quantization method specified in the model config \((?P<model>[\w-]+)\) does not match the quantization "
        r"method "
        r"specified in the `quantization` argument \((?P<asked>[\w-]+)\)",
        "The model is quantized with {model}, but {asked} was asked for.",
        "Leave quantization empty: vLLM reads it from the model.",
    ),
    _rule(
        "quantization_unsupported",
        r"The quantization method (?P<method>\S+) is not supported for the current GPU\. Minimum capability: "
        r"(?P<need>\d+)\. "
        r"Current capability: (?P<have>\S+?)\.?$",
        "This GPU is too old for {method} quantization (capability {have}, needed is {need}).",
        "Choose another GPU, or a model that is quantized otherwise.",
    ),
    _rule(
        "quantization_unsupported",
        r"Unknown quantization method: (?P<method>\S+?)\.? |Cannot find the config file for (?P<other>\w+)",
        "The model is not quantized with {method:{}}{other:{}}, or this vLLM does not know that method.",
        "Leave quantization empty: vLLM reads it from the model.",
    ),
    _rule(
        "sleep_unsupported",
        r"Sleep mode is not supported on current platform",
        "vLLM has no sleep mode on this kind of machine.",
        "Switch sleep mode off for this model.",
    ),
    _rule(
        "addon_missing",
        r"No module named '(?P<name>models_app[\w.]*)'|Invalid middleware|cannot import name 'KVCacheMiddleware'",
        "vLLM's Python could not import Sardeenz's add-on{name: ({})}, so the engine refused to serve.",
        "Check that vLLM runs as a user who may read Sardeenz's folder.",
    ),
    _rule(
        "module_missing",
        r"ModuleNotFoundError: No module named '(?P<name>[\w.]+)'",
        "A Python package that the engine needs is not installed: {name}.",
        "Install it into vLLM's environment, or take the option away that asks for it.",
    ),
    # --- kvcached
    _rule(
        "kvcached_no_adapter",
        r"kvcached has no runner adapter for vLLM (?P<vllm>[\w.]+)",
        "The installed kvcached cannot run vLLM {vllm}.",
        "Use vLLM 0.30.0 or older with kvcached 0.1.6, or switch kvcached off for this model.",
    ),
    _rule(
        "kvcached_needs_v2_runner",
        r"kvcached on vLLM (?P<vllm>[\w.]+) requires Model Runner V2",
        "kvcached on vLLM {vllm} needs model runner V2, which this model or machine cannot use.",
        "Use a machine with a GPU and Triton, use vLLM 0.24.0, or switch kvcached off for this model.",
    ),
    _rule(
        "kvcached_needs_v1_runner",
        r"kvcached does not support the vLLM (?P<vllm>[\w.]+) Model Runner V2 yet",
        "kvcached on vLLM {vllm} needs VLLM_USE_V2_MODEL_RUNNER=0, which was not set.",
        "Sardeenz sets it when it knows vLLM's version: check what the host's page says of versions.",
    ),
    _rule(
        "kvcached_too_old",
        r"'list' object has no attribute 'kv_cache_groups'",
        "The installed kvcached is too old for this vLLM.",
        "Install kvcached 0.1.6 beside vLLM 0.19.1 to 0.30.0; the host's page shows both versions.",
    ),
    _rule(
        "kvcached_page_size",
        r"(?P<text>(?:.*[Pp]age.*)?Re-launch with (?P<what>.*KVCACHED_PAGE_SIZE_MB.*?))\.?$",
        "One KV block of this model does not fit kvcached's pages.",
        "Start it with {what} (KVCACHED_PAGE_SIZE_MB is set in the worker's environment).",
    ),
    _rule(
        "kvcached_refused",
        r"KVCachedConfigError: (?P<text>.+)",
        "kvcached refuses this configuration: {text}.",
        "Change the option it names, or switch kvcached off for this model.",
    ),
    # --- processes
    _rule(
        "killed",
        r"died unexpectedly \(exit code: -9\)|Worker .*exit code: -9|signal 9: SIGKILL",
        "A process of the engine was killed from outside (SIGKILL), most likely by the kernel for lack of memory.",
        "Look for 'Out of memory' in the kernel log; give the host or container more memory.",
        permanent=False,
    ),
    _rule(
        "worker_died",
        r"Worker proc (?P<name>\S+) died unexpectedly \(exit code: None\)",
        "A worker process of the engine ({name}) disappeared, most likely killed by the kernel for lack of memory.",
        "Look for 'Out of memory' in the kernel log; give the host or container more memory.",
        permanent=False,
    ),
    _rule(
        "illegal_instruction",
        r"died unexpectedly \(exit code: -4\)|[Ii]llegal instruction",
        "The processor of this host lacks an instruction that the engine uses.",
        "Set another dtype (float32 on a CPU), or use another host.",
    ),
    _rule(
        "crashed",
        r"died unexpectedly \(exit code: (?P<code>-\d+)\)|Segmentation fault|Fatal Python error",
        "A process of the engine crashed{code: (exit code {})}.",
        "See the log. If it comes back, try other engine options or versions.",
        permanent=False,
    ),
)

#: Said by the API server when the real cause is another process's: used only if nothing better is found.
CONSEQUENCES: tuple[Rule, ...] = (
    _rule(
        "engine_core_died",
        r"EngineDeadError|EngineCore encountered (?:an issue|a fatal error)|engine core exited unexpectedly"
        r"|Executor failed",
        "The engine core died, and the server ended itself.",
        "See the log for what came before.",
        permanent=False,
    ),
    _rule(
        "engine_core_failed",
        r"Engine core initialization failed|EngineCore failed to start",
        "The engine core did not come up.",
        "See the log for what came before.",
        permanent=False,
    ),
)
