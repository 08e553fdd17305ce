"""Making and changing models: one sentence per wrong field, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpus_app.models import Host
from models_app.errors import Conflict, InvalidInput, StaleRevision
from models_app.models import AuditEntry, Model
from models_app.services.models import (
    command_preview,
    model_check,
    model_create,
    model_delete,
    model_facts,
    model_update,
)
from models_app.states import InstanceState
from tests.builders import GIB, make_gpu, make_host, make_instance, make_model
from tests.race import race

pytestmark = pytest.mark.django_db
GOOD: dict[str, Any] = {"served_model_name": "a", "source": "catalogue", "model": "Qwen/Qwen3-0.6B"}


@pytest.fixture
def host() -> Host:
    host = make_host()
    make_gpu(host=host, index=0)
    make_gpu(host=host, index=1)
    return host


@pytest.fixture
def root(tmp_path: Path, settings: Any) -> Path:
    """A model root with one model folder in it."""
    root = tmp_path / "models"
    folder = root / "tiny"
    folder.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    settings.SARDEENZ_MODEL_ROOTS = [root]
    return root


def _wrong(**fields: Any) -> dict[str, list[str]]:
    return model_check(GOOD | fields)


def test_model_of_the_catalogue_brings_its_facts() -> None:
    model = model_create(actor="anna", **GOOD)
    facts = model_facts(model)
    assert facts is not None
    assert model.facts["max_position_embeddings"] == 40960
    assert model.facts["kv_bytes_per_token_per_gpu"] == 114_688  # as measured on a GPU
    assert model.facts["bundle_bytes"] == 117_440_512  # as measured on a GPU
    assert AuditEntry.objects.get(action="model.create").actor == "anna"


def test_policy_and_aliases_are_made_with_the_model() -> None:
    model = model_create(actor="anna", aliases=["b"], guarantee_bytes="2G", priority=70, **GOOD)
    assert [alias.name for alias in model.aliases.all()] == ["b"]
    assert (model.memory_policy.guarantee_bytes, model.memory_policy.priority) == (2 * GIB, 70)


def test_refused_model_leaves_nothing_but_its_record() -> None:
    with pytest.raises(InvalidInput):
        model_create(actor="anna", **(GOOD | {"dtype": "int3"}))
    assert not Model.objects.exists()
    assert AuditEntry.objects.get(action="model.create").outcome == "refused"


@pytest.mark.parametrize(
    ("served", "aliases"),
    [("taken", []), ("nick", []), ("free", ["taken"]), ("free", ["nick"]), ("free", ["free"])],
)
def test_name_in_use_is_refused_over_both_tables(served: str, aliases: list[str]) -> None:
    make_model(served_model_name="taken", aliases=["nick"])
    assert _wrong(served_model_name=served, aliases=aliases)


def test_model_that_is_not_in_the_catalogue() -> None:
    assert "catalogue" in _wrong(model="nobody/nothing")["model"][0]


def test_folder_inside_the_roots(root: Path) -> None:
    model = model_create(actor="anna", served_model_name="tiny", source="local", model=str(root / "tiny"))
    assert model.model == str((root / "tiny").resolve())
    assert model.facts["max_position_embeddings"] == 512


@pytest.mark.parametrize(
    "path",
    ["{root}/../elsewhere", "/etc", "{root}/link-out", "{root}/nothing", "{root}", "tiny", "{root}-beside/tiny"],
)
def test_folder_that_cannot_stand(root: Path, path: str) -> None:
    outside = root.parent / "elsewhere"
    outside.mkdir()
    (outside / "config.json").write_text("{}")
    (root / "link-out").symlink_to(outside)
    wrong = model_check({"served_model_name": "x", "source": "local", "model": path.format(root=root)})
    assert list(wrong) == ["model"]
    assert wrong["model"][0].endswith(".")


def test_link_inside_the_roots_is_kept_as_the_real_path(root: Path) -> None:
    (root / "link").symlink_to(root / "tiny")
    model = model_create(actor="anna", served_model_name="x", source="local", model=str(root / "link"))
    assert model.model == str((root / "tiny").resolve())


def test_context_above_the_models_maximum() -> None:
    assert "40960" in _wrong(max_model_len=131_072)["max_model_len"][0]


def test_context_left_empty_is_the_models_own() -> None:
    assert model_create(actor="anna", **GOOD).max_model_len is None


def test_tensor_parallel_size_above_the_gpus_of_any_host(host: Host) -> None:
    assert "2" in _wrong(tensor_parallel_size=4)["tensor_parallel_size"][0]


def test_tensor_parallel_size_that_does_not_divide_the_heads() -> None:
    assert "16 attention heads" in _wrong(tensor_parallel_size=3)["tensor_parallel_size"][0]


@pytest.mark.parametrize(
    ("size", "chosen", "word"),
    [(2, [0, 0], "twice"), (1, [0, 1], "exactly 1"), (2, [0], "exactly 2"), (1, ["GPU-nobody"], "no GPU")],
)
def test_gpus_chosen_by_hand(host: Host, size: int, chosen: list[Any], word: str) -> None:
    uuids = [host.gpus.get(index=one).uuid if isinstance(one, int) else one for one in chosen]
    assert word in _wrong(tensor_parallel_size=size, gpu_uuids=uuids)["gpu_uuids"][0]


def test_gpus_of_two_hosts(host: Host) -> None:
    other = make_gpu(host=make_host(name="gpu-b"))
    uuids = [host.gpus.get(index=0).uuid, other.uuid]
    assert "2 hosts" in _wrong(tensor_parallel_size=2, gpu_uuids=uuids)["gpu_uuids"][0]


def test_gpus_of_another_host_than_the_chosen_one(host: Host) -> None:
    other = make_host(name="gpu-b")
    make_gpu(host=other)
    assert "not on gpu-b" in _wrong(host="gpu-b", gpu_uuids=[host.gpus.get(index=0).uuid])["gpu_uuids"][0]


@pytest.mark.parametrize(
    "text",
    ["--port 1", "--por=9999", "--gpu_memory_utilization=0.5", "--host=0.0.0.0", "--api-key x", "--no-such-flag", "x"],
)
def test_extra_arguments_are_refused_in_any_spelling(text: str) -> None:
    assert _wrong(extra_args=text)["extra_args"]


def test_extra_arguments_are_split_as_a_shell_would() -> None:
    model = model_create(actor="anna", **GOOD, extra_args="--max-num-seqs\n 8 --seed '7'")
    argv = command_preview(model).argv
    assert argv[argv.index("--max-num-seqs") + 1] == "8"
    assert argv[argv.index("--seed") + 1] == "7"


def test_risky_arguments_need_the_permission() -> None:
    assert "permission" in _wrong(extra_args="--trust-remote-code")["extra_args"][0]
    assert model_check(GOOD | {"extra_args": "--trust-remote-code"}, allow_risky=True) == {}


def test_weights_that_no_card_can_hold(host: Host) -> None:
    small = make_host(name="small")
    Host.objects.exclude(pk=small.pk).delete()
    make_gpu(host=small, total_bytes=GIB)
    assert "largest card has 1.0 GiB" in _wrong()["model"][0]


def test_pair_of_versions_that_does_not_work_is_refused_for_the_chosen_host() -> None:
    host = make_host(engine_kind="vllm", versions={"vllm": "0.32.0", "kvcached": "0.1.6", "autopatch": True})
    make_gpu(host=host)
    wrong = _wrong(host=host.name)
    assert "0.32.0" in wrong["kvcached"][0]
    assert "0.1.6" in wrong["kvcached"][0]


def test_idle_sleep_needs_sleep_mode() -> None:
    assert _wrong(idle_sleep_after_s=60)["idle_sleep_after_s"]


def test_maximum_below_the_guarantee() -> None:
    assert _wrong(guarantee_bytes="2G", maximum_bytes="1G")["maximum_bytes"]


def test_fallbacks_in_a_circle() -> None:
    first = make_model(served_model_name="first")
    second = make_model(served_model_name="second", fallback=first)
    assert "circle" in model_check({"fallback": second}, model=first)["fallback"][0]


def test_command_is_shown_before_launch_from_the_forms_fields() -> None:
    preview = command_preview(GOOD | {"max_model_len": "4096", "aliases": "b"})
    assert "--max-model-len 4096" in preview.text
    assert "Qwen/Qwen3-0.6B" in preview.argv


def test_command_shows_no_secret(settings: Any) -> None:
    settings.SARDEENZ_HF_TOKEN = "hf_very_secret"
    assert "hf_very_secret" not in command_preview(model_create(actor="anna", **GOOD)).text


def test_change_of_an_engine_option_raises_the_revision() -> None:
    model = model_create(actor="anna", **GOOD)
    assert model_update(model, actor="anna", max_model_len=4096).spec_revision == 2
    assert model_update(model, actor="anna", replicas=2, priority=10).spec_revision == 2
    assert model_update(model, actor="anna", aliases=["b"]).spec_revision == 3


def test_change_against_an_older_revision_is_refused() -> None:
    model = model_create(actor="anna", **GOOD)
    model_update(model, actor="anna", expected_revision=1, max_model_len=4096)
    with pytest.raises(StaleRevision):
        model_update(model, actor="bert", expected_revision=1, max_model_len=2048)
    model.refresh_from_db()
    assert model.max_model_len == 4096


def test_change_of_the_parallel_size_renews_the_figures_per_gpu() -> None:
    model = model_create(actor="anna", **GOOD)
    model_update(model, actor="anna", tensor_parallel_size=2)
    assert model.facts["kv_bytes_per_token_per_gpu"] == 57_344


def test_other_name_needs_the_engines_gone() -> None:
    model = model_create(actor="anna", **GOOD)
    make_instance(model=model)
    with pytest.raises(Conflict, match="old name"):
        model_update(model, actor="anna", served_model_name="z")


def test_live_model_is_not_deleted() -> None:
    row = make_instance()
    with pytest.raises(Conflict, match="live"):
        model_delete(row.model, actor="anna")
    row.state = InstanceState.STOPPED
    row.save()
    model_delete(row.model, actor="anna")
    assert not Model.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_of_two_who_take_one_name_at_once_one_gets_it() -> None:
    fields = {**GOOD, "served_model_name": "x", "aliases": ["y"]}
    swapped = {**GOOD, "served_model_name": "y", "aliases": ["x"]}
    results = race(
        lambda: model_create(actor="anna", **fields),
        lambda: model_create(actor="bert", **swapped),
        lambda: model_create(actor="carl", **fields),
    )
    assert sum(isinstance(one, Model) for one in results) == 1
    assert Model.objects.count() == 1
