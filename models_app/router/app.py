"""The router as an ASGI application: an OpenAI-compatible door to every instance.

One table of routes and keys is read (never a database), one connection pool per engine is used, and nothing is written
on a request's path. The parts: ``endpoints`` (what exists), ``auth`` and ``limits`` (who may), ``request`` (what is
asked), ``queueing`` (waiting for a model), ``exchange`` and ``targets`` (which engine, and trying another), ``relay``
(its answer), ``usage`` and ``metrics`` (what is counted).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import orjson

from models_app.router.auth import check_key, presented_key
from models_app.router.capture import Capture, CaptureSink, is_on
from models_app.router.config import RouterConfig
from models_app.router.endpoints import ANTHROPIC_PREFIX, ENDPOINTS, Endpoint, dialect_of
from models_app.router.errors import RouterError, model_not_found
from models_app.router.exchange import Exchange
from models_app.router.limits import Limiter
from models_app.router.listing import model_entry, model_list, usable_names
from models_app.router.metrics import Metrics
from models_app.router.metrics_share import MetricsFiles
from models_app.router.queueing import Demand, Doors
from models_app.router.reply import Client, Reply, request_id_from
from models_app.router.request import (
    Ask,
    BodyWatch,
    Buffered,
    ClientGone,
    Receive,
    Scope,
    Send,
    read_body,
    wanted_headers,
)
from models_app.router.streaming import BrokenOff, Tally
from models_app.router.table import Key, ModelRoute, Name, RouteTable, TableSource
from models_app.router.targets import Targets
from models_app.router.usage import UsageBook, UsageRecord

log = logging.getLogger(__name__)

#: Takes what was used since the last time. Raises when it could not; then it is told again, added up.
UsageSink = Callable[[list[UsageRecord]], Awaitable[None]]
#: Takes an instance that failed, and how, in a few words. Must not block.
SuspectSink = Callable[[int, str], None]
#: Takes a notable event (a model that does not exist was asked for). Must not block.
EventSink = Callable[[dict[str, Any]], None]

_JSON = (b"content-type", b"application/json")
_EVENT_PAUSE_S = 60.0


class RouterApp:
    """``table_source`` holds the routes; ``on_demand`` starts or wakes a model; ``on_usage`` takes what was used."""

    def __init__(
        self,
        table_source: TableSource,
        *,
        on_demand: Demand | None = None,
        on_usage: UsageSink | None = None,
        on_event: EventSink | None = None,
        on_capture: CaptureSink | None = None,
        on_suspect: SuspectSink | None = None,
        config: RouterConfig | None = None,
        metrics_files: MetricsFiles | None = None,
    ) -> None:
        self.source = table_source
        self.config = config or RouterConfig()
        self.metrics = Metrics()
        self.metrics_files = metrics_files
        self.limiter = Limiter()
        self.targets = Targets(self.config)
        self.doors = Doors(self.config, self.metrics, on_demand)
        self.usage = UsageBook()
        self.buffered = Buffered(self.config.max_buffered_bytes)
        self.body_watch = BodyWatch(self.config.body_idle_s)
        self._on_usage = on_usage
        self._on_event = on_event
        self._on_capture = on_capture
        self._on_suspect = on_suspect
        self._events_told: dict[tuple[int, str], float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        table_source.listen(self._follow)
        if table_source.table is not None:
            self._follow(table_source.table)

    # --- life ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin the periodic work; done by itself at the first request where the server has no lifespan (daphne)."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._ending = asyncio.Event()
            self._tasks = [self._loop.create_task(self._sweep()), self._loop.create_task(self._tell_usage())]

    async def stop(self) -> None:
        """Hand on what was used, close what is kept."""
        self._ending.set()
        for task in self._tasks[:1]:  # the sweep; the other ends by itself
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._loop = None
        self.doors.close()
        await self._flush()
        self.targets.close()

    def _follow(self, table: RouteTable) -> None:
        self.targets.follow(table)
        self.doors.follow(table)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.config.sweep_s)
            now = time.monotonic()
            self.targets.sweep(now)
            self.body_watch.sweep(now)

    async def _tell_usage(self) -> None:
        """Ends when it is told to, never in the middle of telling: what was being told would be lost or told twice."""
        while not self._ending.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(self.config.usage_flush_s):
                    await self._ending.wait()
            await self._flush()

    async def _flush(self) -> None:
        records = self.usage.take()
        if records and self._on_usage is not None:
            try:
                await self._on_usage(records)
            except Exception as exc:  # the receiver may be away for long: nothing is lost, one line now and then
                log.debug("usage not handed on: %s", exc)
                self.usage.give_back(records)
        if self.metrics_files is not None:
            try:
                self.metrics_files.write(self.metrics)
            except OSError as exc:
                log.debug("metrics file not written: %s", exc)

    # --- ASGI ----------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "http":
            if self._loop is None:
                self.start()
            await self._http(scope, receive, send)
        elif kind == "lifespan":
            await self._lifespan(receive, send)
        elif kind == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "no WebSocket here"})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = wanted_headers(scope)
        path: str = scope["path"]
        reply = Reply(send, dialect_of(path), request_id_from(headers.get(b"x-request-id")))
        try:
            endpoint = ENDPOINTS.get(path)
            if endpoint is not None:
                await self._inference(endpoint, scope, headers, receive, reply)
            else:
                await self._other(path, scope, headers, reply)
        except RouterError as error:
            if not reply.counted:
                self.metrics.requests.add(("", str(error.status)))
            await reply.refuse(error)
        except ClientGone:
            self.metrics.gone.add(("",))
        except Exception:
            log.exception("request %s failed in the router", reply.request_id)
            if reply.ended:
                return
            fault = RouterError(503, "internal_error", "The router met a fault of its own.", retry_after_s=1)
            await reply.refuse(fault)

    def _key(self, path: str, headers: dict[bytes, bytes]) -> Key:
        x_api_key = headers.get(b"x-api-key") if path.startswith(ANTHROPIC_PREFIX) else None
        value = presented_key(headers.get(b"authorization"), x_api_key)
        return check_key(self.source, value, age_limit_s=self.config.key_age_limit_s)

    # --- what is no inference ------------------------------------------------------------------------------------

    async def _other(self, path: str, scope: Scope, headers: dict[bytes, bytes], reply: Reply) -> None:
        if path == "/healthz":
            await self._answer(scope, reply, {"status": "ok"})
        elif path == "/readyz":
            self._check_ready()
            await self._answer(scope, reply, {"status": "ready", "routes_age_s": round(self.source.age_s(), 1)})
        elif path == "/metrics" and self.config.metrics_open:
            await self._metrics(reply)
        else:
            key = self._key(path, headers)  # a path that does not exist is told to those with a key only
            if path == "/metrics":
                await self._metrics(reply)
                return
            table = self.source.table
            assert table is not None  # noqa: S101 - check_key has refused otherwise
            if path == "/v1/models":
                await self._answer(scope, reply, model_list(table, key))
            elif path.startswith("/v1/models/"):
                await self._answer(scope, reply, model_entry(table, key, path[len("/v1/models/") :]))
            else:
                raise RouterError(404, "unknown_path", "This path does not exist here.")

    def _check_ready(self) -> None:
        age_s = self.source.age_s()
        if age_s > self.config.key_age_limit_s:
            raise RouterError(
                503, "routes_unknown", "The router has no routes, or too old ones, to answer with.", retry_after_s=2
            )

    @staticmethod
    async def _answer(scope: Scope, reply: Reply, data: dict[str, Any]) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            raise RouterError(405, "method_not_allowed", "Use GET here.", headers=((b"allow", b"GET, HEAD"),))
        body = orjson.dumps(data)
        await reply.whole(200, body, [_JSON, (b"content-length", b"%d" % len(body))])

    async def _metrics(self, reply: Reply) -> None:
        age_s = self.source.age_s()
        if age_s != float("inf"):
            self.metrics.routes_age.set((), round(age_s, 3))
        others = self.metrics_files.others(self.metrics) if self.metrics_files is not None else []
        body = self.metrics.render(others)
        kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
        await reply.whole(200, body, [kind, (b"content-length", b"%d" % len(body))])

    # --- inference -------------------------------------------------------------------------------------------------

    async def _inference(
        self, endpoint: Endpoint, scope: Scope, headers: dict[bytes, bytes], receive: Receive, reply: Reply
    ) -> None:
        tally = Tally(time.monotonic())
        key = self._key(endpoint.path, headers)
        if scope["method"] != "POST":
            raise RouterError(405, "method_not_allowed", "Use POST here.", headers=((b"allow", b"POST"),))
        try:
            limited = self.limiter.enter(key)
        except RouterError as error:
            self.metrics.limited.add((error.code,))
            raise
        if limited:
            reply.headers.extend(limited)
        config = self.config
        task = asyncio.current_task(self._loop)
        assert task is not None  # noqa: S101 - every ASGI server runs an application in a task
        body = b""
        try:
            limit = config.max_upload_bytes if endpoint.multipart else config.max_body_bytes
            body = await read_body(receive, task, headers, limit, self.body_watch, self.buffered)
            tally.waited_s = time.monotonic() - tally.started_at
            ask = Ask(endpoint, body, headers.get(b"content-type", b""))
            name, route = self._resolve(ask, key, scope)
            await self._run(ask, key, name, route, Client(receive, task), reply, headers, tally)
        finally:
            self.buffered.give(len(body))
            if limited is not None:
                self.limiter.leave(key, tally.prompt_tokens + tally.completion_tokens)

    def _resolve(self, ask: Ask, key: Key, scope: Scope) -> tuple[Name, ModelRoute]:
        """The model behind the name that was asked for. Raises 404, also for one that the key may not know of."""
        table = self.source.table
        assert table is not None  # noqa: S101 - check_key has refused otherwise
        name = table.names.get(ask.model)
        if name is None or not name.choices:
            self._tell_unknown(ask.model, key, scope)
            raise model_not_found(ask.model, [one.name for one in usable_names(table, key)])
        if len(name.choices) == 1:
            served = name.choices[0][0]
        else:  # of models that share a name, a key may be for some only
            served = _pick([one for one in name.choices if key.may_use(ask.model, one[0])] or name.choices, table)
        if not key.may_use(ask.model, served):
            raise RouterError(403, "model_not_allowed", f"This key may not use the model '{ask.model}'.", param="model")
        return name, table.models[served]

    def tell_suspect(self, instance_id: int, kind: str) -> None:
        """Hint that an engine is dead or hangs, as requests found out."""
        if self._on_suspect is not None:
            self._on_suspect(instance_id, kind)

    def _tell_unknown(self, model: str, key: Key, scope: Scope) -> None:
        if self._on_event is None:
            return
        now = time.monotonic()
        told = self._events_told
        if now - told.get((key.id, model), float("-inf")) < _EVENT_PAUSE_S:
            return
        if len(told) >= 1000:  # a client that tries names must not fill memory
            told.clear()
        told[key.id, model] = now
        address = (scope.get("client") or ("",))[0]
        self._on_event(
            {
                "type": "unknown_model",
                "model": model[:200],
                "key_id": key.id,
                "key_name": key.name,
                "address": address,
                "at": time.time(),
            }
        )

    async def _run(
        self,
        ask: Ask,
        key: Key,
        name: Name,
        route: ModelRoute,
        client: Client,
        reply: Reply,
        headers: dict[bytes, bytes],
        tally: Tally,
    ) -> None:
        client.watch()
        capture = None
        if key.capture_until is not None and self._on_capture is not None and is_on(key):
            capture = Capture(key, ask.endpoint.path, ask.body, is_text=not ask.endpoint.multipart)
        exchange = Exchange(self, ask, key, name, route, client, reply, headers, tally, capture)
        status = 0
        try:
            await exchange.run()
        except asyncio.CancelledError:
            if client.took_it_back():
                status = 499  # what nginx calls it: the client closed the request
                self.metrics.gone.add((exchange.route.name,))
            else:  # the server ends and has waited long enough
                client.let_go()
                client.task.uncancel()
                status, tally.failed = 503, "router_stopping"
                raise RouterError(503, "router_stopping", "The router is being restarted.", retry_after_s=2) from None
        except BrokenOff:
            status = 502
            log.warning(
                "request %s: the answer of %s broke off: %s", reply.request_id, exchange.route.name, tally.failed
            )
            if self.config.max_response_bytes is not None:
                await reply.end()  # to return would close the connection under uvicorn, and leave it open under daphne
        except RouterError as error:
            status = error.status
            tally.failed = tally.failed or error.code
            client.let_go()
            raise
        except Exception:
            status, tally.failed = 503, tally.failed or "internal_error"  # as ``_http`` answers it
            client.let_go()
            raise
        finally:
            client.close()
            self._count(exchange, status or reply.status)
            if capture is not None and self._on_capture is not None:
                self._on_capture(capture.to_json(exchange.route.name, status or reply.status, reply.request_id))

    def _count(self, exchange: Exchange, status: int) -> None:
        tally, key, model = exchange.tally, exchange.key, exchange.route.name
        now = time.monotonic()
        metrics, labels = self.metrics, (model,)
        exchange.reply.counted = True
        metrics.requests.add((model, str(status)))
        metrics.duration.observe(labels, now - tally.started_at)
        if tally.first_byte_at:
            metrics.first_byte.observe(labels, tally.first_byte_at - tally.started_at)
            metrics.overhead.observe((), tally.overhead_s(tally.head_at))
        record = self.usage.record(key.id, key.name, model)
        record.requests += 1
        if tally.failed or (status >= 400 and status != 499):
            record.errors += 1
        if tally.first_token_at:
            record.first_token(tally.first_token_at - tally.started_at)
        if tally.gaps is not None:
            record.gaps(tally.gaps.counts)
        if tally.prompt_tokens or tally.completion_tokens:
            record.prompt_tokens += tally.prompt_tokens
            record.completion_tokens += tally.completion_tokens
            metrics.tokens.add((model, "prompt"), tally.prompt_tokens)
            metrics.tokens.add((model, "completion"), tally.completion_tokens)


def _pick(choices: Sequence[tuple[str, int]], table: RouteTable) -> str:
    """One model by weight; those with a ready instance only, while there is one."""
    ready = [choice for choice in choices if table.models[choice[0]].targets] or choices
    total = sum(weight for _, weight in ready)
    point = random.random() * total  # noqa: S311 - spreads load, guards nothing
    for served, weight in ready:
        point -= weight
        if point < 0:
            return served
    return ready[0][0]
