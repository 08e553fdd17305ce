"""The client's side of one request: what was sent to it, and whether it is still there."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, MutableMapping
from itertools import count
from typing import Any

from models_app.router.errors import Dialect, RouterError
from models_app.router.request import Receive, Send
from models_app.router.wire import send_whole

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
        self.started = self.ended = True
        self.status = status
        await send_whole(
            self.send,
            {"type": "http.response.start", "status": status, "headers": headers + self.headers},
            {"type": "http.response.body", "body": body, "more_body": False},
        )

    async def refuse(self, error: RouterError) -> None:
        """The router's own answer: a JSON error, or the last event of a stream that has begun."""
        if not self.started:
            body = error.body(self.dialect, self.request_id)
            await self.whole(error.status, body, error.response_headers(body))
        elif self.sse and not self.ended:
            self.status = error.status
            await self.end(error.event(self.dialect, self.request_id))


class Client:
    """Watches for the client leaving, and then cancels the task of its request at once.

    ``receive`` is stepped by hand instead of by a task of its own, which would cost as much as all the rest of a small
    request's bookkeeping: the future that it waits for calls ``_step`` back.
    """

    __slots__ = ("_receive", "_waiting", "_watched", "gone", "task")

    def __init__(self, receive: Receive, task: asyncio.Task[object]) -> None:
        self._receive = receive
        self._waiting: Generator[Any, None, MutableMapping[str, Any]] | None = None
        self._watched = False
        self.task = task
        self.gone = False

    def watch(self) -> None:
        """From now on; the whole body must have been read."""
        self._watched = True
        self._waiting = self._receive().__await__()
        self._step()

    def _step(self, _: object = None) -> None:
        while self._watched and self._waiting is not None:
            try:
                future = next(self._waiting)
            except StopIteration as stop:
                if stop.value["type"] == "http.disconnect":
                    self._waiting = None
                    self.leave()
                else:  # a part of a body that was complete: some servers repeat its end
                    self._waiting = self._receive().__await__()
                continue
            if future is None:  # a bare yield: come again in the next turn of the loop
                self.task.get_loop().call_soon(self._step)
            else:
                future._asyncio_future_blocking = False  # as a task does with what it waits for
                future.add_done_callback(self._step)
            return

    def leave(self) -> None:
        """End the request: nobody reads its answer any more."""
        if self._watched:
            self.drop()

    def drop(self) -> None:
        """End the request of a client that takes too long to read, be it only the end of its answer."""
        if not self.gone:
            self._watched = False
            self.gone = True
            self.task.cancel()

    def took_it_back(self) -> bool:
        """Whether the cancellation being handled is the client's leaving; it is then dealt with."""
        if self.gone:
            self.task.uncancel()
        return self.gone

    def let_go(self) -> None:
        """The answer is complete: the server will say 'disconnect' now, and it means nothing."""
        self._watched = False

    def close(self) -> None:
        self._watched = False
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.close()
