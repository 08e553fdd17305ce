from __future__ import annotations

from typing import Any

import pytest

from models_app.services.model_fields import is_hub_id, read_fields
from tests.builders import GIB, make_host, make_model

pytestmark = pytest.mark.django_db
GOOD = {"served_model_name": "a", "source": "catalogue", "model": "Qwen/Qwen3-0.6B"}


def _wrong(**fields: Any) -> dict[str, list[str]]:
    return read_fields(GOOD | fields)[1]


def test_good_fields_are_read_in_their_types() -> None:
    host = make_host()
    values, wrong = read_fields(
        GOOD
        | {
            "aliases": "b, c",
            "max_model_len": "8192",
            "enforce_eager": "on",
            "kvcached": "false",
            "host": host.name,
            "initial_limit_bytes": "3G",
            "guarantee_bytes": "0",
            "request_defaults": '{"temperature": 0.2}',
            "max_concurrency": "",
        }
    )
    assert wrong == {}
    assert values["aliases"] == ["b", "c"]
    assert values["max_model_len"] == 8192
    assert values["enforce_eager"] is True
    assert values["kvcached"] is False
    assert values["host"] == host
    assert values["initial_limit_bytes"] == 3 * GIB
    assert values["guarantee_bytes"] == 0
    assert values["request_defaults"] == {"temperature": 0.2}
    assert values["max_concurrency"] is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("served_model_name", ""),
        ("served_model_name", "has space"),
        ("served_model_name", "-starts"),
        ("served_model_name", "a\nb"),
        ("served_model_name", "x" * 129),
        ("served_model_name", ["a"]),
        ("served_model_name", None),
        ("aliases", ["ok", "not ok"]),
        ("aliases", "b b"),
        ("aliases", 5),
        ("source", "ftp"),
        ("model", "x" * 1025),
        ("model", "a\0b"),
        ("hf_revision", "--upload-pack=x"),
        ("max_model_len", 0),
        ("max_model_len", "8k"),
        ("max_model_len", 8192.5),
        ("max_model_len", float("inf")),
        ("dtype", "int3"),
        ("tensor_parallel_size", 0),
        ("tensor_parallel_size", True),
        ("enforce_eager", "perhaps"),
        ("kv_layout", "round"),
        ("replicas", 65),
        ("host", "nowhere"),
        ("gpu_uuids", [1, 2]),
        ("initial_limit_bytes", "a lot"),
        ("initial_limit_bytes", -1),
        ("restart_policy", "sometimes"),
        ("sleep_level", 3),
        ("request_defaults", "{"),
        ("request_defaults", [1]),
        ("request_defaults", {"model": "other"}),
        ("fallback", "nobody"),
        ("priority", 101),
        ("reclaim", "steal"),
        ("colour", "blue"),
    ],
)
def test_wrong_value_gets_a_sentence_at_its_field(field: str, value: Any) -> None:
    wrong = _wrong(**{field: value})
    assert list(wrong) == [field]
    assert wrong[field][0].endswith(".")


def test_what_a_new_model_needs_is_named() -> None:
    assert set(read_fields({})[1]) == {"served_model_name", "source", "model"}


def test_change_needs_only_what_changes() -> None:
    assert read_fields({"replicas": 2}, model=make_model()) == ({"replicas": 2}, {})


@pytest.mark.parametrize("text", ["Qwen/Qwen3-0.6B", "gpt2", "meta-llama/Llama-3.2-1B"])
def test_hub_ids(text: str) -> None:
    assert is_hub_id(text)


@pytest.mark.parametrize("text", ["", "/etc", "a/b/c", "../x", "a b", "a/--x", "-x/y", "https://x/y"])
def test_other_texts_are_no_hub_ids(text: str) -> None:
    assert not is_hub_id(text)
