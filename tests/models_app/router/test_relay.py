"""An engine's answer on its way to the client: streams, deaths, slow readers, leaving clients, errors."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from models_app.router.config import RouterConfig
from models_app.router.upstream import Connection, Pool
from tests.models_app.router.support import (
    AUTH,
    HANGS_S,
    KEY,
    Answer,
    FakeEngine,
    Request,
    Router,
    ask,
    chat,
    content,
    model,
    running_engines,
    running_router,
)


def events(text: str) -> list[Any]:
    """What the data lines hold; fails on what does not parse."""
    found = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    return [one if one == "[DONE]" else json.loads(one) for one in found]


def words(text: str) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for event in events(text)
        if isinstance(event, dict)
        for choice in event.get("choices", ())
    )


async def raw_stream(router: Router, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request on a bare socket, for clients that misbehave."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=2**16)
    body = json.dumps(ask(**fields)).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (KEY.encode(), len(body), body)
    )
    await writer.drain()
    return reader, writer


# --- streams ---


async def test_stream_is_relayed_event_by_event(router: Router) -> None:
    response = await router.chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    assert words(response.text) == "a b c"
    assert response.text.endswith("data: [DONE]\n\n")


async def test_usage_is_counted_but_not_shown_to_who_did_not_ask(router: Router, engine: FakeEngine) -> None:
    response = await router.chat(stream=True)
    assert engine.requests[0].json["stream_options"] == {"include_usage": True}
    assert "usage" not in response.text
    await router.wait_for(lambda: bool(router.used))
    (record,) = router.used
    assert (record["prompt_tokens"], record["completion_tokens"], record["requests"]) == (7, 3, 1)
    assert sum(record["ttft_histogram"].values()) == 1


async def test_usage_is_shown_to_who_asked(router: Router) -> None:
    response = await router.chat(stream=True, stream_options={"include_usage": True})
    assert [event["usage"]["total_tokens"] for event in events(response.text) if "usage" in event] == [10]


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"continuous_usage_stats": False}])
async def test_usage_is_asked_for_whatever_the_options_say(
    router: Router, engine: FakeEngine, options: dict[str, Any] | None
) -> None:
    response = await router.chat(stream=True, stream_options=options)
    assert engine.requests[0].json["stream_options"]["include_usage"] is True
    assert "usage" not in response.text


async def test_usage_in_every_chunk_is_not_forced_on_who_did_not_ask(router: Router, engine: FakeEngine) -> None:
    await router.chat(stream=True, stream_options={"include_usage": False, "continuous_usage_stats": True})
    assert engine.requests[0].json["stream_options"] == {"include_usage": True, "continuous_usage_stats": False}


async def test_first_chunk_arrives_before_the_last_is_made(router: Router, engine: FakeEngine) -> None:
    go_on = asyncio.Event()

    async def two_parts(request: Request, answer: Answer) -> None:
        await answer.start()
        await answer.event(content("first"))
        await go_on.wait()
        await answer.event(content("second"))
        await answer.end()

    engine.behaviour = two_parts
    async with router.client.stream("POST", "/v1/chat/completions", json=ask(stream=True), headers=AUTH) as response:
        parts = response.aiter_text()
        assert words(await anext(parts)) == "first"
        go_on.set()
        assert words(await anext(parts)) == "second"


async def test_comment_never_falls_inside_an_event(engine: FakeEngine) -> None:
    async def in_two_pieces(request: Request, answer: Answer) -> None:
        await answer.start()
        await answer.event(content("a"))
        await answer.chunk(b'data: {"choices":[{"index":0,"delta":')
        await asyncio.sleep(0.3)
        await answer.chunk(b'{"content":"b"}}]}\n\n')
        await answer.event("[DONE]")
        await answer.end()

    engine.behaviour = in_two_pieces
    config = RouterConfig(sweep_s=0.01, comment_s=0.05)
    async with running_router(model("m", engine), config=config) as router:
        text = (await router.chat(stream=True)).text
    assert words(text) == "ab"
    assert text.count(": waiting\n\n") >= 1
    assert all(line.startswith((":", "data: ")) for line in text.split("\n") if line)


async def test_events_cut_anywhere_come_out_whole(router: Router, engine: FakeEngine) -> None:
    whole = (
        b"".join(f"data: {json.dumps(content(word))}\n\n".encode() for word in ("a", "b", "c")) + b"data: [DONE]\n\n"
    )

    async def cut(request: Request, answer: Answer) -> None:
        await answer.start()
        for start in range(0, len(whole), 37):
            await answer.chunk(whole[start : start + 37])
            await asyncio.sleep(0)
        await answer.end()

    engine.behaviour = cut
    assert (await router.chat(stream=True)).content == whole


async def test_event_ended_by_carriage_returns_is_understood(router: Router, engine: FakeEngine) -> None:
    async def crlf(request: Request, answer: Answer) -> None:
        await answer.start()
        await answer.chunk(f"data: {json.dumps(content('a'))}\r\n\r\n".encode())
        await answer.chunk(
            f"data: {json.dumps({**content(''), 'choices': [], 'usage': {'prompt_tokens': 5}})}\r\n\r\n".encode()
        )
        await answer.chunk(b"data: [DONE]\r\n\r\n")
        await answer.end()

    engine.behaviour = crlf
    text = (await router.chat(stream=True)).text
    assert words(text.replace("\r", "")) == "a"
    assert "usage" not in text
    await router.wait_for(lambda: bool(router.used))
    assert router.used[0]["prompt_tokens"] == 5


# --- an engine that fails in the middle ---


async def dies_midway(request: Request, answer: Answer) -> None:
    await answer.start()
    await answer.event(content("a"))
    await answer.chunk(b'data: {"half')
    await asyncio.sleep(0.02)
    answer.die()


async def test_engine_that_dies_in_a_stream_ends_it_with_an_error_event() -> None:
    async with running_engines(dies_midway, chat) as engines, running_router(model("m", *engines)) as router:
        router.app.targets._turn = 1  # the next turn is the first engine's
        response = await router.chat(stream=True)
        *_, last = events(response.text)
        assert last["error"]["code"] == "engine_lost"
        assert "[DONE]" not in response.text
        assert len(engines[0].requests) == 1
        assert engines[1].requests == []  # nothing is tried again after the first byte
        await router.wait_for(lambda: bool(router.used))
        assert router.used[0]["errors"] == 1
        assert router.app.targets.state(router.source.table.models["m"].targets[0]).cooled_until > 0


async def test_engine_that_dies_after_done_has_answered(router: Router, engine: FakeEngine) -> None:
    async def done_then_dead(request: Request, answer: Answer) -> None:
        await answer.start()
        await answer.event(content("a"))
        await answer.event("[DONE]")
        await asyncio.sleep(0.02)
        answer.die()

    engine.behaviour = done_then_dead
    response = await router.chat(stream=True)
    assert "error" not in response.text
    await router.wait_for(lambda: bool(router.used))
    assert router.used[0]["errors"] == 0


async def test_engine_that_falls_silent_in_a_stream_ends_it(engine: FakeEngine) -> None:
    async def silent(request: Request, answer: Answer) -> None:
        await answer.start()
        await answer.event(content("a"))
        await answer.gone.wait()

    engine.behaviour = silent
    async with running_router(model("m", engine), config=RouterConfig(sweep_s=0.01, idle_s=0.1)) as router:
        response = await router.chat(stream=True)
    assert events(response.text)[-1]["error"]["code"] == "engine_timeout"
    assert engine.gone == 1


async def test_stream_has_no_limit_in_all(engine: FakeEngine) -> None:
    async def long(request: Request, answer: Answer) -> None:
        await answer.start()
        for _ in range(12):
            await asyncio.sleep(0.1)
            await answer.event(content("x"))
        await answer.event("[DONE]")
        await answer.end()

    engine.behaviour = long
    config = RouterConfig(sweep_s=0.01, idle_s=1.0, first_byte_s=1.0)
    async with running_router(model("m", engine), config=config) as router:
        assert words((await router.chat(stream=True)).text) == "x" * 12


async def test_answer_that_breaks_off_is_cut_off_for_the_client_too(router: Router, engine: FakeEngine) -> None:
    async def half(request: Request, answer: Answer) -> None:
        await answer.start("application/json")
        await answer.chunk(b'{"half":')
        await asyncio.sleep(0.02)
        answer.die()

    engine.behaviour = half
    with pytest.raises(httpx.RemoteProtocolError):
        await router.chat()


@pytest.mark.parametrize(
    ("path", "first", "kind"),
    [
        ("/v1/messages", {"type": "content_block_delta"}, "error"),
        ("/v1/responses", {"type": "response.output_text.delta"}, "error"),
    ],
)
async def test_error_event_speaks_the_dialect(
    router: Router, engine: FakeEngine, path: str, first: dict[str, Any], kind: str
) -> None:
    async def dies(request: Request, answer: Answer) -> None:
        await answer.start()
        await answer.chunk(f"event: {first['type']}\ndata: {json.dumps(first)}\n\n".encode())
        await asyncio.sleep(0.02)
        answer.die()

    engine.behaviour = dies
    response = await router.client.post(path, json=ask(stream=True), headers=AUTH)
    assert f"event: {kind}\ndata: " in response.text
    assert events(response.text)[-1]["type"] == "error"


# --- a client that leaves, or reads slowly ---


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_leaves_frees_the_engine_at_once(router: Router, engine: FakeEngine, stream: bool) -> None:
    """How soon is measured by ``tests.bench.cancel``; here, that it happens while the engine says nothing more."""

    async def endless(request: Request, answer: Answer) -> None:
        if stream:
            await answer.start()
            await answer.event(content("a"))
        await answer.gone.wait()

    engine.behaviour = endless
    _, writer = await raw_stream(router, stream=stream)
    await router.wait_for(lambda: len(engine.requests) == 1)
    writer.close()
    await router.wait_for(lambda: engine.gone == 1)
    await router.wait_for(lambda: router.app.metrics.gone.values.get(("m",)) == 1)
    await router.wait_for(lambda: bool(router.used))
    assert router.used[0]["errors"] == 0


async def test_slow_reader_fills_no_memory(router: Router, engine: FakeEngine) -> None:
    piece = content("x" * 16_000)
    written = 0

    async def firehose(request: Request, answer: Answer) -> None:
        nonlocal written
        await answer.start()
        while True:
            await answer.event(piece)
            written += 16_000

    engine.behaviour = firehose
    reader, writer = await raw_stream(router, stream=True)
    await reader.read(100)
    before, still = 0, 0
    async with asyncio.timeout(HANGS_S):
        while still < 5:  # until the engine stands still
            await asyncio.sleep(0.05)
            still = still + 1 if written == before else 0
            before = written
    (state,) = router.app.targets
    (connection,) = state.pool.busy
    assert connection._buffered <= 4 * router.app.config.buffer_bytes
    writer.close()
    await router.wait_for(lambda: engine.gone == 1)


async def test_client_that_never_reads_is_dropped_in_the_end(engine: FakeEngine) -> None:
    async def firehose(request: Request, answer: Answer) -> None:
        await answer.start()
        while True:
            await answer.event(content("x" * 16_000))

    engine.behaviour = firehose
    async with running_router(model("m", engine), config=RouterConfig(sweep_s=0.02, idle_s=0.3)) as router:
        _, writer = await raw_stream(router, stream=True)
        await router.wait_for(lambda: engine.gone == 1)
        writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_answers_are_bounded_where_the_server_does_not_pace(engine: FakeEngine, stream: bool) -> None:
    async def long(request: Request, answer: Answer) -> None:
        await answer.start("text/event-stream" if stream else "application/json")
        for _ in range(100):
            await answer.event(content("x" * 10_000))
        await answer.end()

    engine.behaviour = long
    config = RouterConfig(max_response_bytes=50_000)
    async with running_router(model("m", engine), config=config) as router:
        response = await router.chat(stream=stream)
    assert '"code":"response_too_large"' in response.text
    assert response.status_code == (200 if stream else 503)


async def test_broken_answer_is_503_where_the_server_cannot_cut_it_off(engine: FakeEngine) -> None:
    async def half(request: Request, answer: Answer) -> None:
        await answer.start("application/json")
        await answer.chunk(b'{"half":')
        await asyncio.sleep(0.02)
        answer.die()

    engine.behaviour = half
    config = RouterConfig(max_response_bytes=50_000)
    async with running_router(model("m", engine), config=config) as router:
        response = await router.chat()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_lost")
        engine.behaviour = chat
        assert (await router.chat()).json()["choices"]


async def test_stream_ends_with_an_error_event_when_the_server_ends(engine: FakeEngine) -> None:
    async def endless(request: Request, answer: Answer) -> None:
        await answer.start()
        await answer.event(content("a"))
        await answer.gone.wait()

    engine.behaviour = endless
    sent: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if not sent:
            sent.append(b"")
            return {"type": "http.request", "body": json.dumps(ask(stream=True)).encode(), "more_body": False}
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b""))

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"authorization", AUTH["Authorization"].encode())],
    }
    async with running_router(model("m", engine)) as router:
        request = asyncio.ensure_future(router.app(scope, receive, send))
        await router.wait_for(lambda: any(b'"content"' in part for part in sent))
        request.cancel()
        await request
        assert b'"code":"router_stopping"' in sent[-1]
        await router.wait_for(lambda: engine.gone == 1)


async def test_stream_that_was_left_counts_what_had_come(router: Router, engine: FakeEngine) -> None:
    async def endless(request: Request, answer: Answer) -> None:
        await answer.start()
        for _ in range(5):
            await answer.event(content("a"))
            await asyncio.sleep(0.01)
        await answer.gone.wait()

    engine.behaviour = endless
    reader, writer = await raw_stream(router, stream=True)
    text = b""
    async with asyncio.timeout(HANGS_S):
        while text.count(b'"content"') < 5:
            text += await reader.read(1000)
    writer.close()
    await router.wait_for(lambda: bool(router.used))
    assert 1 <= router.used[0]["completion_tokens"] <= 5


async def test_slow_reader_gets_the_whole_stream_in_the_end(router: Router, engine: FakeEngine) -> None:
    count = 400

    async def long(request: Request, answer: Answer) -> None:
        await answer.start()
        for number in range(count):
            await answer.event(content(f"<{number}>" + "x" * 16_000))
        await answer.event("[DONE]")
        await answer.end()

    engine.behaviour = long
    reader, writer = await raw_stream(router, stream=True)
    await asyncio.sleep(0.3)  # by now everything on the way is full
    text = b""
    async with asyncio.timeout(3 * HANGS_S):
        while not text.endswith(b"0\r\n\r\n"):
            text += await reader.read(2**20)
    writer.close()
    numbers = [int(one) for one in re.findall(rb"<(\d+)>", text)]
    assert numbers == list(range(count))


# --- answers that are no stream ---


async def test_usage_of_a_plain_answer_is_counted(router: Router) -> None:
    await router.chat()
    await router.wait_for(lambda: bool(router.used))
    (record,) = router.used
    assert (record["prompt_tokens"], record["completion_tokens"], record["key_name"], record["model"]) == (
        7,
        3,
        "test",
        "m",
    )
    assert record["ttft_histogram"] == {}  # when its first token was made, nobody can tell


async def test_large_answer_arrives_unchanged(router: Router, engine: FakeEngine) -> None:
    data = {"text": "ä" * 400_000, "usage": {"prompt_tokens": 1}}

    async def large(request: Request, answer: Answer) -> None:
        await answer.json(data)

    engine.behaviour = large
    assert (await router.chat()).json() == data


@pytest.mark.parametrize("kind", ["text/plain; charset=utf-8", "application/x-subrip", "audio/mpeg"])
async def test_answer_that_is_no_json_passes_with_its_type(router: Router, engine: FakeEngine, kind: str) -> None:
    async def text(request: Request, answer: Answer) -> None:
        await answer.whole("1\n00:00 --> 00:01\nÄ".encode(), headers={"content-type": kind})

    engine.behaviour = text
    files = {"file": ("a.wav", b"\x00\r\n--xx\r\n" * 1000, "audio/wav")}
    response = await router.client.post(
        "/v1/audio/transcriptions", data={"model": "m", "response_format": "srt"}, files=files, headers=AUTH
    )
    assert response.headers["content-type"] == kind
    assert response.text == "1\n00:00 --> 00:01\nÄ"


async def test_answer_that_ends_with_the_connection_is_whole(router: Router, engine: FakeEngine) -> None:
    async def bare(request: Request, answer: Answer) -> None:
        answer.writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{"a":1}')
        await answer.writer.drain()
        answer.writer.close()

    engine.behaviour = bare
    assert (await router.chat()).json() == {"a": 1}


async def test_informational_answer_is_passed_over(router: Router, engine: FakeEngine) -> None:
    async def early(request: Request, answer: Answer) -> None:
        answer.writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        await answer.json({"a": 1})

    engine.behaviour = early
    response = await router.chat()
    assert (response.status_code, response.json()) == (200, {"a": 1})
    assert "link" not in response.headers


# --- errors of the engine ---


async def test_engines_error_passes_as_it_is(router: Router, engine: FakeEngine) -> None:
    error = {"error": {"message": "too long", "type": "BadRequestError", "param": "messages", "code": 400}}

    async def refuse(request: Request, answer: Answer) -> None:
        await answer.json(error, 400)

    engine.behaviour = refuse
    response = await router.chat()
    assert (response.status_code, response.json()) == (400, error)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (500, b"Internal Server Error", "Internal Server Error"),
        (400, b'{"object":"error","message":"old shape"}', "old shape"),
        (422, b'{"detail":"fastapi"}', "fastapi"),
        (500, b"", "The engine answered with status 500."),
        (404, b'{"error":"text"}', "text"),
    ],
)
async def test_other_shapes_become_openais(
    router: Router, engine: FakeEngine, status: int, body: bytes, message: str
) -> None:
    async def refuse(request: Request, answer: Answer) -> None:
        await answer.whole(body, status)

    engine.behaviour = refuse
    response = await router.chat()
    assert (response.status_code, response.json()["error"]["message"]) == (status, message)


async def test_engine_that_refuses_our_token_is_our_fault(router: Router, engine: FakeEngine) -> None:
    async def refuse(request: Request, answer: Answer) -> None:
        await answer.json({"error": "Unauthorized"}, 401)

    engine.behaviour = refuse
    response = await router.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_refused_router")


async def test_what_is_not_http_is_503(router: Router, engine: FakeEngine) -> None:
    async def noise(request: Request, answer: Answer) -> None:
        answer.writer.write(b"\x00\x01\x02 this is not HTTP\r\n\r\n")
        await answer.writer.drain()
        await answer.gone.wait()

    engine.behaviour = noise
    response = await router.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unreachable")


async def test_error_event_from_the_engine_counts_as_error(router: Router, engine: FakeEngine) -> None:
    async def failing(request: Request, answer: Answer) -> None:
        await answer.start()
        await answer.event(content("a"))
        await answer.event({"error": {"message": "engine core died", "code": 500}})
        await answer.event("[DONE]")
        await answer.end()

    engine.behaviour = failing
    assert "engine core died" in (await router.chat(stream=True)).text
    await router.wait_for(lambda: bool(router.used))
    assert router.used[0]["errors"] == 1


# --- what is left of an answer that nobody took ---


class PausableTransport:
    def __init__(self) -> None:
        self.reading = True

    def write(self, data: bytes) -> None: ...
    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None: ...


async def test_kept_connection_reads_again_when_the_end_of_its_answer_was_not_taken() -> None:
    """A client that leaves between the engine's last bytes and their turn: the next request would wait for ever."""
    pool = Pool("127.0.0.1", 1, RouterConfig())
    connection = Connection(pool, asyncio.get_running_loop())
    transport = PausableTransport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection.ask(b"POST / HTTP/1.1\r\n\r\n", b"")
    size = pool.config.buffer_bytes + 1
    connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size)
    assert connection.complete
    assert not transport.reading
    connection.finish()
    assert pool.take() is connection
    assert transport.reading


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_never_reads_the_end_is_dropped(engine: FakeEngine, stream: bool) -> None:
    """What is sent last waits for the client like everything before it, and no longer."""

    async def two_pieces(request: Request, answer: Answer) -> None:
        await answer.start("text/event-stream" if stream else "application/json")
        await answer.event(content("a"))
        await answer.end()

    engine.behaviour = two_pieces
    never = asyncio.Event()
    asked = False

    async def receive() -> dict[str, Any]:
        nonlocal asked
        if asked:
            await never.wait()
        asked = True
        return {"type": "http.request", "body": json.dumps(ask(stream=stream)).encode(), "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            await never.wait()  # a server whose client takes nothing any more

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [(b"authorization", AUTH["Authorization"].encode())],
    }
    async with running_router(model("m", engine), config=RouterConfig(sweep_s=0.02, idle_s=0.2)) as router:
        request = asyncio.ensure_future(router.app(scope, receive, send))
        await asyncio.wait({request}, timeout=HANGS_S)
        try:
            assert request.done()
            assert router.app.metrics.gone.values["m",] == 1
        finally:
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)


