"""Connections to engines: HTTP/1.1 over a bare asyncio protocol, kept and used again.

One request at a time per connection. The answer's pieces are held as they came until the relay takes them; past
``buffer_bytes`` the engine is paused, so a slow reader fills no memory. Limits of time are looked at by one sweep for
all connections instead of a timer for each: setting one is a store into an attribute.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools

from models_app.router.config import RouterConfig
from models_app.router.errors import StaleConnection, UpstreamError
from models_app.router.wire import is_whole_chunks

FOREVER = float("inf")


class Connection(asyncio.Protocol):
    """One connection of a pool; between ``ask`` and ``finish`` it belongs to one request."""

    def __init__(self, pool: Pool, loop: asyncio.AbstractEventLoop) -> None:
        self.pool = pool
        self.loop = loop
        self.transport: asyncio.Transport
        self.closed = False
        self.used_before = False
        self.idle_since = 0.0
        self.parser = httptools.HttpResponseParser(self)
        self._reset()

    def _reset(self) -> None:
        self.busy = False
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.started = False  # the answer's head is complete
        self.complete = False
        self.error: UpstreamError | None = None
        self.beat = False  # the relay should say something to the client
        self.deadline = FOREVER
        self.deadline_kind = ""
        self.beat_at = FOREVER
        self._bare_ending = True  # the answer ends where the connection does, unless a header says otherwise
        self._may_be_kept = False
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self.on_stall: Callable[[], object] | None = None
        #: Takes what comes while the relay waits in ``block``; False means that the relay must look itself.
        self.sink: Callable[[bytes], bool] | None = None
        #: Takes whole chunks as they came, frame and all; False means that they must be taken apart.
        self.wire_sink: Callable[[bytes], bool] | None = None
        self._inside_chunk = False
        self._between_chunks = False  # the parser has seen whole chunks only: the next byte begins one

    # --- the relay's side ------------------------------------------------------------------------------------

    def ask(self, head: bytes, body: bytes) -> None:
        self.busy = True
        self.pool.busy.add(self)
        if len(body) < 65536:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)

    async def head(self) -> None:
        """Wait for the answer's head. Raises UpstreamError."""
        while not self.started:
            if self.error is not None:
                raise self.error
            await self._wait()

    async def block(self) -> bytes | None:
        """The next bytes of the answer, all that are there; None at its end.

        Empty means that there is something else to look at: a comment is due (``take_beat``), or the sink asked for it.
        Raises UpstreamError when the engine broke off or fell silent; bytes that came before are handed out first.
        """
        while not self._chunks:
            if self.complete:
                return None
            if self.error is not None:
                raise self.error
            if self._paused:
                self._paused = False
                self.transport.resume_reading()
            await self._wait()
            if not self._chunks and not self.complete and self.error is None:
                return b""
        data = self._take_chunks()
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        return data

    def take_beat(self) -> bool:
        beat, self.beat = self.beat, False
        return beat

    def _take_chunks(self) -> bytes:
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered = 0
        return data

    @property
    def at_end(self) -> bool:
        """Whether everything was handed out."""
        return self.complete and not self._chunks

    def finish(self) -> None:
        """Give the connection back; an answer that was not read to its end is broken off, which frees the engine."""
        self.pool.busy.discard(self)
        if self.complete and not self.closed and self._may_be_kept:
            self._rest()
        else:
            self.abort()

    def abort(self) -> None:
        self.pool.busy.discard(self)
        self.busy = False
        self.error = None  # its traceback holds the frames of the request, and they us
        if not self.closed:
            self.closed = True
            self.transport.abort()

    def _rest(self) -> None:
        if self._paused:  # the client left before the end of its answer was taken
            self.transport.resume_reading()
        self.used_before = True
        self._reset()
        self.pool.rest(self)

    async def _wait(self) -> None:
        self._waiter = waiter = self.loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def fail(self, error: UpstreamError) -> None:
        if self.error is None and not self.complete:
            self.error = error
        self._wake()

    def look_at_clock(self, now: float) -> None:
        if self._waiter is None:  # not waiting for the engine but for the client, which reads too slowly or not at all
            if now >= self.deadline and self.on_stall is not None:
                self.on_stall()
        elif now >= self.deadline:
            self.fail(UpstreamError(self.deadline_kind, "the engine took too long"))
        elif now >= self.beat_at:
            self.beat = True
            self._wake()

    # --- asyncio's side ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if not self.busy:  # nothing was asked: whatever this is, it is no answer
            self.pool.forget(self)
            self.abort()
            return
        waiter = self._waiter
        if (
            self._between_chunks
            and self.wire_sink is not None
            and waiter is not None
            and not waiter.done()
            and is_whole_chunks(data)
            and self.wire_sink(data)
        ):
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self.fail(UpstreamError("protocol", f"the engine's answer is not HTTP: {exc}"))
            return
        self._between_chunks = not self._inside_chunk and self.started and data.endswith(b"\r\n")
        if waiter is None or waiter.done() or not self.started:
            return
        if self.sink is not None and self._chunks and not self.complete:
            if not self.sink(self._take_chunks()):
                waiter.set_result(None)
            elif self._paused:
                self._paused = False
                self.transport.resume_reading()
        elif self._chunks or self.complete or self.sink is None:
            waiter.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        del self.parser  # it holds us: together they would stay until the garbage collector comes by
        if not self.busy:
            self.pool.forget(self)
            return
        if self.complete:
            return
        if self.started and self._bare_ending and exc is None:
            self.complete = True
            self._wake()
        elif self.used_before and not self.status:
            self.fail(StaleConnection())
        else:
            self.fail(UpstreamError("reset", "the engine closed the connection"))

    # --- the parser's side -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:
            self._may_be_kept = False  # more than one answer to one request: trust this connection no longer
            raise ValueError("a second answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.started:  # a trailer: it comes too late to be a header
            return
        name = name.lower()
        if name == b"content-length" or name == b"transfer-encoding":
            self._bare_ending = False
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        if status < 200:
            return
        self.status = status
        self.started = True
        self._may_be_kept = self.parser.should_keep_alive()

    def on_chunk_header(self) -> None:
        self._inside_chunk = True

    def on_chunk_complete(self) -> None:
        self._inside_chunk = False

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._buffered += len(body)
        if self._buffered > self.pool.config.buffer_bytes and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.started:
            self.complete = True
        else:  # an informational answer (1xx): the real one follows
            self.headers = []


class Pool:
    """The connections to one engine."""

    def __init__(self, host: str, port: int, config: RouterConfig) -> None:
        self.host = host
        self.port = port
        self.config = config
        self.idle: deque[Connection] = deque()  # the last one used is the first to be used again
        self.busy: set[Connection] = set()
        self.closed = False

    def take(self) -> Connection | None:
        """A kept connection that the engine has surely not closed yet, if there is one."""
        if not self.idle:
            return None
        connection = self.idle.pop()
        if connection.closed or self._is_old(connection, time.monotonic()):
            connection.abort()
            while self.idle:  # those below were idle even longer
                self.idle.pop().abort()
            return None
        return connection

    async def connect(self) -> Connection:
        """A new connection. Raises UpstreamError: ``connect`` (refused, unreachable) or ``connect_timeout``."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.config.connect_s):
                _, connection = await loop.create_connection(lambda: Connection(self, loop), self.host, self.port)
        except TimeoutError:
            raise UpstreamError("connect_timeout", f"no connection within {self.config.connect_s:g} s") from None
        except OSError as exc:
            raise UpstreamError("connect", f"no connection: {exc.strerror or exc}") from None
        return connection

    def rest(self, connection: Connection) -> None:
        if self.closed or len(self.idle) >= self.config.max_idle_connections:
            connection.abort()
            return
        connection.idle_since = time.monotonic()
        self.idle.append(connection)

    def forget(self, connection: Connection) -> None:
        try:
            self.idle.remove(connection)
        except ValueError:
            return

    def _is_old(self, connection: Connection, now: float) -> bool:
        return now - connection.idle_since > self.config.keepalive_s

    def sweep(self, now: float) -> None:
        for connection in tuple(self.busy):
            if now >= connection.deadline or now >= connection.beat_at:
                connection.look_at_clock(now)
        while self.idle and self._is_old(self.idle[0], now):
            self.idle.popleft().abort()

    def close(self) -> None:
        """No more is kept; requests under way go on."""
        self.closed = True
        while self.idle:
            self.idle.pop().abort()
