"""Make a folder that ``vllm serve`` takes for a model: a tiny Llama with a real tokenizer and no weights.

Runs in the engine's environment (it needs ``tokenizers``), or is imported for its ``make``. Serve it with
``--load-format dummy``; without that flag it is the model whose weights are missing.

    python tests/contract/make_model.py FOLDER [--architecture NAME]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

MAX_POSITIONS = 512
VOCABULARY = 512
_SPECIAL = ["<|end|>", "<|begin|>", "<|pad|>"]
_SENTENCES = [
    "the engine answers when it is asked and rests when nobody asks",
    "pages of memory come and go while requests are running",
    "user assistant system one two three four five six seven eight nine ten",
]
_CHAT = (
    "{% for message in messages %}<|begin|>{{ message['role'] }}: {{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant: {% endif %}"
)


def make(folder: Path, architecture: str = "LlamaForCausalLM") -> Path:
    """Write the folder. Heads of 32 values, because the attention of vLLM's CPU build wants multiples of that."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": {
            "architectures": [architecture],
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": MAX_POSITIONS,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "eos_token_id": 0,
            "bos_token_id": 1,
            "pad_token_id": 2,
        },
        "generation_config.json": {"eos_token_id": 0, "bos_token_id": 1, "pad_token_id": 2},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": _SPECIAL[0],
            "bos_token": _SPECIAL[1],
            "pad_token": _SPECIAL[2],
            "model_max_length": MAX_POSITIONS,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT,
        },
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=1) + "\n")
    return folder


def make_tokenizer(folder: Path) -> None:
    """Byte-level BPE, trained on a few sentences: every text can be encoded, every id decodes to something."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--architecture", default="LlamaForCausalLM")
    given = parser.parse_args()
    make(given.folder, given.architecture)
    make_tokenizer(given.folder)


if __name__ == "__main__":
    main()
