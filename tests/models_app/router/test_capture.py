"""SZ-116: prompts are kept only where that was switched on, in part, and without secrets."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from models_app.router.capture import KEEP_BYTES, Capture, redact, stream_text
from models_app.router.table import Key
from tests.models_app.router.support import Answer, FakeEngine, Request, Router, key, model, running_router


async def test_nothing_is_captured_by_default(router: Router) -> None:
    await router.chat()
    assert router.captures == []


async def test_capture_ends_by_itself(engine: FakeEngine) -> None:
    async with running_router(model("m", engine), keys=[key(capture_until=time.time() - 1)]) as router:
        await router.chat()
        assert router.captures == []


@pytest.mark.parametrize("stream", [True, False])
async def test_request_and_answer_are_captured(engine: FakeEngine, stream: bool) -> None:
    async with running_router(model("m", engine), keys=[key(capture_until=time.time() + 60)]) as router:
        response = await router.chat(stream=stream)
        await router.wait_for(lambda: len(router.captures) == 1)
    (capture,) = router.captures
    assert '"hello"' in capture["request"]
    assert capture["answer"] == ("a b c" if stream else response.text)
    assert capture["streamed"] is stream
    assert (capture["status"], capture["model"], capture["key_name"]) == (200, "m", "test")
    assert capture["request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("text", "without"),
    [
        ("my key is sk-proj-abcdefghijklmnop1234", "abcdefghijklmnop"),
        ("sz-0123456789abcdefghij", "0123456789"),
        ("hf_ABCDEFGHIJKLMNOPQRST", "ABCDEFGHIJ"),
        ("Authorization: Bearer abcdef0123456789", "abcdef0123456789"),
        ('{"password": "hunter2hunter2"}', "hunter2"),
        ('{\\"api_key\\": \\"hunter2hunter2\\"}', "hunter2"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc", "eyJzdWIi"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIabc", "MIIabc"),
        ("postgresql://anna:hunter2hunter2@db/x", "hunter2"),
        ("github_pat_11ABCDEFG0abcdefghij_x", "11ABCDEFG0"),
        ("AIza" + "Sy" * 17 + "x", "SySySy"),
        ("data:image/png;base64,iVBORw0KGgoAAAA", "iVBORw0"),
        ('{"data":"' + "QUFB" * 100 + '"}', "QUFBQUFB"),
    ],
)
def test_secrets_and_media_are_removed(text: str, without: str) -> None:
    assert without not in redact(text)


def test_plain_words_stay() -> None:
    text = "The token count and the secret garden; skill-based, data: none, bearer of news"
    assert redact(text) == text


def test_capture_is_bounded() -> None:
    capture = Capture(Key(id=1, name="k", digest=""), "/v1/x", b"a" * 100_000, is_text=True)
    for _ in range(100):
        capture.feed(b"b" * 10_000)
    data = capture.to_json("m", 200, "r")
    assert (len(data["request"]), data["request_cut"]) == (KEEP_BYTES, True)
    assert (len(data["answer"]), data["answer_cut"]) == (KEEP_BYTES, True)


def test_audio_is_not_kept() -> None:
    capture = Capture(Key(id=1, name="k", digest=""), "/v1/audio/transcriptions", b"\x00" * 100, is_text=False)
    assert capture.to_json("m", 200, "r")["request"] == ""


def _events(*events: dict[str, Any]) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"


def _chat(text: str, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text, **delta}}]}


def test_secret_in_pieces_over_many_events_is_removed() -> None:
    capture = Capture(Key(id=1, name="k", digest=""), "/v1/chat/completions", b"{}", is_text=True)
    for piece in ("Use sk-", "proj-abcd", "efghijkl", "mnop1234", " for it"):
        capture.feed(_events(_chat(piece)).removesuffix(b"data: [DONE]\n\n"))
    data = capture.to_json("m", 200, "r")
    assert data["answer"] == "Use [redacted] for it"
    assert "abcd" not in json.dumps(data)


@pytest.mark.parametrize(
    ("events", "text"),
    [
        ([{"choices": [{"index": 0, "text": "a"}]}, {"choices": [{"index": 0, "text": "b"}]}], "ab"),
        ([{"choices": [{"index": 0, "delta": {"role": "assistant"}}]}, _chat("a"), _chat("b")], "ab"),
        (
            [
                {"type": "response.output_text.delta", "delta": "a"},
                {"type": "response.output_text.delta", "delta": "b"},
                {"type": "response.completed", "response": {"output": [{"content": [{"text": "ab"}]}]}},
            ],
            "ab",
        ),
        (
            [
                {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
                {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "b"}},
            ],
            "ab",
        ),
        ([_chat("a"), {"error": {"message": "lost"}}], "[choice content]\na\n\n[error]\nlost"),
    ],
)
def test_text_of_a_stream_is_put_together_in_every_dialect(events: list[dict[str, Any]], text: str) -> None:
    assert stream_text(_events(*events)) == text


def test_reasoning_and_tool_calls_are_kept_apart() -> None:
    call = {"index": 0, "function": {"name": "f", "arguments": '{"a"'}}
    rest = {"index": 0, "function": {"arguments": ": 1}"}}
    text = stream_text(
        _events(_chat("", reasoning_content="Hm"), _chat("", tool_calls=[call]), _chat("x", tool_calls=[rest]))
    )
    assert "Hm" in text
    assert '{"a": 1}' in text
    assert text.count("[") == 3


async def test_an_engines_refusal_is_captured(engine: FakeEngine) -> None:
    async def refuse(request: Request, answer: Answer) -> None:
        await answer.json({"error": {"message": "too long", "type": "x", "param": None, "code": 400}}, 400)

    engine.behaviour = refuse
    async with running_router(model("m", engine), keys=[key(capture_until=time.time() + 60)]) as router:
        await router.chat()
        await router.wait_for(lambda: len(router.captures) == 1)
    assert router.captures[0]["status"] == 400
    assert "too long" in router.captures[0]["answer"]
