"""Model facts and the KV geometry, against what was measured on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from models_app.simulator import config, facts
from models_app.simulator.facts import ModelError, facts_for, geometry
from tests.models_app.simulator.helpers import LLAMA_1B, QWEN3_06B, QWEN3_8B, QWEN25_05B, make_geometry


@pytest.mark.parametrize(
    ("model", "kv_bytes_per_token", "bundle_bytes", "tokens_per_bundle"),
    [
        (QWEN3_06B, 114_688, 117_440_512, 1024),
        (LLAMA_1B, 32_768, 67_108_864, 2048),
        (QWEN25_05B, 12_288, 100_663_296, 8192),
        (QWEN3_8B, 147_456, 150_994_944, 1024),
    ],
)
def test_bundles_are_those_measured(model, kv_bytes_per_token, bundle_bytes, tokens_per_bundle) -> None:
    cut = make_geometry(facts=model)
    assert cut.kv_bytes_per_token == kv_bytes_per_token
    assert cut.bundle_bytes == bundle_bytes
    assert cut.blocks_per_page * cut.block_tokens == tokens_per_bundle


def test_capacity_is_whole_blocks_not_whole_bundles() -> None:
    assert make_geometry(budget=134_582_595_175).capacity_bytes == 134_581_321_728
    assert make_geometry(facts=QWEN25_05B, budget=4_294_967_296).capacity_bytes == 4_294_901_760


def test_packed_kv_from_vllm_0_26_on_halves_the_bundle_and_keeps_the_bytes_per_token() -> None:
    old = geometry(QWEN3_06B, kv_budget_bytes=10**10, vllm_version="0.24.0")
    new = geometry(QWEN3_06B, kv_budget_bytes=10**10, vllm_version="0.30.0")
    assert (old.num_kv_buffers, new.num_kv_buffers) == (2, 1)
    assert new.bundle_bytes * 2 == old.bundle_bytes
    assert new.kv_bytes_per_token == old.kv_bytes_per_token


def test_tensor_parallel_splits_kv_heads_but_never_below_one_head() -> None:
    alone = geometry(QWEN25_05B, kv_budget_bytes=0, vllm_version="0.30.0").kv_bytes_per_token
    two = geometry(QWEN25_05B, kv_budget_bytes=0, vllm_version="0.30.0", tensor_parallel_size=2).kv_bytes_per_token
    four = geometry(QWEN25_05B, kv_budget_bytes=0, vllm_version="0.30.0", tensor_parallel_size=4).kv_bytes_per_token
    assert (two, four) == (alone // 2, alone // 2)


def test_facts_of_the_launcher_win() -> None:
    given = {
        "architecture": "MyForCausalLM",
        "num_layers": 28,
        "num_kv_heads": 8,
        "head_dim": 128,
        "weights_bytes": 1_234_567,
        "max_position_embeddings": 4096,
        "kv_bytes_per_token": 1,
        "attention": "gqa",
        "something_else": True,
    }
    found = facts_for("Qwen/Qwen3-8B", json.dumps(given))
    assert (found.num_layers, found.weights_bytes, found.architecture) == (28, 1_234_567, "MyForCausalLM")
    # Heads are exact for plain attention; the sum per token is for layouts that they cannot describe.
    assert geometry(found, kv_budget_bytes=0, vllm_version="0.24.0").kv_bytes_per_token == 114_688


def test_latent_attention_has_one_buffer_and_is_not_split_over_gpus() -> None:
    given = {"attention": "mla", "num_layers": 61, "kv_bytes_per_token": 61 * 576 * 2}
    found = facts_for("deepseek-ai/DeepSeek-V3", json.dumps(given))
    one = geometry(found, kv_budget_bytes=0, vllm_version="0.24.0")
    eight = geometry(found, kv_budget_bytes=0, vllm_version="0.24.0", tensor_parallel_size=8)
    assert one.num_kv_buffers == 1
    assert one.kv_bytes_per_token == eight.kv_bytes_per_token == 61 * 576 * 2


def test_name_tells_the_size_when_nothing_else_does() -> None:
    assert facts_for("Qwen/Qwen3-0.6B", None).weights_bytes == 1_200_000_000
    assert facts_for("mistralai/Mixtral-8x7B-v0.1", None).weights_bytes == 112_000_000_000
    assert facts_for("some/thing", None).weights_bytes > 0


def write_model(folder: Path, **changes: object) -> str:
    content = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "torch_dtype": "float16",
        **changes,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


def test_folder_is_read_from_its_config(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    (tmp_path / "tiny" / "model.safetensors").write_bytes(b"x" * 1000)
    found = facts_for(model, None)
    assert (found.num_layers, found.num_kv_heads, found.head_dim, found.weights_bytes) == (2, 2, 16, 1000)


def test_dummy_weights_need_no_files_and_are_computed(tmp_path: Path) -> None:
    found = facts_for(write_model(tmp_path / "tiny"), None, load_format="dummy")
    assert found.weights_bytes == 2 * (2 * (64 * 16 * 2 * (4 + 2) + 3 * 64 * 128) + 2 * 256 * 64)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda folder: "/models/does-not-exist", "Repo id must be in the form 'repo_name' or 'namespace/repo_name'"),
        (str, "ensure the presence of a 'config.json'"),
        (lambda folder: write_model(folder / "m", architectures=["MadeUpForCausalLM"]), "are not supported for now"),
        (lambda folder: write_model(folder / "m"), "Cannot find any model weights with"),
    ],
)
def test_models_that_cannot_be_served_are_refused_in_vllms_words(tmp_path: Path, prepare, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        facts_for(prepare(tmp_path), None)
    assert words in str(caught.value)


def test_context_longer_than_the_model_is_refused_unless_allowed() -> None:
    argv = ["Qwen/Qwen3-8B", "--max-model-len", "100000"]
    with pytest.raises(ModelError, match=r"User-specified max_model_len \(100000\) is greater than the derived"):
        config.read(argv, {})
    assert config.read(argv, {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}).max_model_len == 100_000


def test_versions_are_compared_as_numbers() -> None:
    assert facts.parse_version("0.30.0rc1+cpu") == (0, 30, 0)
    assert facts.parse_version("0.9") < facts.parse_version("0.30.0")
