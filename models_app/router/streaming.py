"""An engine's event stream on its way to the client.

A chunk is handed on in the very callback that received it: waking the request's task for each would cost more than all
the rest (it sleeps under some fifteen awaiting calls). The task is woken only for what a callback cannot do: waiting
for a slow client, comments, and the end.
"""

from __future__ import annotations

import time
from collections.abc import Coroutine, Generator
from dataclasses import dataclass, field
from types import coroutine
from typing import Any

from models_app.router.capture import Capture
from models_app.router.errors import RouterError, UpstreamError
from models_app.router.reply import Client, Reply
from models_app.router.sse import Scanner
from models_app.router.upstream import Connection
from models_app.router.usage import Gaps
from models_app.router.wire import Wire, wire_of


class BrokenOff(Exception):
    """The answer cannot be ended in order: the connection to the client must be closed as it is."""


@dataclass(slots=True)
class Tally:
    """Times (monotonic) and counts of one request."""

    started_at: float
    sent_at: float = 0.0  # to the engine
    waited_s: float = 0.0  # for the model
    head_at: float = 0.0  # of the engine's answer
    first_byte_at: float = 0.0
    first_token_at: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failed: str = ""  # why the answer is not what was asked for; empty when it is
    gaps: Gaps | None = field(default=None)

    def overhead_s(self, now: float) -> float:
        """The router's own part of the time to the first byte."""
        return max(0.0, self.sent_at - self.started_at - self.waited_s) + (now - self.head_at)


