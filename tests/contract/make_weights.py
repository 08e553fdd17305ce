"""Give a model folder of ``make_model.py`` real weights, so that an engine can read them again. For the engine's
Python.

python tests/contract/make_weights.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Write ``model.safetensors``: the same random numbers each time."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((folder / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    dice = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=dice) * 0.2

    weights = {"model.embed_tokens.weight": draw(config["vocab_size"], hidden), "model.norm.weight": torch.ones(hidden)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        for name in ("q", "k", "v"):
            weights[f"{layer}self_attn.{name}_proj.weight"] = draw(heads, hidden)
        weights[f"{layer}self_attn.o_proj.weight"] = draw(hidden, heads)
        weights[f"{layer}mlp.gate_proj.weight"] = draw(inner, hidden)
        weights[f"{layer}mlp.up_proj.weight"] = draw(inner, hidden)
        weights[f"{layer}mlp.down_proj.weight"] = draw(hidden, inner)
        weights[f"{layer}input_layernorm.weight"] = torch.ones(hidden)
        weights[f"{layer}post_attention_layernorm.weight"] = torch.ones(hidden)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})


main(Path(sys.argv[1]))
