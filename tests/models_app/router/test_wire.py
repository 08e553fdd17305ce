"""Chunks that are handed on as they came: only whole ones, in order, and only where nobody has to look into them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models_app.router import streaming, wire
from models_app.router.config import RouterConfig
from models_app.router.streaming import EventStream
from models_app.router.upstream import Connection, Pool
from models_app.router.wire import is_whole_chunks, wire_of
from tests.models_app.router.support import AUTH, Answer, FakeEngine, Request, Router, ask, content, running_router
from tests.models_app.router.support import model as route

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
#: Payloads that look like parts of the frame around them.
PIECES = [b"data: a\n\n", b"data: a\r\n\r\n", b"\r\n", b"5\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"\n\n", b"x" * 300]


def framed(data: bytes, *, upper: bool = False) -> bytes:
    return (b"%X\r\n%b\r\n" if upper else b"%x\r\n%b\r\n") % (len(data), data)


def unframed(chunks: bytes) -> bytes:
    out = b""
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        out, chunks = out + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return out


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        (framed(b"data: a\n\n"), True),
        (framed(b"x" * 255, upper=True), True),
        (framed(b"a") + framed(b"bc"), True),
        (b"", False),
        (b"0\r\n\r\n", False),
        (framed(b"a") + b"0\r\n\r\n", False),
        (framed(b"abc")[:-1], False),
        (framed(b"abc")[:-2], False),
        (framed(b"abc") + b"3", False),
        (framed(b"abc") + b"3\r\nab", False),
        (b"3;name=value\r\nabc\r\n", False),
        (b" 3\r\nabc\r\n", False),
        (b"+3\r\nabc\r\n", False),
        (b"1_0\r\n" + b"x" * 16 + b"\r\n", False),
        (b"-3\r\nabc\r\n", False),
        (b"\r\nabc\r\n", False),
        (b"000000003\r\nabc\r\n", False),
        (b"3\r\nabcd\r\n", False),
        (b"ffffffff\r\nabc\r\n", False),
    ],
)
def test_only_whole_chunks_are_whole(data: bytes, whole: bool) -> None:
    for _ in range(2):  # a size that was seen before is remembered
        assert is_whole_chunks(data) is whole


def test_sizes_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_SIZES", {})
    monkeypatch.setattr(wire, "_SIZES_MOST", 3)
    for size in range(1, 20):
        assert is_whole_chunks(framed(b"x" * size))
    assert len(wire._SIZES) == 3


class _Transport:
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def abort(self) -> None: ...


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=8), st.data())
def test_however_it_is_cut_and_whoever_takes_it_the_payload_is_the_same(
    pieces: list[bytes], data: st.DataObject
) -> None:
    loop = asyncio.new_event_loop()
    try:
        connection = Connection(Pool("127.0.0.1", 1, RouterConfig()), loop)
        connection.transport = _Transport()  # type: ignore[assignment]
        connection.busy = True
        out: list[bytes] = []

        def sink(block: bytes) -> bool:
            out.append(block)
            return True

        def wire_sink(chunks: bytes) -> bool:
            if not data.draw(st.booleans()):
                return False
            out.append(unframed(chunks))
            return True

        connection.sink, connection.wire_sink = sink, wire_sink
        whole = HEAD + b"".join(map(framed, pieces)) + b"0\r\n\r\n"
        start = 0
        while start < len(whole):
            end = data.draw(st.integers(start + 1, len(whole)))
            connection._waiter = loop.create_future()
            connection.data_received(whole[start:end])
            if connection._chunks and connection.complete:
                out.append(connection._take_chunks())
            start = end
        assert connection.complete
        assert connection.error is None
        assert b"".join(out) == b"".join(pieces)
    finally:
        loop.close()


# --- through the router ------------------------------------------------------------------------------


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The chunks that took the short way."""
    chunks: list[bytes] = []
    real = EventStream._pass_on

    def pass_on(self: EventStream, data: bytes) -> bool:
        took = real(self, data)
        if took:
            chunks.append(data)
        return took

    monkeypatch.setattr(EventStream, "_pass_on", pass_on)
    return chunks


async def _words(request: Request, answer: Answer) -> None:
    await answer.start()
    for number in range(20):
        await answer.event(content(f"w{number} "))
        await asyncio.sleep(0.002)
    if request.json.get("stream_options", {}).get("include_usage"):
        await answer.event({**content(""), "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 20}})
    await answer.event("[DONE]")
    await answer.end()


def _text(body: str) -> str:
    events = [line[6:] for line in body.split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["delta"]["content"] for event in events[:-1])


async def test_words_take_the_short_way_under_this_uvicorn(
    router: Router, engine: FakeEngine, passed: list[bytes]
) -> None:
    """A uvicorn that has changed inside would make everything take the long way: slower, and still right."""
    engine.behaviour = _words
    response = await router.client.post("/v1/chat/completions", json=ask(stream=True), headers=AUTH)
    assert _text(response.text) == "".join(f"w{number} " for number in range(20))
    assert len(passed) >= 10
    assert all(b"usage" not in one for one in passed)
    await router.wait_for(lambda: bool(router.used))
    assert (router.used[0]["prompt_tokens"], router.used[0]["completion_tokens"]) == (3, 20)


async def test_answers_that_are_looked_at_take_the_long_way(engine: FakeEngine, passed: list[bytes]) -> None:
    engine.behaviour = _words
    bounded = RouterConfig(max_response_bytes=1024**2)
    async with running_router(route("m", engine), config=bounded) as router:
        response = await router.client.post("/v1/chat/completions", json=ask(stream=True), headers=AUTH)
        assert _text(response.text).startswith("w0 w1 ")
    assert passed == []


async def test_other_servers_have_no_wire() -> None:
    async def send(message: Any) -> None:
        return None

    assert wire_of(send) is None
    assert wire_of(streaming.Tally.overhead_s) is None  # type: ignore[arg-type]


async def test_small_answer_leaves_in_one_piece(
    router: Router, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    real = wire.Cork.flush

    def flush(self: wire.Cork) -> None:
        if self._pieces:
            flushed.append(len(self._pieces))
        real(self)

    monkeypatch.setattr(wire.Cork, "flush", flush)
    for _ in range(3):  # on one kept connection
        response = await router.chat()
        assert response.json()["choices"][0]["message"]["content"] == "a b c"
    assert flushed == [2, 2, 2]
    refused = await router.chat("nope")
    assert refused.status_code == 404
    assert flushed[3:] == [2]


async def test_client_that_wants_its_connection_closed_gets_the_whole_answer_first(
    router: Router, engine: FakeEngine
) -> None:
    response = await router.client.post("/v1/chat/completions", json=ask(), headers={**AUTH, "Connection": "close"})
    assert response.json()["choices"][0]["message"]["content"] == "a b c"
    assert response.headers["connection"] == "close"


async def test_answer_larger_than_a_read_is_not_held_back(router: Router, engine: FakeEngine) -> None:
    async def large(request: Request, answer: Answer) -> None:
        await answer.whole(b"x" * 3_000_000, headers={"content-type": "text/plain"})

    engine.behaviour = large
    response = await router.chat()
    assert response.content == b"x" * 3_000_000


async def test_server_that_is_not_uvicorn_gets_both_messages() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await wire.send_whole(send, {"type": "start"}, {"type": "body"})
    assert sent == ["start", "body"]
