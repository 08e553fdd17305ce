"""What is understood of an event stream, whatever pieces it comes in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models_app.router.sse import MAX_HELD_BYTES, AnswerTail, Scanner, events_end, has_content, usage_of


def event(data: Any) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


COHERE = b'{"id":"e","embeddings":{"float":[[0.1]]},"meta":{"billed_units":{"input_tokens":7}}}'
CONTENT = event({"choices": [{"index": 0, "delta": {"content": 'he said "usage": {"a":1}'}}]})
USAGE = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}})
DONE = b"data: [DONE]\n\n"


@given(st.lists(st.sampled_from([CONTENT, USAGE, DONE, b": comment\n\n"]), max_size=6), st.data())
def test_any_cut_gives_the_same_stream(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    scanner = Scanner(strip_usage=True)
    out = b""
    start = 0
    while start < len(whole):
        end = data.draw(st.integers(start + 1, len(whole)))
        piece = scanner.feed(whole[start:end])
        assert not piece or piece.endswith(b"\n\n")
        out += piece
        start = end
    assert out + scanner.rest() == whole.replace(USAGE, b"")
    assert (scanner.prompt_tokens, scanner.completion_tokens) == ((5, 2) if USAGE in parts else (0, 0))


def test_usage_that_was_asked_for_stays() -> None:
    assert Scanner(strip_usage=False).feed(CONTENT + USAGE) == CONTENT + USAGE


def test_usage_beside_content_stays() -> None:
    both = event({"choices": [{"delta": {"content": "a"}}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}})
    scanner = Scanner(strip_usage=True)
    assert scanner.feed(both) == both
    assert scanner.completion_tokens == 1


def test_generated_text_that_looks_like_usage_is_no_usage() -> None:
    scanner = Scanner(strip_usage=True)
    assert scanner.feed(CONTENT) == CONTENT
    assert scanner.completion_tokens == 0


@pytest.mark.parametrize(
    ("data", "end"), [(b"a\n\nb", 3), (b"a\r\n\r\nb", 5), (b"a\r\rb", 3), (b"a\nb", 0), (b"", 0), (b"\n\n", 2)]
)
def test_ends_of_events(data: bytes, end: int) -> None:
    assert events_end(data) == end


def test_event_without_end_is_handed_on_in_pieces_past_the_bound() -> None:
    scanner = Scanner(strip_usage=False)
    assert scanner.feed(b"data: " + b"x" * 1000) == b""
    assert scanner.inside is False
    out = scanner.feed(b"x" * MAX_HELD_BYTES)
    assert len(out) == MAX_HELD_BYTES + 1006
    assert scanner.inside is True
    assert scanner.feed(b"\n\n") == b"\n\n"
    assert scanner.inside is False


@pytest.mark.parametrize(
    ("data", "found"),
    [
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, False),
        ({"choices": [{"delta": {"content": "a"}}]}, True),
        ({"choices": [{"delta": {"reasoning_content": "hm"}}]}, True),
        ({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, True),
        ({"choices": [{"text": "a"}]}, True),
        ({"choices": []}, False),
        ({"type": "message_start"}, False),
        ({"type": "content_block_delta"}, True),
        ({"type": "response.created"}, False),
        ({"type": "response.output_text.delta"}, True),
        ({"choices": ["odd"]}, False),
    ],
)
def test_first_content(data: dict[str, Any], found: bool) -> None:
    assert has_content(data) is found


@pytest.mark.parametrize(
    ("data", "usage"),
    [
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 4}}, (3, 4)),
        ({"usage": {"prompt_tokens": 3}}, (3, -1)),
        ({"message": {"usage": {"input_tokens": 3, "output_tokens": 1}}}, (3, 1)),
        ({"response": {"usage": {"input_tokens": 3, "output_tokens": 9}}}, (3, 9)),
        ({"usage": {"output_tokens": 9}}, (-1, 9)),
        ({"usage": None}, None),
        ({"usage": {"type": "duration", "seconds": 4}}, None),
        ({}, None),
    ],
)
def test_usage_of_each_dialect(data: dict[str, Any], usage: tuple[int, int] | None) -> None:
    assert usage_of(data) == usage


def test_messages_usage_is_put_together_from_two_events() -> None:
    scanner = Scanner(strip_usage=False)
    scanner.feed(event({"type": "message_start", "message": {"usage": {"input_tokens": 11, "output_tokens": 1}}}))
    scanner.feed(event({"type": "message_delta", "usage": {"output_tokens": 20}}))
    scanner.feed(event({"type": "message_stop"}))
    assert (scanner.prompt_tokens, scanner.completion_tokens, scanner.ended) == (11, 20, True)


def test_tail_of_an_answer_holds_its_usage() -> None:
    answer = {
        "choices": [{"text": '"usage":{"prompt_tokens":9}'}],
        "usage": {"prompt_tokens": 1, "d": {"c": 0}},
        "x": None,
    }
    body = json.dumps(answer).encode()
    for size in (1, 7, 10_000):
        tail = AnswerTail()
        for start in range(0, len(body), size):
            tail.feed(body[start : start + size])
        assert tail.usage() == (1, 0)


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"usage":', b'{"usage": {"prompt', b'{"usage": null}', b'{"usage":{}}', b"\xff"]
)
def test_answer_without_usage_counts_nothing(body: bytes) -> None:
    tail = AnswerTail()
    tail.feed(body)
    assert tail.usage() == (0, 0)


def test_cohere_tells_its_tokens_under_another_name() -> None:
    tail = AnswerTail()
    tail.feed(COHERE)
    assert tail.usage() == (7, 0)


@pytest.mark.parametrize("size", [1000, 100_000, 10_000_000])
@pytest.mark.parametrize(
    "answer",
    [
        {"id": "r", "usage": {"prompt_tokens": 11, "total_tokens": 11}, "results": [{"document": "d" * 50_000}]},
        {"choices": [], "usage": {"prompt_tokens": 11}, "prompt_token_ids": list(range(20_000))},
    ],
    ids=["ranking", "chat"],
)
def test_usage_long_before_the_end_is_found(answer: dict[str, Any], size: int) -> None:
    """As vLLM orders these answers; a long rest must not make the tokens free."""
    body = json.dumps(answer).encode()
    tail = AnswerTail()
    for start in range(0, len(body), size):
        tail.feed(body[start : start + size])
    assert tail.usage() == (11, 0)
