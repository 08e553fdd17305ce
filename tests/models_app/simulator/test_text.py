"""Tokens, prose, and answers that are known before they are given."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models_app.simulator import answers, text
from tests.models_app.simulator.engine import ROOT


@given(st.text(max_size=300))
def test_text_survives_encoding(given_text: str) -> None:
    assert text.decode(text.encode(given_text)) == given_text


@given(st.lists(st.integers(min_value=0, max_value=2**50), max_size=20))
def test_any_token_ids_decode_to_something(ids: list[int]) -> None:
    assert isinstance(text.decode(ids), str)


def test_token_is_about_four_characters() -> None:
    sample = "An operator has more models than cards, so several models share one card and their memory moves. " * 20
    assert 3 < len(sample) / len(text.encode(sample)) < 6


def test_prose_depends_on_the_seed_alone() -> None:
    first = "".join(text.word(7, number) for number in range(200))
    assert first == "".join(text.word(7, number) for number in range(200))
    assert first != "".join(text.word(8, number) for number in range(200))
    assert first[0].isupper()
    assert ". " in first


def test_seed_is_alike_in_every_process() -> None:
    code = "from models_app.simulator import text; print(text.seed_of([1, 2, 3]), text.block_hashes([*range(32)], 16))"
    here = f"{text.seed_of([1, 2, 3])} {text.block_hashes([*range(32)], 16)}"
    for salt in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONHASHSEED": salt}, capture_output=True, text=True
        )
        assert found.stdout.strip() == here
    assert text.seed_of([1, 2, 3]) != text.seed_of([1, 2, 3], 1)


def test_hash_of_a_block_stands_for_everything_before_it() -> None:
    one, two = text.block_hashes(list(range(64)), 16), text.block_hashes([9, *range(1, 64)], 16)
    assert len(one) == 4
    assert not set(one) & set(two)
    assert text.block_hashes(list(range(70)), 16) == one


def test_answer_in_parts_is_the_whole_answer() -> None:
    answer = answers.prose(5, 50)
    assert "".join(answer.part(number, number + 1) for number in range(answer.count)) == answer.whole()
    assert answer.finish_reason == "length"


def test_natural_end_costs_one_token_that_shows_as_nothing() -> None:
    answer = answers.prose(5, 10_000)
    assert answer.finish_reason == "stop"
    assert answer.count == text.natural_length(5) + 1
    assert answer.part(answer.count - 1, answer.count) == ""
    assert answers.prose(5, 10_000, ignore_eos=True).finish_reason == "length"
    assert answers.prose(5, 10_000, minimum=5000).count == 5001


@pytest.mark.parametrize("at", [0, 1, 7, 30])
def test_stop_word_is_found_wherever_it_is(at: int) -> None:
    whole = answers.prose(5, 60).whole()
    word = whole.split()[at]
    answer = answers.prose(5, 60, stop=[word])
    assert answer.whole() == whole[: whole.index(word)]
    assert answer.stop_reason == word
    assert "".join(answer.part(number, number + 1) for number in range(answer.count)) == answer.whole()


def test_stop_word_across_two_tokens_is_found() -> None:
    whole = answers.prose(5, 60).whole()
    stop = whole[12:22]
    assert answers.prose(5, 60, stop=[stop]).whole() == whole[: whole.index(stop)]


def test_fixed_text_is_cut_at_the_limit() -> None:
    assert answers.fixed("abcdefgh", 10).whole() == "abcdefgh"
    assert answers.fixed("abcdefgh", 10).finish_reason == "stop"
    assert answers.fixed("abcdefgh", 1).whole() == "abcd"
    assert answers.fixed("abcdefgh", 1).finish_reason == "length"


def test_schema_is_answered_with_something_that_fits_it() -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["a", "b"]},
            "many": {"type": "array", "items": {"type": "number"}, "minItems": 2},
            "maybe": {"anyOf": [{"type": "null"}, {"type": "string"}]},
            "unneeded": {"type": "string"},
        },
        "required": ["name", "kind", "many", "maybe"],
    }
    assert answers.from_schema(schema) == {"name": "simulated", "kind": "a", "many": [0.5, 0.5], "maybe": None}
    assert isinstance(json.loads(answers.forced_json({"type": "json_object"}) or ""), dict)
    assert answers.forced_json({"type": "text"}) is None
    assert answers.forced_json(None) is None


def test_vector_has_length_one_and_differs_by_seed() -> None:
    one, two = text.unit_vector(1, 64), text.unit_vector(2, 64)
    assert sum(value**2 for value in one) == pytest.approx(1, abs=1e-5)
    assert one != two
