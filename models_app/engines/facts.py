"""Architecture facts of a model: from its config.json, from a folder, from the catalogue, from the Hub.

Facts are what follows from the shape alone. How much memory a start really takes is measured (``MemoryProfile``); these
figures serve until there is a measurement, and to explain.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from models_app.engines.hub import HubError, cached_snapshot, fetch
from models_app.engines.kv_geometry import (
    bundle_bytes,
    full_context_floor_bytes,
    hard_minimum_bytes,
    kv_bytes_for,
    kv_bytes_per_token,
    safety_floor_bytes,
)
from models_app.engines.weight_estimate import estimated_weights_bytes

__all__ = [
    "CatalogueEntry",
    "FactsError",
    "ModelFacts",
    "bundle_bytes",
    "catalogue",
    "facts_from_config",
    "facts_from_folder",
    "facts_from_hub",
    "full_context_floor_bytes",
    "hard_minimum_bytes",
    "kv_bytes_for",
    "kv_bytes_per_token",
    "safety_floor_bytes",
]

DTYPE_BYTES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "float8_e4m3fn": 1, "fp8": 1}
_CONFIG_LIMIT_BYTES = 4 << 20
#: Architectures whose layers alternate between a window and the whole context, where config.json does not list them.
_WINDOW_PATTERN = {"Gemma2ForCausalLM": 2, "Gemma3ForCausalLM": 6, "Gemma3ForConditionalGeneration": 6}


class FactsError(ValueError):
    """A model's description cannot be had or read; the text is a sentence."""


