"""The model in a form is found and replaced; the rest stays as it was sent."""

from __future__ import annotations

import httpx
import pytest

from models_app.router.errors import RouterError
from models_app.router.multipart import Form
from tests.models_app.router.support import AUTH, FakeEngine, model, running_router

AUDIO = bytes(range(256)) * 400 + b"\r\n--almost\r\n\r\n"


def form(**fields: str) -> tuple[bytes, bytes]:
    request = httpx.Request("POST", "http://x", data=fields, files={"file": ("a.wav", AUDIO, "audio/wav")})
    return request.read(), request.headers["content-type"].encode()


def test_fields_are_found() -> None:
    made = Form(*form(model="m", language="de", stream="true"))
    assert (made.field(b"model"), made.field(b"stream"), made.field(b"language")) == ("m", "true", None)


def test_only_the_model_changes() -> None:
    body, kind = form(model="alias", language="de")
    changed = Form(body, kind).with_field(b"model", "served-name")
    assert changed == body.replace(b"alias", b"served-name")
    assert AUDIO in changed


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"", b"multipart/form-data; boundary=x"),
        (b"--x\r\n", b"multipart/form-data; boundary=x"),
        (b"nonsense", b"multipart/form-data; boundary=x"),
        (b'{"model":"m"}', b"application/json"),
        (b"--x--\r\n", b"multipart/form-data"),
        (b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm', b"multipart/form-data; boundary=x"),
        (b"--x\r\nbroken header\r\n\r\nm\r\n--x--\r\n", b"multipart/form-data; boundary=x"),
    ],
)
def test_what_is_no_form_is_400(body: bytes, kind: bytes) -> None:
    with pytest.raises(RouterError) as refused:
        Form(body, kind)
    assert refused.value.status == 400


def part(name: str, value: str) -> bytes:
    return f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()


@pytest.mark.parametrize("parts", [part("model", "a") + part("model", "b"), part("model", "x" * 2000)])
def test_doubled_or_giant_model_is_400(parts: bytes) -> None:
    with pytest.raises(RouterError):
        Form(parts + b"--x--\r\n", b"multipart/form-data; boundary=x")


async def test_audio_reaches_the_engine_under_the_served_name(engine: FakeEngine) -> None:
    async def take(request: object, answer: object) -> None:
        await answer.json({"text": "hello"})  # type: ignore[attr-defined]

    engine.behaviour = take
    body, kind = form(model="whisper")
    headers = {**AUTH, "Content-Type": kind.decode()}
    async with running_router(model("m", engine, aliases=["whisper"])) as router:
        response = await router.client.post("/v1/audio/transcriptions", content=body, headers=headers)
        assert response.json() == {"text": "hello"}
        missing = await router.client.post("/v1/audio/translations", content=form()[0], headers=headers)
        assert missing.status_code == 400
    assert engine.requests[0].body == body.replace(b"whisper", b"m")
    assert engine.requests[0].headers["content-type"] == kind.decode()
