"""One inference request from its model's door to the end of its answer: waiting, choosing, trying, carrying over."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from models_app.router.capture import Capture
from models_app.router.errors import RouterError, StaleConnection, UpstreamError
from models_app.router.queueing import Door, not_ready
from models_app.router.relay import Relay
from models_app.router.reply import Client, Reply
from models_app.router.request import Ask
from models_app.router.streaming import Tally
from models_app.router.table import Key, ModelRoute, Name
from models_app.router.targets import TargetState
from models_app.router.upstream import Connection

if TYPE_CHECKING:
    from models_app.router.app import RouterApp

_PASSED_ON = (b"accept", b"content-type", b"traceparent", b"tracestate", b"anthropic-version", b"anthropic-beta")
#: The model's own answers for which another model may stand in.
_FALL_BACK = frozenset({"queue_full", "engine_unreachable", "engine_timeout"})


class Exchange:
    """What one request needs from here to there. ``run`` either completes the reply or raises RouterError."""

    __slots__ = ("ask", "capture", "client", "headers", "key", "name", "reply", "route", "router", "tally")

    def __init__(
        self,
        router: RouterApp,
        ask: Ask,
        key: Key,
        name: Name,
        route: ModelRoute,
        client: Client,
        reply: Reply,
        headers: dict[bytes, bytes],
        tally: Tally,
        capture: Capture | None = None,
    ) -> None:
        self.capture = capture
        self.router = router
        self.ask = ask
        self.key = key
        self.name = name
        self.route = route
        self.client = client
        self.reply = reply
        self.headers = headers
        self.tally = tally

    async def run(self) -> None:
        """Ask the model, or the one that stands in for it while it cannot answer."""
        seen = {self.route.name}
        while True:
            try:
                await self._ask_model()
                return
            except RouterError as error:
                stand_in = self._stand_in(error, seen)
                if stand_in is None:
                    raise
                seen.add(stand_in.name)
                self.route = stand_in
                self.reply.headers.append((b"x-sardeenz-model", stand_in.name.encode("latin-1", "replace")))

    def _stand_in(self, error: RouterError, seen: set[str]) -> ModelRoute | None:
        table = self.router.source.table
        name = self.route.fallback
        if table is None or name is None or name in seen or self.reply.sse or self.reply.started:
            return None
        if error.status != 503 or not (error.code.startswith("model_") or error.code in _FALL_BACK):
            return None
        route = table.models.get(name)
        return route if route is not None and self.key.may_use(name, name) else None

    async def _ask_model(self) -> None:
        route = self.route
        self.ask.fitting(route)
        door = self.router.doors.of(route)
        if not door.try_enter():
            await self._wait_at(door)
        metrics, labels = self.router.metrics, (route.name,)
        metrics.inflight.add(labels)
        try:
            await self._exchange(door)
        finally:
            metrics.inflight.add(labels, -1)
            door.leave()

    async def _wait_at(self, door: Door) -> None:
        """Stand in the queue; a stream gets its headers and comments meanwhile, for proxies on the way give up else."""
        config = self.router.config
        waiter = door.line_up(self.key, len(self.ask.body))
        begun = time.monotonic()
        give_up_at = begun + (config.slot_wait_s if door.route.targets else config.queue_wait_s)
        quiet_s = config.commit_stream_s
        try:
            while True:
                left_s = give_up_at - time.monotonic()
                if left_s <= 0:
                    door.waited_too_long()
                try:
                    await door.wait(waiter, min(left_s, quiet_s) if self.ask.stream else left_s)
                    break
                except TimeoutError:
                    if self.ask.stream and time.monotonic() < give_up_at:
                        if not self.reply.started:
                            await self.reply.start_events()
                        await self.reply.comment(b"waiting for the model")
                        quiet_s = config.comment_s
        except BaseException:
            door.step_out(waiter)
            raise
        finally:
            waited_s = time.monotonic() - begun
            self.tally.waited_s += waited_s
            self.router.metrics.queue_wait.observe((self.route.name,), waited_s)
        self.route = door.route  # as it is now, with the instances that came up

    async def _exchange(self, door: Door) -> None:
        router, route = self.router, self.route
        targets = self.ask.fitting(route)
        body = self.ask.upstream_body(self.name, route)
        affinity = self.ask.affinity_text() if route.affinity and len(targets) > 1 else ""
        tried: list[TargetState] = []
        failure = ""
        while len(tried) < router.config.attempts:
            if tried:  # the door's route is the newest: an instance that came up since the first try counts
                targets = self.ask.fitting(door.route)
            state = router.targets.choose(targets, time.monotonic(), tried=tried, affinity=affinity)
            if state is None:
                break
            if tried:
                router.metrics.retries.add((route.name,))
            tried.append(state)
            state.outstanding += 1
            connection: Connection | None = None
            try:
                try:
                    connection = await self._send(state, body)
                except UpstreamError as exc:
                    failure = exc.kind  # not the error: its traceback would hold this frame, and the frame it
                    self._failed(state, exc.kind)
                    if exc.kind == "first_byte_timeout":
                        break  # the engine may be at work on it still: twice the work would help nobody
                    continue
                if connection.status in (401, 403, 503) and self._another(door, tried):
                    self._failed(state, f"status_{connection.status}")
                    continue
                await self._carry(state, connection)
                return
            finally:
                state.outstanding -= 1
                if connection is not None:
                    connection.finish()
        self._raise_unreachable(failure)

    def _another(self, door: Door, tried: list[TargetState]) -> bool:
        """Whether there is an engine left to try."""
        if len(tried) >= self.router.config.attempts:
            return False
        return self.router.targets.choose(self.ask.fitting(door.route), time.monotonic(), tried=tried) is not None

    async def _send(self, state: TargetState, body: bytes) -> Connection:
        """Ask one engine and wait for the head of its answer; a connection that had gone stale is replaced once."""
        kept = state.pool.take()
        if kept is not None:
            try:
                return await self._ask_on(kept, state, body)
            except StaleConnection:
                pass
        return await self._ask_on(await state.pool.connect(), state, body)

    async def _ask_on(self, connection: Connection, state: TargetState, body: bytes) -> Connection:
        config, route = self.router.config, self.route
        now = self.tally.sent_at = time.monotonic()
        limit_s = config.first_byte_s if self.ask.stream else config.answer_s
        connection.deadline = now + (limit_s if route.first_byte_s is None else route.first_byte_s)
        connection.deadline_kind = "first_byte_timeout"
        try:
            connection.ask(self._head(state, len(body)), body)
            await connection.head()
        except BaseException:
            connection.abort()
            raise
        self.tally.head_at = time.monotonic()
        return connection

    def _head(self, state: TargetState, length: int) -> bytes:
        lines = [state.head(self.ask.endpoint.path)]
        for name in _PASSED_ON:
            value = self.headers.get(name)
            if value is not None:
                lines.append(b"%b: %b\r\n" % (name, value))
        lines.append(b"x-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (self.reply.headers[0][1], length))
        return b"".join(lines)

    async def _carry(self, state: TargetState, connection: Connection) -> None:
        config, route = self.router.config, self.route
        relay = Relay(
            connection,
            self.reply,
            self.client,
            self.tally,
            config,
            first_byte_s=config.first_byte_s if route.first_byte_s is None else route.first_byte_s,
            idle_s=config.idle_s if route.idle_s is None else route.idle_s,
            capture=self.capture,
        )
        try:
            await relay.run(strip_usage=self.ask.strip_usage)
        finally:
            if connection.error is not None:
                self._failed(state, connection.error.kind)
            elif connection.status >= 500 or connection.status in (401, 403):
                self._failed(state, f"status_{connection.status}")
            elif connection.complete:
                self.router.targets.succeeded(state)

    def _failed(self, state: TargetState, kind: str) -> None:
        """The instance rests, and the control side is told: it looks at the engine now instead of at its next turn."""
        now = time.monotonic()
        at_once = not kind.startswith("status_5")
        self.router.targets.failed(state, kind, now, at_once=at_once)
        self.router.metrics.failures.add((self.route.name, kind))
        if state.cooled_until > now and now >= state.told_at + self.router.config.suspect_pause_s:
            state.told_at = now
            self.router.tell_suspect(state.target.id, kind)

    def _raise_unreachable(self, failure: str) -> None:
        if not failure:
            raise not_ready(self.route)
        if failure == "first_byte_timeout":
            raise RouterError(
                503, "engine_timeout", f"The model '{self.route.name}' did not answer in time.", retry_after_s=5
            )
        raise RouterError(
            503,
            "engine_unreachable",
            f"The model '{self.route.name}' could not be reached ({failure}).",
            retry_after_s=2,
        )
