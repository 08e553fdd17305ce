"""A switchable engine, a router on a real socket, and snapshots to feed it with. Loopback only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import httpx
import uvicorn
from uvicorn.server import ServerState

from models_app.router.app import RouterApp
from models_app.router.config import RouterConfig
from models_app.router.table import RouteTable, TableSource

KEY = "sz-test-key"
AUTH = {"Authorization": f"Bearer {KEY}"}
HANGS_S = 10.0  # longer than anything here may take
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # made once: reading the machine's certificates for each test is slow


@dataclass
class Request:
    """What the engine was asked."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Answer:
    """Writes one HTTP answer; ``gone`` is set when the router has closed the connection."""

    def __init__(self, writer: asyncio.StreamWriter, gone: asyncio.Event) -> None:
        self.writer = writer
        self.gone = gone

    async def json(self, data: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        await self.whole(json.dumps(data).encode(), status, {"content-type": "application/json", **(headers or {})})

    async def whole(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        self.writer.write(f"HTTP/1.1 {status} X\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body)
        await self.writer.drain()

    async def start(self, content_type: str = "text/event-stream; charset=utf-8") -> None:
        self.writer.write(
            f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        )
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self.writer.drain()

    async def event(self, data: Any) -> None:
        text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
        await self.chunk(f"data: {text}\n\n".encode())

    async def end(self) -> None:
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    def die(self) -> None:
        self.writer.transport.abort()


Behaviour = Callable[[Request, Answer], Awaitable[None]]


def content(text: str) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}],
    }


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


async def chat(request: Request, answer: Answer) -> None:
    """What a healthy engine does: three tokens, usage when asked for it."""
    data = request.json
    if not data.get("stream"):
        message = {"role": "assistant", "content": "a b c"}
        await answer.json(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1,
                "model": data["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": USAGE,
            }
        )
        return
    await answer.start()
    first = content("")
    first["choices"][0]["delta"] = {"role": "assistant", "content": ""}
    await answer.event(first)
    for word in ("a", " b", " c"):
        await answer.event(content(word))
    if (data.get("stream_options") or {}).get("include_usage"):
        await answer.event({**content(""), "choices": [], "usage": USAGE})
    await answer.event("[DONE]")
    await answer.end()


