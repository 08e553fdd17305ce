"""Model folders for the steps: real shapes, and one small model with real weights that an engine can read again."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 28, "hidden_size": 1024,
        "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096,
        "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
    "llama-1b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 16, "hidden_size": 2048,
        "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    },
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896,
        "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64,
    },
}  # fmt: skip
_REST = {"vocab_size": 151936, "max_position_embeddings": 40960, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6}
#: Files that make a tokenizer, as far as a folder has them.
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json")
#: Two layers, heads of 64: a bundle of 8 MiB.
_SMALL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 128,
    "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu",
    "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def of(engine: str, home: Path) -> Path:
    """Where the model folders are: SARDEENZ_GPU_MODELS, or made here for simulated engines, which need shapes alone."""
    if engine == "vllm":
        return Path(os.environ.get("SARDEENZ_GPU_MODELS", "models"))
    for name, shape in _SHAPES.items():
        folder = home / "models" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(_REST | shape))
    return home / "models"


def small_with_weights(models: Path, target: Path) -> Path:
    """A tiny model with real weights, the same random numbers each time, and the tokenizer of ``qwen2.5-0.5b``."""
    donor = models / "qwen2.5-0.5b"
    target.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER:
        if (donor / name).is_file():
            shutil.copy(donor / name, target / name)
    given = json.loads((donor / "config.json").read_text())
    ends = {name: given[name] for name in ("eos_token_id", "bos_token_id", "pad_token_id") if name in given}
    config = _SMALL | {"vocab_size": given["vocab_size"]} | ends
    (target / "config.json").write_text(json.dumps(config))
    _write_safetensors(target / "model.safetensors", _tensors(config))
    return target


def _tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        shapes |= {f"{name}self_attn.{one}_proj.weight": (heads, hidden) for one in "qkv"}
        shapes |= {
            f"{name}self_attn.o_proj.weight": (hidden, heads),
            f"{name}mlp.gate_proj.weight": (inner, hidden),
            f"{name}mlp.up_proj.weight": (inner, hidden),
            f"{name}mlp.down_proj.weight": (hidden, inner),
            f"{name}input_layernorm.weight": (hidden,),
            f"{name}post_attention_layernorm.weight": (hidden,),
        }
    return shapes | {"model.norm.weight": (hidden,)}


def _write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """bfloat16 numbers between 0.0078 and 0.25 of either sign; the norms are ones."""
    dice = random.Random(7)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # The high byte of a bfloat16 is its sign and most of its exponent: 0x3C to 0x3E are small numbers.
    exponents = bytes((byte & 0x80) | (0x3C + byte % 3) for byte in range(256))
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            count = shape[0] * (shape[1] if len(shape) > 1 else 1)
            if len(shape) == 1:
                file.write(b"\x80\x3f" * count)
                continue
            numbers = bytearray(dice.randbytes(2 * count))
            numbers[1::2] = numbers[1::2].translate(exponents)
            file.write(numbers)
