"""Architecture facts, the catalogue, and the geometry of KV memory."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from models_app.engines import hub
from models_app.engines.facts import (
    FactsError,
    ModelFacts,
    bundle_bytes,
    catalogue,
    facts_from_config,
    facts_from_folder,
    facts_from_hub,
    full_context_floor_bytes,
    hard_minimum_bytes,
    kv_bytes_for,
    kv_bytes_per_token,
    safety_floor_bytes,
)

MIB = 1024**2
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "hidden_size": 256, "vocab_size": 512, "max_position_embeddings": 512, "torch_dtype": "bfloat16",
}  # fmt: skip


def of(model: str) -> ModelFacts:
    return next(entry.facts for entry in catalogue() if entry.model == model)


# --- measured on a GPU (vLLM 0.24.0, kvcached 0.1.6)


@pytest.mark.parametrize(
    ("model", "per_token", "bundle_mib"),
    [
        ("Qwen/Qwen3-0.6B", 114_688, 112),
        ("meta-llama/Llama-3.2-1B-Instruct", 32_768, 64),
        ("Qwen/Qwen2.5-0.5B-Instruct", 12_288, 96),
        ("Qwen/Qwen3-8B", 147_456, 144),
    ],
)
def test_bytes_per_token_and_bundle_are_those_measured(model: str, per_token: int, bundle_mib: int) -> None:
    assert kv_bytes_per_token(of(model)) == per_token
    assert bundle_bytes(of(model)) == bundle_mib * MIB


@pytest.mark.parametrize(("length", "bundles"), [(8192, 9), (32768, 33)])
def test_full_context_floor_is_the_one_measured(length: int, bundles: int) -> None:
    facts = of("Qwen/Qwen3-0.6B")
    assert full_context_floor_bytes(facts, length) == bundles * bundle_bytes(facts)


# --- geometry


def test_tensor_parallelism_splits_kv_heads_until_each_gpu_has_one() -> None:
    facts = of("Qwen/Qwen2.5-7B-Instruct")  # 4 KV heads
    assert kv_bytes_per_token(facts, 2) * 2 == kv_bytes_per_token(facts)
    assert kv_bytes_per_token(facts, 8) == kv_bytes_per_token(facts, 4)


def test_latent_attention_is_not_split() -> None:
    facts = of("deepseek-ai/DeepSeek-V2-Lite-Chat")
    assert facts.attention == "mla"
    assert kv_bytes_per_token(facts) == kv_bytes_per_token(facts, 4) == 27 * (512 + 64) * 2
    assert bundle_bytes(facts) == 27 * 2 * MIB  # one buffer


def test_packed_kv_of_newer_vllm_halves_the_bundle_not_the_floor() -> None:
    facts = of("Qwen/Qwen3-8B")
    assert bundle_bytes(facts, vllm_version="0.30.0") * 2 == bundle_bytes(facts, vllm_version="0.24.0")
    old, new = (full_context_floor_bytes(facts, 32768, vllm_version=v) for v in ("0.24.0", "0.30.0"))
    assert abs(old - new) <= bundle_bytes(facts)


def test_windowed_layers_stop_growing_at_their_window() -> None:
    facts = of("openai/gpt-oss-20b")
    assert (facts.attention, facts.full_attention_layers, facts.sliding_window) == ("hybrid", 12, 128)
    grown = kv_bytes_for(facts, 100_000) - kv_bytes_for(facts, 50_000)
    assert grown == 50_000 * kv_bytes_per_token(facts) // 2


def test_a_bundle_spans_one_group_of_layers() -> None:
    assert bundle_bytes(of("openai/gpt-oss-20b")) == 2 * 12 * 2 * MIB
    assert bundle_bytes(of("google/gemma-3-4b-it")) == 2 * 5 * 2 * MIB  # 5 of 34 layers see everything


def test_floors_are_ordered_and_whole_bundles() -> None:
    for entry in catalogue():
        facts, length = entry.facts, entry.facts.max_position_embeddings or 4096
        bundle = bundle_bytes(facts)
        floors = [hard_minimum_bytes(facts), safety_floor_bytes(facts, length), full_context_floor_bytes(facts, length)]
        assert all(floor % bundle == 0 for floor in floors)
        assert floors[0] <= floors[1] <= max(floors[2] + bundle, floors[1])
        assert safety_floor_bytes(facts, 512) <= safety_floor_bytes(facts, length)


def test_kv_larger_than_a_page_still_counts_whole_bundles() -> None:
    facts = facts_from_config({**CONFIG, "num_attention_heads": 512, "num_key_value_heads": 512, "head_dim": 256})
    assert full_context_floor_bytes(facts, 16) == 2 * bundle_bytes(facts)


# --- reading


def test_config_of_a_plain_model() -> None:
    facts = facts_from_config(CONFIG, 1000)
    assert (facts.head_dim, facts.attention, facts.weights_bytes) == (32, "gqa", 1000)
    assert facts_from_config({**CONFIG, "num_key_value_heads": 8}).attention == "mha"


def test_text_part_of_a_model_that_sees_is_used() -> None:
    text = {key: value for key, value in CONFIG.items() if key not in ("architectures", "torch_dtype")}
    facts = facts_from_config(
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {**text, "sliding_window": 1024}}
    )
    assert (facts.num_layers, facts.attention) == (2, "sliding")


def test_old_names_of_config_keys_are_understood() -> None:
    facts = facts_from_config(
        {"architectures": ["GPT2LMHeadModel"], "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
    )
    assert (facts.num_layers, facts.head_dim, facts.max_position_embeddings) == (12, 64, 1024)


@pytest.mark.parametrize("layer_types", [["full_attention"] * 2, None])
def test_a_window_that_is_switched_off_is_none(layer_types: list[str] | None) -> None:
    config = {**CONFIG, "sliding_window": 4096, "use_sliding_window": False, "layer_types": layer_types}
    assert facts_from_config(config).sliding_window is None


def test_32_bit_models_are_computed_in_16_bits() -> None:
    assert facts_from_config({**CONFIG, "torch_dtype": "float32"}).dtype == "bfloat16"


@pytest.mark.parametrize("broken", [{}, {"architectures": ["X"]}, {**CONFIG, "num_hidden_layers": "many"}])
def test_half_a_config_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(FactsError, match="does not describe a language model"):
        facts_from_config(broken)


def test_facts_survive_json() -> None:
    for entry in catalogue():
        assert ModelFacts.from_json(json.loads(json.dumps(entry.facts.to_json()))) == entry.facts
    with pytest.raises(FactsError):
        ModelFacts.from_json({"num_layers": 3})


# --- folders


def folder(path: Path, **files: object) -> Path:
    for name, value in {"config.json": CONFIG, **files}.items():
        (path / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_folder_without_weights_says_so(tmp_path: Path) -> None:
    assert facts_from_folder(folder(tmp_path)).weights_estimated


def test_folder_with_the_weights_twice_counts_them_once(tmp_path: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    folder(
        tmp_path,
        **{
            "model.safetensors.index.json": index, "model-1.safetensors": "x" * 30, "model-2.safetensors": "x" * 12,
            "consolidated.safetensors": "x" * 42, "pytorch_model.bin": "x" * 42,
        },
    )  # fmt: skip
    assert facts_from_folder(tmp_path).weights_bytes == 42


@pytest.mark.parametrize(
    ("files", "known"),
    [
        ({}, None),
        ({"tokenizer_config.json": {"chat_template": "{{ x }}"}}, True),
        ({"tokenizer_config.json": {}}, False),
        ({"tokenizer_config.json": {}, "chat_template.jinja": "{{ x }}"}, True),
    ],
)
def test_chat_template_is_known_from_the_tokenizer_s_files(
    tmp_path: Path, files: dict[str, object], known: bool | None
) -> None:
    assert facts_from_folder(folder(tmp_path, **files)).chat_template is known


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_broken_folder_is_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(FactsError):
        facts_from_folder(tmp_path)
    with pytest.raises(FactsError, match=r"no readable config\.json"):
        facts_from_folder(tmp_path / "nowhere")


# --- catalogue


def test_catalogue_holds_the_well_known_models_smallest_first() -> None:
    names = [entry.model for entry in catalogue()]
    assert len(names) == len(set(names)) >= 14
    assert {"Qwen/Qwen3-0.6B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-8B-Instruct", "openai/gpt-oss-20b"} <= set(names)
    sizes = [entry.facts.weights_bytes or 0 for entry in catalogue()]
    assert sizes == sorted(sizes) and sizes[0] > 0
    assert all(entry.title for entry in catalogue())


def parameters(config: dict[str, object]) -> int:
    """Parameters that follow from the shape, norms and biases left out."""
    c = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, layers, heads, head = c["hidden_size"], c["num_hidden_layers"], c["num_attention_heads"], c["head_dim"]
    attention = hidden * head * 2 * (heads + c["num_key_value_heads"])
    mlp = [3 * hidden * c["intermediate_size"]] * layers
    if rank := c.get("kv_lora_rank"):
        rope, nope, value = c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["v_head_dim"]
        attention = hidden * heads * (nope + rope) + hidden * (rank + rope)
        attention += rank * heads * (nope + value) + heads * value * hidden
    if experts := c.get("num_experts") or c.get("num_local_experts") or c.get("n_routed_experts"):
        experts += c.get("n_shared_experts", 0)
        expert = 3 * hidden * c.get("moe_intermediate_size", c["intermediate_size"])
        dense = c.get("first_k_dense_replace", 0)
        mlp = mlp[:dense] + [experts * expert] * (layers - dense)
    return layers * attention + sum(mlp) + c["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)


def test_weights_in_the_catalogue_follow_from_the_shapes() -> None:
    data = json.loads((Path(hub.__file__).parent / "data" / "catalogue.json").read_text())
    for item in data["models"]:
        if item["config"].get("quantization_config") or "ConditionalGeneration" in item["config"]["architectures"][0]:
            continue  # packed weights; a picture tower besides
        assert parameters(item["config"]) * 2 == pytest.approx(item["weights_bytes"], rel=0.001), item["model"]


# --- hub


def hub_answers(status: int = 200, about: dict[str, object] | None = None) -> httpx.MockTransport:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/config.json"):
            return httpx.Response(status, json=CONFIG)
        return httpx.Response(200, json=about or {})

    return httpx.MockTransport(answer)


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("about", "size"),
    [
        ({"safetensors": {"parameters": {"BF16": 100, "F32": 10}}}, 240),
        ({"siblings": [{"rfilename": "a.safetensors", "size": 7}, {"rfilename": "x/b.safetensors", "size": 9}]}, 7),
        ({"safetensors": {"parameters": {"NEW": 1}}, "siblings": [{"rfilename": "a.bin", "size": 5}]}, 5),
        ({}, None),
    ],
)  # fmt: skip
def test_weights_are_sized_by_what_the_hub_tells(about: dict[str, object], size: int | None) -> None:
    assert hub.fetch("a/b", "hf_x", transport=hub_answers(about=about))[1] == size


@pytest.mark.parametrize(("status", "word"), [(401, "gated"), (403, "gated"), (404, "no config.json"), (500, "500")])
def test_a_refusal_of_the_hub_is_a_sentence(status: int, word: str) -> None:
    with pytest.raises(hub.HubError, match=word):
        hub.fetch("a/b", None, transport=hub_answers(status))


def test_no_network_and_offline_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no route to host")

    with pytest.raises(hub.HubError, match="cannot be reached"):
        hub.fetch("a/b", None, transport=httpx.MockTransport(refuse))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FactsError, match="HF_HUB_OFFLINE"):
        facts_from_hub("nobody/nothing")


def test_catalogue_and_cache_are_asked_before_the_network(no_cache: Path) -> None:
    assert facts_from_hub("Qwen/Qwen3-8B") is of("Qwen/Qwen3-8B")
    snapshot = no_cache / "models--a--b" / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (no_cache / "models--a--b" / "refs").mkdir()
    (no_cache / "models--a--b" / "refs" / "main").write_text("c0ffee")
    folder(snapshot)
    assert facts_from_hub("a/b").hidden_size == 256


def test_an_id_that_is_none_never_reaches_path_or_network() -> None:
    assert hub.cached_snapshot("../../etc") is None
    assert hub.cached_snapshot("a/b", "../../x") is None
    with pytest.raises(hub.HubError, match="not a Hugging Face id"):
        hub.fetch("a/b?x=1", None)