class FakeEngine:
    """An HTTP/1.1 server that answers as ``behaviour`` says."""

    def __init__(self, behaviour: Behaviour = chat) -> None:
        self.behaviour = behaviour
        self.requests: list[Request] = []
        self.connections = 0
        self.gone = 0
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> FakeEngine:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=2**24)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """As if killed: the port is closed and every connection reset."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        request = Request(first.split(" ")[1], headers, body)
        self.requests.append(request)
        gone = asyncio.Event()
        work = asyncio.ensure_future(self.behaviour(request, Answer(writer, gone)))
        watch = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.gone += 1
                gone.set()
                work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            if work.cancelled():
                return False
            failure = work.exception()
            if isinstance(failure, ConnectionError):  # the router left while we wrote
                self.gone += 1
                gone.set()
                return False
            if failure is not None:
                raise failure
            return not writer.transport.is_closing()
        finally:
            watch.cancel()
            work.cancel()
            await asyncio.gather(watch, return_exceptions=True)


def model(name: str = "m", *engines: FakeEngine, **fields: Any) -> dict[str, Any]:
    """A model of a snapshot, with an instance per engine."""
    return {
        "name": name,
        "aliases": [],
        "created": 1700000000,
        "status": "ready" if engines else "stopped",
        "on_demand": False,
        "max_model_len": 4096,
        "token_limit": None,
        "defaults": {},
        "fallback": None,
        "max_concurrency": None,
        "reason": "",
        "instances": [
            {"id": engine.port, "url": engine.url, "token": f"token-{engine.port}", "weight": 1} for engine in engines
        ],
        **fields,
    }


def key(value: str = KEY, **fields: Any) -> dict[str, Any]:
    return {
        "id": fields.pop("id", 1),
        "name": "test",
        "digest": sha256(value.encode()).hexdigest(),
        "role": "viewer",
        "models": None,
        "expires_at": None,
        "rpm": None,
        "tpm": None,
        "max_concurrency": None,
        **fields,
    }


def snapshot(*models: dict[str, Any], keys: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "at": time.time(),
        "models": list(models),
        "keys": [key()] if keys is None else keys,
        **fields,
    }


def table(*models: dict[str, Any], keys: list[dict[str, Any]] | None = None, **fields: Any) -> RouteTable:
    return RouteTable.from_snapshot(snapshot(*models, keys=keys, **fields))


FAST = RouterConfig(sweep_s=0.02, connect_s=1.0, usage_flush_s=0.05)


@dataclass
class Router:
    """A router that listens, and a client for it."""

    app: RouterApp
    source: TableSource
    port: int
    client: httpx.AsyncClient
    used: list[dict[str, Any]] = field(default_factory=list)
    demanded: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    captures: list[dict[str, Any]] = field(default_factory=list)
    suspects: list[tuple[int, str]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def set_routes(self, *models: dict[str, Any], **fields: Any) -> None:
        self.source.swap(table(*models, **fields))

    async def chat(self, name: str = "m", **fields: Any) -> httpx.Response:
        return await self.client.post("/v1/chat/completions", json=ask(name, **fields), headers=AUTH)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANGS_S):
            while not condition():
                await asyncio.sleep(0.005)


def ask(name: str = "m", **fields: Any) -> dict[str, Any]:
    return {"model": name, "messages": [{"role": "user", "content": "hello"}], **fields}


@contextlib.asynccontextmanager
async def running_router(
    *models: dict[str, Any], config: RouterConfig = FAST, on_demand: Callable[[str], None] | None = None, **fields: Any
) -> AsyncIterator[Router]:
    """A RouterApp under uvicorn on a free port of the loopback, in this event loop."""
    source = TableSource(table(*models, **fields))
    used: list[dict[str, Any]] = []
    demanded: list[str] = []
    events: list[dict[str, Any]] = []
    captures: list[dict[str, Any]] = []
    suspects: list[tuple[int, str]] = []

    async def on_usage(records: list[Any]) -> None:
        used.extend(record.to_json() for record in records)

    def demand(name: str) -> None:
        demanded.append(name)
        if on_demand is not None:
            on_demand(name)

    app = RouterApp(
        source,
        on_demand=demand,
        on_usage=on_usage,
        on_event=events.append,
        on_capture=captures.append,
        on_suspect=lambda pk, kind: suspects.append((pk, kind)),
        config=config,
    )
    async with serving(app) as port:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", timeout=HANGS_S, trust_env=False, verify=NO_TLS
        ) as client:
            yield Router(app, source, port, client, used, demanded, events, captures, suspects)
        await app.stop()


@contextlib.asynccontextmanager
async def serving(app: Any) -> AsyncIterator[int]:
    """The port on which uvicorn's protocol serves ``app``; without uvicorn's own main loop, which ticks at 10 Hz."""
    config = uvicorn.Config(
        app, log_level="critical", http="httptools", ws="none", access_log=False, proxy_headers=False
    )
    config.load()
    state = ServerState()
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    server = await asyncio.get_running_loop().create_server(
        lambda: config.http_protocol_class(config=config, server_state=state, app_state={}),  # type: ignore[call-arg]
        sock=listener,
    )
    try:
        yield listener.getsockname()[1]
    finally:
        server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=HANGS_S)


@contextlib.asynccontextmanager
async def running_engines(*behaviours: Behaviour) -> AsyncIterator[list[FakeEngine]]:
    engines = [await FakeEngine(behaviour).start() for behaviour in behaviours]
    try:
        yield engines
    finally:
        for engine in engines:
            await engine.stop()
