"""From an engine's answer to the client's: streams piece by piece, other answers as they come, errors in one shape.

Everything here happens after the answer's head has come, so nothing is tried again. ``Tally`` holds what was learnt on
the way.
"""

from __future__ import annotations

import time

import orjson

from models_app.router.capture import Capture
from models_app.router.config import RouterConfig
from models_app.router.errors import Dialect, RouterError, UpstreamError
from models_app.router.reply import Client, Header, Reply
from models_app.router.sse import AnswerTail, Scanner
from models_app.router.streaming import BrokenOff, EventStream, Tally, lost_midway, too_large_answer
from models_app.router.upstream import Connection

#: Headers of an engine's answer that end here: of the connection, or set by us.
_DROPPED = frozenset(
    {
        b"connection",
        b"content-length",
        b"date",
        b"keep-alive",
        b"proxy-authenticate",
        b"server",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"www-authenticate",
        b"x-request-id",
    }
)
_MAX_ERROR_BYTES = 64 * 1024


class Relay:
    """Carries one answer over."""

    __slots__ = ("capture", "client", "config", "connection", "first_byte_s", "idle_s", "reply", "tally")

    def __init__(
        self,
        connection: Connection,
        reply: Reply,
        client: Client,
        tally: Tally,
        config: RouterConfig,
        *,
        first_byte_s: float,
        idle_s: float,
        capture: Capture | None = None,
    ) -> None:
        self.capture = capture
        self.connection = connection
        self.reply = reply
        self.client = client
        self.tally = tally
        self.config = config
        self.first_byte_s = first_byte_s
        self.idle_s = idle_s

    async def run(self, *, strip_usage: bool) -> None:
        """Raises BrokenOff when the engine died in an answer that is no event stream."""
        connection = self.connection
        connection.on_stall = self.client.drop
        content_type = b""
        length: bytes | None = None
        headers: list[Header] = []
        for name, value in connection.headers:
            if name not in _DROPPED:
                headers.append((name, value))
                if name == b"content-type":
                    content_type = value
            elif name == b"content-length":
                length = value
            elif name == b"x-request-id":
                self.reply.headers[0] = (name, value)
        if connection.status >= 400:
            await self._error(content_type, headers)
        elif content_type.startswith(b"text/event-stream"):
            await self._events(headers, strip_usage=strip_usage)
        elif self.reply.started:  # a stream was promised while the client waited
            raise RouterError(503, "engine_error", "The engine's answer is not a stream.", retry_after_s=2)
        else:
            if length is not None:
                headers.append((b"content-length", length))
            await self._whole(headers)

    async def _events(self, headers: list[Header], *, strip_usage: bool) -> None:
        if not self.reply.started:
            headers.append((b"x-accel-buffering", b"no"))
            headers.append(self._overhead(time.monotonic()))
            await self.reply.start(self.connection.status, headers)
        stream = EventStream(
            self.connection,
            self.reply,
            self.client,
            self.tally,
            Scanner(strip_usage=strip_usage),
            idle_s=self.idle_s,
            comment_s=self.config.comment_s,
            limit_bytes=self.config.max_response_bytes,
            capture=self.capture,
        )
        await stream.run(first_byte_s=self.first_byte_s)

    async def _finish(self, body: bytes) -> None:
        self.client.let_go()
        await self.reply.end(body)

    # --- an answer that is not a stream ---------------------------------------------------------------------------

    async def _whole(self, headers: list[Header]) -> None:
        connection, reply, tally = self.connection, self.reply, self.tally
        tail = AnswerTail()
        now = time.monotonic()
        headers.append(self._overhead(now))
        connection.deadline = now + self.idle_s
        connection.deadline_kind = "idle_timeout"
        try:
            if self.config.max_response_bytes is not None:
                await self._collected(headers, tail, self.config.max_response_bytes)
            elif connection.complete:  # small enough to have come with its head
                await self._at_once(headers, tail)
            else:
                await reply.start(connection.status, headers)
                await self._piecewise(tail)
        except UpstreamError as exc:
            tally.failed = exc.kind
            if not reply.started:
                raise lost_midway(exc) from exc
            raise BrokenOff from exc
        tally.prompt_tokens, tally.completion_tokens = tail.usage()

    async def _at_once(self, headers: list[Header], tail: AnswerTail) -> None:
        body = await self.connection.block() or b""
        self.tally.first_byte_at = self.tally.first_byte_at or time.monotonic()
        tail.feed(body)
        if self.capture is not None:
            self.capture.feed(body)
        self.client.let_go()
        await self.reply.whole(self.connection.status, body, headers)

    async def _piecewise(self, tail: AnswerTail) -> None:
        connection, reply, tally = self.connection, self.reply, self.tally
        while (block := await connection.block()) is not None:
            now = time.monotonic()
            connection.deadline = now + self.idle_s  # for the client to take it, too
            tally.first_byte_at = tally.first_byte_at or now
            tail.feed(block)
            if self.capture is not None:
                self.capture.feed(block)
            if connection.at_end:
                await self._finish(block)
                return
            if block:
                await reply.write(block)
            connection.deadline = time.monotonic() + self.idle_s
        await self._finish(b"")

    async def _collected(self, headers: list[Header], tail: AnswerTail, limit: int) -> None:
        """Begin only when the answer is complete: for a server that cannot cut off one that breaks."""
        connection, reply, tally = self.connection, self.reply, self.tally
        body = bytearray()
        while (block := await connection.block()) is not None:
            tally.first_byte_at = tally.first_byte_at or time.monotonic()
            body += block
            if len(body) > limit:
                raise too_large_answer(limit)
            connection.deadline = time.monotonic() + self.idle_s
        tail.feed(bytes(body))
        if self.capture is not None:
            self.capture.feed(bytes(body))
        self.client.let_go()
        await reply.whole(connection.status, bytes(body), headers)

    def _overhead(self, now: float) -> Header:
        return b"x-sardeenz-overhead-ms", b"%.2f" % (self.tally.overhead_s(now) * 1000)

    # --- an error ----------------------------------------------------------------------------------------------------

    async def _error(self, content_type: bytes, headers: list[Header]) -> None:
        """Pass an engine's error on in the dialect's shape, with its status; a refusal of our token is our fault."""
        connection, reply = self.connection, self.reply
        connection.deadline = time.monotonic() + self.idle_s
        connection.deadline_kind = "idle_timeout"
        body = b""
        try:
            while len(body) <= _MAX_ERROR_BYTES and (block := await connection.block()) is not None:
                body += block
        except UpstreamError as exc:
            self.tally.failed = exc.kind
        if self.capture is not None:
            self.capture.feed(body)
        self.tally.failed = self.tally.failed or "engine_error"
        self.tally.first_byte_at = time.monotonic()
        connection.deadline = self.tally.first_byte_at + self.idle_s  # for the client to take it
        status = connection.status
        if status in (401, 403):
            raise RouterError(
                503, "engine_refused_router", "The engine did not accept the router's own token.", retry_after_s=5
            )
        error = engine_error(status, body)
        if status == 503:
            error.retry_after_s = _retry_after(headers)
        if reply.started or not _has_shape(body, reply.dialect):
            self.client.let_go()
            await reply.refuse(error)
            return
        if status == 503 and not any(name == b"retry-after" for name, _ in headers):
            headers.append((b"retry-after", b"2"))
        headers.append((b"content-length", b"%d" % len(body)))
        headers.append(self._overhead(time.monotonic()))
        self.client.let_go()
        await reply.whole(status, body, headers)


def _retry_after(headers: list[Header]) -> float:
    for name, value in headers:
        if name == b"retry-after" and value.isdigit():
            return float(value)
    return 2.0


def _loads(body: bytes) -> object:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def _has_shape(body: bytes, dialect: Dialect) -> bool:
    data = _loads(body)
    if not isinstance(data, dict) or not isinstance(data.get("error"), dict):
        return False
    return dialect is not Dialect.ANTHROPIC or data.get("type") == "error"


def engine_error(status: int, body: bytes) -> RouterError:
    """An engine's error, whatever its shape, as one of ours with the engine's own sentence."""
    data = _loads(body)
    message, code, param = "", None, None
    if isinstance(data, dict):
        inner = data.get("error")
        holder = inner if isinstance(inner, dict) else data
        message = str(holder.get("message") or holder.get("detail") or (inner if isinstance(inner, str) else ""))
        code, param = holder.get("code"), holder.get("param")
    elif body:
        message = body[:500].decode("utf-8", "replace").strip()
    return RouterError(
        status,
        code if isinstance(code, str) else "engine_error",
        message or f"The engine answered with status {status}.",
        param=param if isinstance(param, str) else None,
    )
