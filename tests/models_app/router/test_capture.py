"""Prompts are kept only where that was switched on, in part, and without secrets."""

from __future__ import annotations

import time

import pytest

from models_app.router.capture import KEEP_BYTES, Capture, redact
from models_app.router.table import Key
from tests.models_app.router.support import FakeEngine, Router, key, model, running_router


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
    assert capture["answer"] == response.text
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
    for _ in range(10):
        capture.feed(b"b" * 10_000)
    data = capture.to_json("m", 200, "r")
    assert (len(data["request"]), data["request_cut"]) == (KEEP_BYTES, True)
    assert (len(data["answer"]), data["answer_cut"]) == (KEEP_BYTES, True)


def test_audio_is_not_kept() -> None:
    capture = Capture(Key(id=1, name="k", digest=""), "/v1/audio/transcriptions", b"\x00" * 100, is_text=False)
    assert capture.to_json("m", 200, "r")["request"] == ""
