"""API-server half of the add-on: ``vllm serve --middleware models_app.kvcache_addon.middleware.KVCacheMiddleware``.

It is the outermost layer of the engine's HTTP server (outside vLLM's own ``--api-key``), so it authenticates by
itself: every path but ``/health`` needs ``Authorization: Bearer <token>``, the token being the content of the file
that ``SARDEENZ_ENGINE_TOKEN_FILE`` names. With that variable unset nothing is guarded and nothing can be changed:
``POST /kvcache/*`` is refused, the rest passes. With the file named but unreadable, everything is refused.

``/kvcache/*`` is answered here, by a ``Backend``; anything else goes on to the application, WebSockets and lifespan
included. An engine that carries the endpoints of kvcached's pull request 324 keeps them: they are not shadowed.

Nothing here waits longer than ``TIME_LIMIT_S``: an engine in the middle of a long step is answered for with 202 and
``"status": "pending"`` while the order goes on in the background; the caller asks again with the same revision.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from pathlib import Path
from typing import Any

from models_app.kvcache_addon import answers, wire
from models_app.kvcache_addon.backend import Backend

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Answer = tuple[int, dict[str, Any]]

TOKEN_FILE = "SARDEENZ_ENGINE_TOKEN_FILE"  # noqa: S105 - the variable's name, not a token
TIME_LIMIT_S = 10.0
#: The allocator refills its reserve in the background right after a trim: look again after this long.
REFILL_PAUSE_S = 0.2
#: A child of vLLM's logger, so that the engine's log shows it.
log = logging.getLogger("vllm.sardeenz")

PULL_REQUEST_PATHS = frozenset(
    f"/kvcache/{name}" for name in ("status", "limit", "limit_percent", "trim", "safety_floor")
)


class KVCacheMiddleware:
    """See the module. ``backend`` is for engines other than vLLM; otherwise ``app.state.kvcache_backend``, or vLLM's
    own."""

    def __init__(
        self,
        app: App,
        backend: Backend | None = None,
        *,
        time_limit_s: float = TIME_LIMIT_S,
        refill_pause_s: float = REFILL_PAUSE_S,
    ) -> None:
        self.app = app
        self._backend = backend
        self._time_limit_s = time_limit_s
        self._refill_pause_s = refill_pause_s
        self._token_file = os.environ.get(TOKEN_FILE, "")
        self._token: bytes | None = None
        self._background: set[asyncio.Task[Any]] = set()
        self._routes: dict[str, tuple[str, Callable[[Backend, bytes], Coroutine[Any, Any, Answer]]]] = {
            "/kvcache/status": ("GET", self._status),
            "/kvcache/safety_floor": ("GET", self._safety_floor),
            "/kvcache/limit": ("POST", self._limit),
            "/kvcache/limit_percent": ("POST", self._limit_percent),
            "/kvcache/trim": ("POST", self._trim),
            "/kvcache/sleep": ("POST", self._sleep),
            "/kvcache/wake": ("POST", self._wake),
            "/kvcache/pause": ("POST", self._pause),
            "/kvcache/resume": ("POST", self._resume),
            "/kvcache/reset_prefix_cache": ("POST", self._reset_prefix_cache),
            "/kvcache/abort_stuck": ("POST", self._abort_stuck),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        path = own_path(scope)
        if scope["type"] == "http" and path == "/health":
            await self.app(scope, receive, send)
            return
        if self._token_file and not self._authorized(scope):
            await self._refuse(scope, receive, send)
            return
        route = self._routes.get(path.rstrip("/") or "/") if scope["type"] == "http" else None
        if route is None or (path.rstrip("/") in PULL_REQUEST_PATHS and has_pull_request_routes(scope)):
            await self.app(scope, receive, send)
            return
        status, body = await self._answer(route, scope, receive)
        await send_json(send, status, body, allow=route[0] if status == 405 else None)

    async def _answer(
        self,
        route: tuple[str, Callable[[Backend, bytes], Coroutine[Any, Any, Answer]]],
        scope: Scope,
        receive: Receive,
    ) -> Answer:
        method, handler = route
        try:
            if scope["method"] != method:
                raise wire.Refused(405, "method_not_allowed", f"use {method}")
            if method != "GET" and not self._token_file:
                raise wire.Refused(403, "no_token", f"changes need a token: {TOKEN_FILE} is not set for this engine")
            raw = await read_body(receive) if method != "GET" else b""
            return await self._within_time(handler(self._find_backend(scope), raw))
        except wire.Refused as refused:
            return refused.status, refused.to_json()
        except Exception as exc:
            if type(exc).__name__ == "EngineDeadError":
                return 503, {"error": "the engine has died", "code": "engine_dead"}
            log.exception("kvcache add-on: %s failed", scope.get("path"))
            return 500, {"error": f"the add-on failed: {type(exc).__name__}: {exc}", "code": "internal"}

    async def _within_time(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """The answer of ``work``, or 202 after the time limit; the work itself is not cancelled: half an order is
        worse."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        done, _ = await asyncio.wait({task}, timeout=self._time_limit_s)
        if done:
            return task.result()
        task.add_done_callback(report_late)
        return 202, {
            "status": "pending",
            "success": False,
            "message": f"the engine did not answer in {self._time_limit_s:g} s; the order stands, ask again",
        }

    # --- one method per endpoint ------------------------------------------------------------------------------------

    async def _status(self, backend: Backend, _raw: bytes) -> Answer:
        facts, gpus = await asyncio.gather(backend.status(), backend.gpus())
        return 200, answers.status_answer(facts, gpus)

    async def _safety_floor(self, backend: Backend, _raw: bytes) -> Answer:
        return 200, answers.floor_answer(await backend.safety_floor())

    async def _limit(self, backend: Backend, raw: bytes) -> Answer:
        body = wire.parse_body(raw, required=True)
        wire.own_segment(body, backend.ipc_name)
        return 200, answers.limit_answer(await backend.limit(wire.limit_order(body)))

    async def _limit_percent(self, backend: Backend, raw: bytes) -> Answer:
        body = wire.parse_body(raw, required=True)
        wire.own_segment(body, backend.ipc_name)
        wire.parse_percent(body.get("percent", 0))
        gpu = min(await backend.gpus(), key=lambda each: int(each["total"]), default=None)
        if gpu is None:
            raise wire.Refused(409, "unavailable", "this instance's GPU cannot be read, so a percentage has no meaning")
        order = wire.percent_order(body, gpu["total"])
        facts = await backend.limit(order)
        extra = {
            "percent": body["percent"],
            "gpu": gpu,
            "gpu_total_memory": gpu["total"],
            "gpu_total_memory_human": answers.human(gpu["total"]),
        }
        return 200, answers.limit_answer(facts, **extra)

    async def _trim(self, backend: Backend, raw: bytes) -> Answer:
        body = wire.parse_body(raw, required=False)
        wire.own_segment(body, backend.ipc_name)
        order = wire.trim_order(body)
        limit = await backend.limit(order.target) if order.target else None
        first = await backend.trim()
        await asyncio.sleep(self._refill_pause_s)
        second = await backend.trim()
        return 200, answers.trim_answer(first, second, limit)

    async def _sleep(self, backend: Backend, raw: bytes) -> Answer:
        body = wire.parse_body(raw, required=False)
        return 200, await backend.sleep(wire.sleep_level(body), wire.mode(body, "wait"))

    async def _wake(self, backend: Backend, raw: bytes) -> Answer:
        return 200, await backend.wake(wire.wake_tags(wire.parse_body(raw, required=False)))

    async def _pause(self, backend: Backend, raw: bytes) -> Answer:
        return 200, await backend.pause(wire.mode(wire.parse_body(raw, required=False), "keep"))

    async def _resume(self, backend: Backend, _raw: bytes) -> Answer:
        return 200, await backend.resume()

    async def _reset_prefix_cache(self, backend: Backend, _raw: bytes) -> Answer:
        facts = await backend.reset_prefix_cache()
        return 200, answers.with_human(facts, "before_bytes", "after_bytes", "freed_bytes")

    async def _abort_stuck(self, backend: Backend, _raw: bytes) -> Answer:
        return 200, await backend.abort_stuck()

    # --- who asks, and whom ------------------------------------------------------------------------------------------

    def _find_backend(self, scope: Scope) -> Backend:
        if self._backend is not None:
            return self._backend
        state = getattr(scope.get("app"), "state", None)
        found: Backend | None = getattr(state, "kvcache_backend", None)
        if found is None:
            if getattr(state, "engine_client", None) is None:
                raise wire.Refused(503, "starting", "the engine is not up yet")
            from models_app.kvcache_addon.vllm_backend import VllmBackend

            found = VllmBackend(state)
        self._backend = found
        return found

    def _authorized(self, scope: Scope) -> bool:
        """Constant-time comparison with the token; one ``Authorization`` header, no more."""
        if self._token is None:
            self._token = read_token(self._token_file)
        sent = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if self._token is None or len(sent) != 1:
            return False
        scheme, _, given = sent[0].partition(b" ")
        same = hmac.compare_digest(hashlib.sha256(given.strip()).digest(), hashlib.sha256(self._token).digest())
        return same and scheme.lower() == b"bearer"

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "no token"})
            return
        body = {"error": "this engine answers to its own token only", "code": "unauthorized"}
        await send_json(send, 401, body, authenticate=True)


