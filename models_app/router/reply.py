"""The client's side of one request: what was sent to it, and whether it is still there."""

from __future__ import annotations

import asyncio
import os
from itertools import count

from models_app.router.errors import Dialect, RouterError
from models_app.router.request import Receive, Send

Header = tuple[bytes, bytes]

_PREFIX = f"req-{os.urandom(8).hex()}-"  # each process imports this module for itself
_numbers = count(1)

SSE_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


def request_id_from(value: bytes | None) -> str:
    """The client's request id when it is fit for a header and a log line, else one of our own."""
    if value is not None and 0 < len(value) <= 128 and value.isascii():
        text = value.decode("ascii")
        if text.isprintable():
            return text
    return f"{_PREFIX}{next(_numbers):x}"


class Reply:
    """Sends one answer. After ``started`` the status is told and errors can only end the stream."""

    __slots__ = ("counted", "dialect", "ended", "headers", "request_id", "send", "sse", "started", "status")

    def __init__(self, send: Send, dialect: Dialect, request_id: str) -> None:
        self.send = send
        self.dialect = dialect
        self.request_id = request_id
        self.headers: list[Header] = [(b"x-request-id", request_id.encode("latin-1"))]
        self.status = 0
        self.started = False
        self.sse = False
        self.ended = False
        self.counted = False  # in the metrics, under its model

    async def start(self, status: int, headers: list[Header]) -> None:
        self.started = True
        self.status = status
        await self.send({"type": "http.response.start", "status": status, "headers": headers + self.headers})

    async def start_events(self) -> None:
        """Begin an event stream before the engine has answered."""
        self.sse = True
        await self.start(200, list(SSE_HEADERS))

    async def write(self, body: bytes) -> None:
        await self.send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes = b"") -> None:
        self.ended = True
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def comment(self, text: bytes = b"waiting") -> None:
        """An SSE comment: keeps the connection alive and is part of no event."""
        await self.write(b": " + text + b"\n\n")

    async def whole(self, status: int, body: bytes, headers: list[Header]) -> None:
        await self.start(status, headers)
        await self.end(body)

    async def refuse(self, error: RouterError) -> None:
        """The router's own answer: a JSON error, or the last event of a stream that has begun."""
        if not self.started:
            body = error.body(self.dialect, self.request_id)
            await self.whole(error.status, body, error.response_headers(body))
        elif self.sse and not self.ended:
            self.status = error.status
            await self.end(error.event(self.dialect, self.request_id))


class Client:
    """Watches for the client leaving, and then cancels the task of its request at once."""

    __slots__ = ("_receive", "_request", "_watch", "gone")

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.gone = False
        self._request: asyncio.Task[object] | None = None
        self._watch: asyncio.Task[None] | None = None

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on; the whole body must have been read."""
        self._request = asyncio.current_task()
        self._watch = loop.create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.leave()

    def leave(self) -> None:
        """End the request: nobody reads its answer any more."""
        request, self._request = self._request, None
        if request is not None:
            self.gone = True
            request.cancel()

    def let_go(self) -> None:
        """The answer is complete: the server will say 'disconnect' now, and it means nothing."""
        self._request = None

    def close(self) -> None:
        self._request = None
        if self._watch is not None:
            self._watch.cancel()