class EventStream:
    """One stream. ``run`` returns when the client has its end, an error event included."""

    __slots__ = (
        "_capture",
        "_client",
        "_comment_s",
        "_connection",
        "_failure",
        "_gaps",
        "_idle_s",
        "_last_at",
        "_limit_bytes",
        "_pieces",
        "_reply",
        "_scanner",
        "_send",
        "_sent_bytes",
        "_suspended",
        "_tally",
        "_wire",
    )

    def __init__(
        self,
        connection: Connection,
        reply: Reply,
        client: Client,
        tally: Tally,
        scanner: Scanner,
        *,
        idle_s: float,
        comment_s: float,
        limit_bytes: int | None,
        capture: Capture | None,
    ) -> None:
        self._connection = connection
        self._reply = reply
        self._send = reply.send
        self._client = client
        self._tally = tally
        self._scanner = scanner
        self._idle_s = idle_s
        self._comment_s = comment_s
        self._limit_bytes = limit_bytes
        self._capture = capture
        self._gaps: Gaps | None = None
        self._last_at = 0.0
        self._pieces = 0
        self._sent_bytes = 0
        self._suspended: tuple[Coroutine[Any, Any, None], Any] | None = None
        self._failure: BaseException | None = None
        self._wire: Wire | None = None

    async def run(self, *, first_byte_s: float) -> None:
        """Raises BrokenOff when the stream cannot be ended in order."""
        connection = self._connection
        now = time.monotonic()
        self._reply.sse = True
        connection.deadline = now + first_byte_s
        connection.deadline_kind = "first_byte_timeout"
        connection.beat_at = now + self._comment_s
        if self._capture is None and self._limit_bytes is None:
            self._wire = wire_of(self._send)
        try:
            await self._relay()
        except UpstreamError as exc:
            await self._died(exc)
        finally:
            connection.sink = connection.wire_sink = None
            if self._suspended is not None:
                self._suspended[0].close()
            self._count()

    async def _relay(self) -> None:
        connection, scanner = self._connection, self._scanner
        while True:
            connection.sink = self._hand_on
            if self._wire is not None:
                connection.wire_sink = self._pass_on
            block = await connection.block()
            if self._failure is not None:
                raise self._failure
            if self._suspended is not None:  # the client reads slowly: wait for it, and let the engine wait
                sending, self._suspended = self._suspended, None
                await _resume(*sending)
                connection.deadline = time.monotonic() + self._idle_s
            if self._is_too_large():
                await self._refuse(too_large_answer(self._limit_bytes or 0))
                return
            if block is None:
                await self._finish(scanner.rest())
                return
            if block:
                out = self._take(block)
                if connection.at_end:
                    await self._finish(out + scanner.rest())
                    return
                if out:
                    await self._send({"type": "http.response.body", "body": out, "more_body": True})
                    connection.deadline = time.monotonic() + self._idle_s
            elif connection.take_beat():
                if not scanner.inside:
                    await self._reply.comment()
                connection.beat_at = time.monotonic() + self._comment_s

    def _hand_on(self, block: bytes) -> bool:
        """Called by the connection with what has just come. False: the task must be woken."""
        out = self._take(block)
        if not out:
            return True
        sending: Any = self._send({"type": "http.response.body", "body": out, "more_body": True})
        try:
            future = sending.send(None)
        except StopIteration:
            return self._limit_bytes is None or not self._is_too_large()
        except BaseException as exc:
            self._failure = exc
            return False
        self._suspended = (sending, future)
        return False

    def _pass_on(self, chunks: bytes) -> bool:
        """Called by the connection with whole chunks as they came. False: they have to take the long way."""
        wire = self._wire
        gaps = self._gaps
        if wire is None or wire.disconnected or wire.flow.write_paused or gaps is None:
            return False
        if not self._scanner.lets_pass(chunks):
            return False
        wire.transport.write(chunks)
        connection = self._connection
        now = time.monotonic()
        connection.deadline = now + self._idle_s
        connection.beat_at = now + self._comment_s
        gaps.add(now - self._last_at)
        self._last_at = now
        self._pieces += 1
        return True

    def _take(self, block: bytes) -> bytes:
        """Look at what came; answers what is to be handed on."""
        connection = self._connection
        now = time.monotonic()
        connection.deadline = now + self._idle_s  # for the client to take it, too
        connection.beat_at = now + self._comment_s
        out = self._scanner.feed(block)
        gaps = self._gaps
        if gaps is not None:
            gaps.add(now - self._last_at)
        else:
            tally = self._tally
            tally.first_byte_at = tally.first_byte_at or now
            connection.deadline_kind = "idle_timeout"
            if self._scanner.content_seen:
                tally.first_token_at = now
                self._gaps = tally.gaps = Gaps()
        self._last_at = now
        self._pieces += 1
        self._sent_bytes += len(out)
        if self._capture is not None:
            self._capture.feed(out)
        return out

    def _is_too_large(self) -> bool:
        return self._limit_bytes is not None and self._sent_bytes > self._limit_bytes

    async def _finish(self, body: bytes) -> None:
        self._client.let_go()
        await self._reply.end(body)

    async def _refuse(self, error: RouterError) -> None:
        self._tally.failed = self._tally.failed or error.code
        self._client.let_go()
        await self._reply.refuse(error)

    async def _died(self, exc: UpstreamError) -> None:
        """The engine broke off: an event that says so, and an end without the dialect's own closing event."""
        if self._scanner.ended:
            await self._finish(b"")
            return
        self._tally.failed = exc.kind
        self._connection.deadline = time.monotonic() + self._idle_s  # for the client to take the last event
        if self._scanner.inside:
            raise BrokenOff
        await self._refuse(lost_midway(exc))

    def _count(self) -> None:
        tally, scanner = self._tally, self._scanner
        tally.prompt_tokens = scanner.prompt_tokens
        # An engine tells the usage at the end only. A stream that was left or lost before counts its pieces, one token
        # at least each, or leaving early would make tokens free.
        tally.completion_tokens = scanner.completion_tokens or (self._pieces if scanner.content_seen else 0)
        if scanner.failed:
            tally.failed = tally.failed or "engine_error"


@coroutine
def _resume(sending: Coroutine[Any, Any, None], future: Any) -> Generator[Any, Any, None]:
    """Go on awaiting a coroutine that was begun outside the task and waits for ``future``."""
    try:
        yield future
    except BaseException:
        sending.close()
        raise
    yield from sending.__await__()


def too_large_answer(limit: int) -> RouterError:
    return RouterError(
        503, "response_too_large", f"The answer is larger than {limit // 1024**2} MiB; ask at the router's own port."
    )


def lost_midway(exc: UpstreamError) -> RouterError:
    """What a client is told when its answer breaks off."""
    if exc.kind.endswith("timeout"):
        return RouterError(
            503, "engine_timeout", "The engine fell silent in the middle of the answer.", retry_after_s=2
        )
    return RouterError(503, "engine_lost", "The engine ended in the middle of the answer.", retry_after_s=2)
