"""What the simulated engine knows of its model: shape, weights, context length, and the KV geometry that follows.

Where the facts come from, first that answers: ``SARDEENZ_SIM_FACTS`` (JSON, written by the launcher), ``config.json``
in the folder when MODEL is one, and otherwise a typical shape of the size that the name tells (``Qwen3-8B``).

The geometry is kvcached's: memory moves in *bundles* of one page per layer and KV buffer; K and V are two buffers up to
vLLM 0.25 and one packed buffer from 0.26 on, which halves the bundle and the tokens in it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MIB = 1024**2
GIB = 1024**3
PAGE_BYTES = 2 * MIB
BLOCK_TOKENS = 16
PACKED_KV_SINCE = (0, 26)
DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "auto": 2, "fp8": 1, "int8": 1}

#: Typical shapes by billions of parameters: layers, attention heads, KV heads, head dimension, hidden size.
_SHAPES = (
    (0.3, (24, 14, 2, 64, 896)),
    (0.55, (24, 14, 2, 64, 896)),
    (0.9, (28, 16, 8, 128, 1024)),
    (1.4, (16, 32, 8, 64, 2048)),
    (2.5, (28, 16, 8, 128, 2048)),
    (5.0, (36, 32, 8, 128, 2560)),
    (7.8, (28, 28, 4, 128, 3584)),
    (8.8, (36, 32, 8, 128, 4096)),
    (20.0, (40, 40, 8, 128, 5120)),
    (50.0, (64, 64, 8, 128, 5120)),
    (100.0, (80, 64, 8, 128, 8192)),
    (math.inf, (94, 64, 4, 128, 4096)),
)
_SIZE_IN_NAME = re.compile(r"(?:^|[^a-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)\s*([bm])(?![a-z0-9])", re.IGNORECASE)
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


class ModelError(Exception):
    """The model cannot be served; the text is vLLM's own, ``kind`` says in which of its frames it appears."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class SimFacts:
    """Architecture facts of the whole model, not per GPU. ``kv_cell_bytes``: KV bytes of one token in one layer."""

    architecture: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    weights_bytes: int
    dtype_bytes: int = 2
    kv_cell_bytes: int | None = None
    mla: bool = False

    @property
    def parameters(self) -> float:
        return self.weights_bytes / self.dtype_bytes

    def cell_bytes(self, tensor_parallel_size: int, kv_dtype_bytes: int) -> int:
        """KV bytes of one token in one layer on one GPU, K and V together. MLA's latent is not split over GPUs."""
        if self.kv_cell_bytes is not None:
            scaled = self.kv_cell_bytes * kv_dtype_bytes // self.dtype_bytes
            return scaled if self.mla else max(1, scaled // min(tensor_parallel_size, max(1, self.num_kv_heads)))
        heads = max(1, self.num_kv_heads // tensor_parallel_size)
        return 2 * heads * self.head_dim * kv_dtype_bytes


@dataclass(frozen=True)
class Geometry:
    """How the KV pool is cut, per GPU. ``block_bytes`` is of one layer and one buffer, as kvcached counts it."""

    num_layers: int
    num_kv_buffers: int
    block_bytes: int
    num_blocks: int
    block_tokens: int = BLOCK_TOKENS
    page_bytes: int = PAGE_BYTES

    @property
    def bundle_bytes(self) -> int:
        return self.page_bytes * self.num_layers * self.num_kv_buffers

    @property
    def blocks_per_page(self) -> int:
        return self.page_bytes // self.block_bytes

    @property
    def whole_block_bytes(self) -> int:
        """One block over all layers and buffers: what vLLM calls the page size of the model."""
        return self.block_bytes * self.num_layers * self.num_kv_buffers

    @property
    def capacity_bytes(self) -> int:
        """The segment's first number at start. Whole blocks, not whole bundles."""
        return self.num_blocks * self.whole_block_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        return self.whole_block_bytes // self.block_tokens


def parse_version(text: str) -> tuple[int, ...]:
    """``0.30.0`` as numbers; what is no number ends it (``0.30.0rc1+cpu`` is (0, 30, 0))."""
    return tuple(int(part) for part in re.match(r"\d*(?:\.\d+)*", text).group().split(".") if part)  # type: ignore[union-attr]


def geometry(
    facts: SimFacts,
    *,
    kv_budget_bytes: int,
    vllm_version: str,
    tensor_parallel_size: int = 1,
    kv_dtype_bytes: int | None = None,
    block_tokens: int = BLOCK_TOKENS,
    page_bytes: int = PAGE_BYTES,
) -> Geometry:
    """Cut a KV budget (bytes per GPU) into blocks, rounding down as vLLM does."""
    cell = facts.cell_bytes(tensor_parallel_size, kv_dtype_bytes or facts.dtype_bytes)
    buffers = 1 if facts.mla or parse_version(vllm_version) >= PACKED_KV_SINCE else 2
    block_bytes = max(1, cell * block_tokens // buffers)
    whole = block_bytes * buffers * facts.num_layers
    return Geometry(
        num_layers=facts.num_layers,
        num_kv_buffers=buffers,
        block_bytes=block_bytes,
        num_blocks=max(0, kv_budget_bytes) // whole,
        block_tokens=block_tokens,
        page_bytes=page_bytes,
    )


def facts_for(model: str, facts_json: str | None, *, load_format: str = "auto") -> SimFacts:
    """The facts of MODEL as given on the command line. Raises ``ModelError`` with vLLM's words."""
    given: Mapping[str, Any] = json.loads(facts_json) if facts_json else {}
    folder = Path(model)
    if folder.is_dir():
        base = _from_folder(folder, model, weights_needed=load_format != "dummy" and "weights_bytes" not in given)
    elif model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise ModelError(
            "repo_id",
            f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{model}'."
            " Use `repo_type` argument if needed.",
        )
    else:
        base = _from_name(model)
    return _overlaid(base, given)


def _overlaid(base: SimFacts, given: Mapping[str, Any]) -> SimFacts:
    known = {key: value for key, value in given.items() if key in SimFacts.__dataclass_fields__ and value is not None}
    attention = str(given.get("attention") or given.get("attention_kind") or "")
    if attention:
        known["mla"] = attention.lower() == "mla"
    if isinstance(given.get("dtype"), str):
        known.setdefault("dtype_bytes", DTYPE_BYTES.get(given["dtype"].removeprefix("torch."), 2))
    per_token = given.get("kv_bytes_per_token")
    layers = known.get("num_layers", base.num_layers)
    # Heads say it exactly for plain attention; the sum per token is what latent and mixed layouts can give.
    plain = {"num_kv_heads", "head_dim"} <= known.keys() and attention.lower() in ("", "mha", "gqa", "mqa")
    if isinstance(per_token, int) and per_token > 0 and not plain:
        known.setdefault("kv_cell_bytes", max(1, per_token // layers))
    return SimFacts(**{**{name: getattr(base, name) for name in SimFacts.__dataclass_fields__}, **known})


def _from_folder(folder: Path, model: str, *, weights_needed: bool) -> SimFacts:
    config_path = folder / "config.json"
    try:
        config = json.loads(config_path.read_text())
    except (OSError, ValueError):
        raise ModelError(
            "model_config",
            f"Invalid repository ID or local directory specified: '{model}'.\n"
            "Please verify the following requirements:\n"
            "1. Provide a valid Hugging Face repository ID.\n"
            "2. Specify a local directory that contains a recognized configuration file.\n"
            "   - For Hugging Face models: ensure the presence of a 'config.json'.\n"
            "   - For Mistral models: ensure the presence of a 'params.json'.\n",
        ) from None
    architecture = str((config.get("architectures") or ["LlamaForCausalLM"])[0])
    if "madeup" in architecture.lower() or not _ARCHITECTURE.fullmatch(architecture):
        raise ModelError(
            "model_config",
            f"Model architectures {config.get('architectures')} are not supported for now. "
            f"Supported architectures: dict_keys({list(_SUPPORTED)})",
        )
    weights = sum(entry.stat().st_size for entry in folder.iterdir() if entry.suffix in _WEIGHT_SUFFIXES)
    if not weights and weights_needed:
        raise ModelError("weights", f"Cannot find any model weights with `{model}`")
    return _from_config({**config, **config.get("text_config", {})}, architecture, weights)


def _from_config(config: Mapping[str, Any], architecture: str, weights_bytes: int) -> SimFacts:
    hidden = int(config.get("hidden_size", 4096))
    heads = int(config.get("num_attention_heads", 32))
    layers = int(config.get("num_hidden_layers", 32))
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    dtype_bytes = DTYPE_BYTES.get(dtype, 2)
    vocabulary = int(config.get("vocab_size", 32000))
    latent = config.get("kv_lora_rank")
    intermediate = int(config.get("intermediate_size", 4 * hidden))
    head_dim = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    attention = hidden * head_dim * 2 * (heads + kv_heads)
    tied = bool(config.get("tie_word_embeddings"))
    parameters = layers * (attention + 3 * hidden * intermediate) + vocabulary * hidden * (1 if tied else 2)
    return SimFacts(
        architecture=architecture,
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        vocab_size=vocabulary,
        max_position_embeddings=int(config.get("max_position_embeddings", 32768)),
        weights_bytes=weights_bytes or parameters * dtype_bytes,
        dtype_bytes=dtype_bytes,
        kv_cell_bytes=(int(latent) + int(config.get("qk_rope_head_dim", 64))) * dtype_bytes if latent else None,
        mla=bool(latent),
    )


def _from_name(model: str) -> SimFacts:
    match = None
    for match in _SIZE_IN_NAME.finditer(model):  # noqa: B007 - the last size in a name is the model's
        pass
    billions = 7.0
    if match:
        billions = float(match[2]) * int(match[1] or 1) * (1 if match[3].lower() == "b" else 1e-3)
    layers, _heads, kv_heads, head_dim, hidden = next(shape for limit, shape in _SHAPES if billions <= limit)
    llama = "llama" in model.lower()
    return SimFacts(
        architecture="LlamaForCausalLM" if llama else "Qwen3ForCausalLM",
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        vocab_size=128256 if llama else 151936,
        max_position_embeddings=131072 if llama else 40960,
        weights_bytes=int(billions * 2e9),
    )


_SUPPORTED = (
    "CohereForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "BertModel",
    "Qwen3ForSequenceClassification",
    "WhisperForConditionalGeneration",
)
#: vLLM serves hundreds of architectures; the simulator takes every name that is built like one of them.
_ARCHITECTURE = re.compile(
    r"[A-Z]\w*(?:ForCausalLM|ForConditionalGeneration|ForSequenceClassification|LMHeadModel|Model|ForTextEncoding)"
)