@dataclass(frozen=True)
class ModelFacts:
    """The shape of a model, whole (not per GPU). ``attention``: mha, gqa, mla, sliding or hybrid (some layers full).

    ``weights_bytes`` is what the weights take on GPUs, all together, ``weights_estimated`` when nobody has counted them
    (see ``weight_estimate``); None when not even that is known. ``full_attention_layers`` of
    the ``num_layers`` keep the whole context, the others ``sliding_window`` tokens. MLA keeps one latent per token of
    ``kv_lora_rank + qk_rope_head_dim`` values, which tensor parallelism does not split.
    """

    architecture: str
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int | None = None
    dtype: str = "bfloat16"
    weights_bytes: int | None = None
    weights_estimated: bool = False
    attention: str = "gqa"
    sliding_window: int | None = None
    full_attention_layers: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    num_experts: int | None = None
    quantization: str = ""
    chat_template: bool | None = None

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES.get(self.dtype, 2)

    @property
    def mla(self) -> bool:
        return self.attention == "mla"

    def to_json(self) -> dict[str, Any]:
        """Plain values for ``Model.facts``; with ``kv_bytes_per_token`` of one GPU that holds the whole model."""
        return {**asdict(self), "mla": self.mla, "kv_bytes_per_token": kv_bytes_per_token(self, 1)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelFacts:
        """The inverse of ``to_json``; keys that are not its own are passed over. Raises FactsError for half a shape."""
        known = {f.name for f in fields(cls)}
        try:
            return cls(**{key: item for key, item in value.items() if key in known})
        except TypeError as exc:
            raise FactsError("These facts do not describe a whole model.") from exc


@dataclass(frozen=True)
class CatalogueEntry:
    """A well-known model. ``gated``: Hugging Face wants a token of somebody who accepted the terms."""

    model: str
    title: str
    facts: ModelFacts
    gated: bool = False
    note: str = ""


def facts_from_config(config: Mapping[str, Any], weights_bytes: int | None = None) -> ModelFacts:
    """Facts from the contents of a config.json. Raises FactsError when it does not describe a language model."""
    text = {**config, **_mapping(config.get("text_config"))}
    text.pop("text_config", None)
    architecture = str((config.get("architectures") or text.get("architectures") or [""])[0])
    layers, heads, hidden = (_number(text, *names) for names in _NAMES)
    if not architecture or not layers or not heads or not hidden:
        raise FactsError(
            "The config.json does not describe a language model: architectures, layers, heads or size missing."
        )
    kv_heads = _number(text, "num_key_value_heads", "num_kv_heads", "multi_query_group_num") or heads
    if text.get("multi_query") is True and not text.get("num_kv_heads"):
        kv_heads = 1
    latent = _number(text, "kv_lora_rank")
    window, full = _window(text, architecture, layers)
    dtype = _dtype(config, text)
    counted = weights_bytes
    if weights_bytes is None:
        weights_bytes = estimated_weights_bytes(text, dtype_bytes=DTYPE_BYTES.get(dtype, 2)) or None
    return ModelFacts(
        architecture=architecture,
        num_layers=layers,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_number(text, "head_dim") or hidden // heads,
        hidden_size=hidden,
        vocab_size=_number(text, "vocab_size", "padded_vocab_size") or 0,
        max_position_embeddings=_number(text, "max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
        dtype=dtype,
        weights_bytes=weights_bytes,
        weights_estimated=counted is None and weights_bytes is not None,
        attention=_attention(heads, kv_heads, latent, window, full),
        sliding_window=window,
        full_attention_layers=full,
        kv_lora_rank=latent,
        qk_rope_head_dim=_number(text, "qk_rope_head_dim") if latent else None,
        num_experts=_number(text, "num_experts", "n_routed_experts", "num_local_experts"),
        quantization=str(_mapping(text.get("quantization_config")).get("quant_method") or ""),
    )


_NAMES = (
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    ("num_attention_heads", "n_head", "n_heads"),
    ("hidden_size", "n_embd", "d_model"),
)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(config: Mapping[str, Any], *names: str) -> int | None:
    """The first of these names that holds a whole number above 0 and below 2**48."""
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 48:
            return value
    return None


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """What vLLM computes in. It takes 32-bit models down to 16 bits unless told otherwise."""
    name = str(config.get("torch_dtype") or config.get("dtype") or text.get("torch_dtype") or text.get("dtype") or "")
    name = name.removeprefix("torch.")
    return "bfloat16" if name in ("", "auto", "float32", "None") else name


def _window(text: Mapping[str, Any], architecture: str, layers: int) -> tuple[int | None, int | None]:
    """Sliding window and number of layers that do not have one; (None, None) when every layer sees all."""
    window = _number(text, "sliding_window")
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and kinds:
        full = sum(kind == "full_attention" for kind in kinds)
        if full == len(kinds):
            return None, None
        return window, full
    if window is None or text.get("use_sliding_window") is False:
        return None, None
    pattern = _number(text, "sliding_window_pattern", "_sliding_window_pattern") or _WINDOW_PATTERN.get(architecture)
    if pattern:
        return window, layers // pattern
    if architecture == "MistralForCausalLM":
        return window, 0
    return None, None


def _attention(heads: int, kv_heads: int, latent: int | None, window: int | None, full: int | None) -> str:
    if latent:
        return "mla"
    if full is not None:
        return "hybrid" if full else "sliding"
    return "gqa" if kv_heads < heads else "mha"


def facts_from_folder(path: Path | str) -> ModelFacts:
    """Facts of a model folder. Raises FactsError when its config.json is missing, broken or of no language model."""
    folder = Path(path)
    file = folder / "config.json"
    try:
        if file.stat().st_size > _CONFIG_LIMIT_BYTES:
            raise FactsError(f"{file} is too large to be a model's config.")
        config = json.loads(file.read_bytes())
    except OSError as exc:
        raise FactsError(f"There is no readable config.json in {folder}: {exc.strerror}.") from exc
    except ValueError as exc:
        if isinstance(exc, FactsError):
            raise
        raise FactsError(f"{file} is not JSON.") from exc
    if not isinstance(config, dict):
        raise FactsError(f"{file} does not hold an object.")
    facts = facts_from_config(config, weights_in_folder(folder))
    return ModelFacts(**{**asdict(facts), "chat_template": has_chat_template(folder)})


def weights_in_folder(folder: Path) -> int | None:
    """Bytes of the weights that vLLM would load: safetensors, else .bin or .pt; None when there are none.

    With an index only its files count: some folders hold the same weights twice (``consolidated.safetensors``).
    """
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            names: set[str] = set(json.loads(index.read_bytes())["weight_map"].values())
            return sum(int((folder / name).stat().st_size) for name in names)
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            continue
    for pattern in ("model*.safetensors", "*.safetensors", "*.bin", "*.pt"):
        found = sum(file.stat().st_size for file in folder.glob(pattern) if file.is_file())
        if found:
            return found
    return None


def has_chat_template(folder: Path) -> bool | None:
    """Whether chat requests will work, by the tokenizer's own files; no request is spent on it. None: no tokenizer."""
    if any(folder.glob("chat_template*")) or (folder / "additional_chat_templates").is_dir():
        return True
    try:
        return "chat_template" in json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError, TypeError):
        return None


@cache
def catalogue() -> tuple[CatalogueEntry, ...]:
    """The well-known models that come with Sardeenz, smallest first. Needs no network."""
    data = json.loads(files("models_app.engines").joinpath("data/catalogue.json").read_text())
    entries = [
        CatalogueEntry(
            model=item["model"],
            title=item["title"],
            facts=facts_from_config(item["config"], item["weights_bytes"]),
            gated=item.get("gated", False),
            note=item.get("note", ""),
        )
        for item in data["models"]
    ]
    return tuple(sorted(entries, key=lambda entry: entry.facts.weights_bytes or 0))


def facts_from_hub(model: str, token: str | None = None, revision: str = "main") -> ModelFacts:
    """Facts of a Hugging Face model: catalogue, then this host's cache, then the network (at most 10 s).

    Raises FactsError with a sentence: gated, unknown, offline, or not a language model.
    """
    if revision in ("", "main"):
        for entry in catalogue():
            if entry.model == model:
                return entry.facts
    snapshot = cached_snapshot(model, revision or "main")
    if snapshot is not None:
        return facts_from_folder(snapshot)
    try:
        config, weights_bytes = fetch(model, token, revision or "main")
    except HubError as exc:
        raise FactsError(str(exc)) from exc
    return facts_from_config(config, weights_bytes)