async def test_trailers_are_no_headers(router: Router, engine: FakeEngine) -> None:
    async def with_trailer(request: Request, answer: Answer) -> None:
        answer.writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
            b"2\r\n{}\r\n0\r\nx-late: 1\r\n\r\n"
        )
        await answer.writer.drain()

    engine.behaviour = with_trailer
    response = await router.chat()
    assert response.json() == {}
    assert "x-late" not in response.headers


# --- usage of those who would rather not be counted ---


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": 1},
        {"stream": "true"},
        {"stream": "Yes"},
        {"stream": True, "stream_options": {"include_usage": "false"}},
        {"stream": True, "stream_options": {"include_usage": "0"}},
    ],
    ids=str,
)
async def test_usage_is_asked_for_however_the_stream_is_asked_for(
    router: Router, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    """An engine reads these as booleans; a client that writes so must not go uncounted."""
    response = await router.chat(**fields)
    assert engine.requests[0].json["stream_options"]["include_usage"] is True
    assert "usage" not in response.text
    await router.wait_for(lambda: bool(router.used))
    assert (router.used[0]["prompt_tokens"], router.used[0]["completion_tokens"]) == (7, 3)


@pytest.mark.parametrize("value", [1, "yes"])
async def test_usage_is_shown_to_who_asked_in_other_words(router: Router, value: object) -> None:
    response = await router.chat(stream=True, stream_options={"include_usage": value})
    assert "usage" in response.text
