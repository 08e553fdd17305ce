"""How large a model's weights are when nobody has counted them: its config.json says the shape of every matrix.

For folders without weight files (random weights, weights still to come) and configs read offline. Embeddings, attention
and feed-forward matrices are counted; norms, biases and routers are too small to matter (under 1 %).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Bits of one weight under a quantisation that does not say; embeddings and heads stay as they are.
_QUANTISED_BITS = {"awq": 4, "gptq": 4, "awq_marlin": 4, "gptq_marlin": 4, "bitsandbytes": 4, "mxfp4": 4, "fp8": 8}
#: Scales and zero points beside the quantised weights.
_QUANTISED_OVERHEAD = 1.08


def estimated_weights_bytes(config: Mapping[str, Any], *, dtype_bytes: int) -> int:
    """Bytes of all weights together, from the (text) config; 0 when the shape is not all there."""

    def number(*names: str) -> int:
        for name in names:
            value = config.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return 0

    hidden = number("hidden_size", "n_embd", "d_model")
    layers = number("num_hidden_layers", "n_layer", "num_layers")
    heads = number("num_attention_heads", "n_head")
    vocabulary = number("vocab_size", "padded_vocab_size")
    if not (hidden and layers and heads and vocabulary):
        return 0
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings", True) else 2)
    inner = number("intermediate_size", "ffn_hidden_size", "n_inner") or 4 * hidden
    dense = 3 * hidden * inner
    experts = number("num_experts", "n_routed_experts", "num_local_experts")
    if experts:
        each = 3 * hidden * (number("moe_intermediate_size") or inner)
        shared = number("n_shared_experts", "num_shared_experts")
        first_dense = min(number("first_k_dense_replace"), layers)
        feed_forward = first_dense * dense + (layers - first_dense) * (experts + shared) * each
    else:
        feed_forward = layers * dense
    matrices = layers * _attention(config, number, hidden, heads) + feed_forward
    quantisation = config.get("quantization_config")
    bits = _bits(quantisation) if isinstance(quantisation, Mapping) else 0
    per_weight = bits / 8 * _QUANTISED_OVERHEAD if bits else float(dtype_bytes)
    return int(embeddings * dtype_bytes + matrices * per_weight)


def _attention(config: Mapping[str, Any], number: Any, hidden: int, heads: int) -> int:
    """Weights of one layer's attention: query, key, value and output, or the low-rank matrices of MLA."""
    head = number("head_dim") or hidden // heads
    latent = number("kv_lora_rank")
    if latent:
        rope, nope = number("qk_rope_head_dim"), number("qk_nope_head_dim")
        value = number("v_head_dim") or head
        query_rank = number("q_lora_rank")
        queries = heads * (nope + rope)
        query = hidden * query_rank + query_rank * queries if query_rank else hidden * queries
        return int(query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden)
    kv_heads = number("num_key_value_heads", "num_kv_heads") or heads
    return int(2 * hidden * heads * head + 2 * hidden * kv_heads * head)


def _bits(quantisation: Mapping[str, Any]) -> int:
    for name in ("bits", "w_bit", "weight_bits"):
        value = quantisation.get(name)
        if isinstance(value, int) and 1 <= value <= 16:
            return value
    return _QUANTISED_BITS.get(str(quantisation.get("quant_method") or "").lower(), 0)