def own_path(scope: Scope) -> str:
    """The path without ``--root-path``: servers differ in whether they leave the prefix on."""
    path, root = str(scope["path"]), str(scope.get("root_path") or "").rstrip("/")
    if root and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    return path or "/"


def has_pull_request_routes(scope: Scope) -> bool:
    """Whether the application itself serves the pull request's endpoints (a patched kvcached)."""
    return any(getattr(route, "path", None) == "/kvcache/status" for route in getattr(scope.get("app"), "routes", ()))


def read_token(path: str) -> bytes | None:
    """The file's content without surrounding white space; None when unreadable or empty (then nobody gets in)."""
    try:
        return Path(path).read_bytes().strip() or None
    except OSError:
        log.warning("kvcache add-on: the token file %s cannot be read: every request is refused", path)
        return None


async def read_body(receive: Receive) -> bytes:
    """The whole request body, up to ``wire.MAX_BODY_BYTES``."""
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise wire.Refused(400, "invalid", "the client left before its request was complete")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > wire.MAX_BODY_BYTES:
            raise wire.Refused(413, "too_large", f"the body is larger than {wire.MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


async def send_json(
    send: Send, status: int, body: dict[str, Any], *, allow: str | None = None, authenticate: bool = False
) -> None:
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    if allow:
        headers.append((b"allow", allow.encode()))
    if authenticate:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def report_late(task: asyncio.Task[Any]) -> None:
    """An order that outlived its request: say how it ended, since nobody is waiting any more."""
    if task.cancelled():
        return
    error = task.exception()
    if error is None:
        log.info("kvcache add-on: an order that was answered as pending has finished")
    else:
        log.warning("kvcache add-on: an order that was answered as pending failed: %s", error)
