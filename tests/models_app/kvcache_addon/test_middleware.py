"""The engine's door: who may pass, what is answered here, and that nothing waits for ever."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models_app.kvcache_addon.middleware import KVCacheMiddleware, read_token
from models_app.kvcache_addon.wire import LimitOrder, Refused
from tests.models_app.kvcache_addon.test_wire import limit_facts

TOKEN = "t0k3n"
GIB = 2**30


class Backend:
    """Answers at once, unless told otherwise; keeps what it was asked."""

    ipc_name = "sz-test"

    def __init__(self) -> None:
        self.orders: list[LimitOrder] = []
        self.calls: list[Any] = []
        self.delay_s = 0.0
        self.error: Exception | None = None
        self.own_gpus = [{"index": 1, "uuid": "GPU-b", "total": 80 * GIB, "free": 10}, {"total": 40 * GIB, "free": 5}]

    async def _do(self, *call: Any) -> None:
        self.calls.append(call)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error

    async def status(self) -> dict[str, Any]:
        await self._do("status")
        return {"kvcached_active": True, "provider": "addon", "ipc_name": "sz-test", "used_bytes": 1, "limit_bytes": 9,
                "prealloc_bytes": 2}  # fmt: skip

    async def limit(self, order: LimitOrder) -> dict[str, Any]:
        await self._do("limit")
        self.orders.append(order)
        return limit_facts(requested_bytes=order.size_bytes)

    async def trim(self) -> dict[str, Any]:
        await self._do("trim")
        after = 10 * len([call for call in self.calls if call == ("trim",)])
        return {"status": "applied", "before_bytes": 100, "after_bytes": after, "limit_bytes": 9, "used_bytes": 1,
                "prealloc_bytes": 0, "ipc_name": "sz-test"}  # fmt: skip

    async def safety_floor(self) -> dict[str, Any]:
        await self._do("safety_floor")
        return {"hard_minimum_bytes": 2, "safety_floor_bytes": 3, "full_context_floor_bytes": 4,
                "immediate_floor_bytes": 1}  # fmt: skip

    async def gpus(self) -> list[dict[str, Any]]:
        return self.own_gpus

    async def sleep(self, level: int, mode: str) -> dict[str, Any]:
        await self._do("sleep", level, mode)
        return {"status": "asleep", "level": level}

    async def wake(self, tags: tuple[str, ...] | None) -> dict[str, Any]:
        await self._do("wake", tags)
        return {"status": "awake", "level": None}

    async def pause(self, mode: str) -> dict[str, Any]:
        await self._do("pause", mode)
        return {"status": "paused"}

    async def resume(self) -> dict[str, Any]:
        await self._do("resume")
        return {"status": "running"}

    async def reset_prefix_cache(self) -> dict[str, Any]:
        await self._do("reset_prefix_cache")
        return {"status": "reset", "before_bytes": 5, "after_bytes": 2, "freed_bytes": 3}

    async def abort_stuck(self) -> dict[str, Any]:
        await self._do("abort_stuck")
        return {"status": "done", "aborted": []}


class Door:
    """The middleware before an application that only says that it was reached."""

    def __init__(self, **options: Any) -> None:
        self.backend = Backend()
        self.reached: list[Any] = []
        options.setdefault("refill_pause_s", 0.0)
        self.middleware = KVCacheMiddleware(self._app, options.pop("backend", self.backend), **options)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append((scope["type"], scope.get("path")))
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    async def ask(
        self,
        path: str,
        body: Any = None,
        *,
        method: str | None = None,
        token: str | None = TOKEN,
        headers: list[tuple[bytes, bytes]] | None = None,
        **scope: Any,
    ) -> tuple[int, Any]:
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        if headers is None:
            headers = [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        pieces = [raw[i : i + 1000] for i in range(0, len(raw), 1000)] or [b""]
        messages = [
            {"type": "http.request", "body": piece, "more_body": i < len(pieces) - 1} for i, piece in enumerate(pieces)
        ]
        sent: list[Any] = []

        async def receive() -> Any:
            return messages.pop(0)

        async def send(message: Any) -> None:
            sent.append(message)

        whole = {"type": "http", "path": path, "method": method or ("GET" if body is None else "POST")}
        await self.middleware(whole | {"headers": headers} | scope, receive, send)
        answer = sent[1]["body"]
        return sent[0]["status"], json.loads(answer) if answer else None


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine with a token."""
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    monkeypatch.setenv("SARDEENZ_ENGINE_TOKEN_FILE", str(tmp_path / "token"))


@pytest.fixture
async def door(guarded: None) -> AsyncIterator[Door]:
    """A guarded door."""
    yield Door()


@pytest.mark.parametrize("path", ["/kvcache/limit", "/v1/chat/completions", "/metrics", "/sleep", "/healthz", "/"])
@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN + "x", TOKEN[:-1]])
async def test_every_path_but_health_needs_the_token(door: Door, path: str, token: str | None) -> None:
    """F1: vLLM's own --api-key guards /v1 only."""
    status, body = await door.ask(path, token=token)
    assert (status, body["code"]) == (401, "unauthorized")
    assert door.reached == []


async def test_health_needs_no_token(door: Door) -> None:
    assert (await door.ask("/health", token=None))[0] == 204


async def test_other_paths_pass_with_the_token(door: Door) -> None:
    assert (await door.ask("/v1/models"))[0] == 204
    assert door.reached == [("http", "/v1/models")]


@pytest.mark.parametrize(
    "headers",
    [
        [(b"authorization", b"Basic " + TOKEN.encode())],
        [(b"authorization", TOKEN.encode())],
        [(b"authorization", b"Bearer " + TOKEN.encode()), (b"authorization", b"Bearer x")],
        [(b"x-authorization", b"Bearer " + TOKEN.encode())],
        [(b"authorization", b"Bearer \xff\xfe")],
    ],
)
async def test_only_one_bearer_header_counts(door: Door, headers: list[tuple[bytes, bytes]]) -> None:
    assert (await door.ask("/v1/models", headers=headers))[0] == 401


async def test_scheme_is_read_in_any_case(door: Door) -> None:
    assert (await door.ask("/v1/models", headers=[(b"Authorization", b"bearer " + TOKEN.encode())]))[0] == 204


async def test_token_file_that_cannot_be_read_lets_nobody_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SARDEENZ_ENGINE_TOKEN_FILE", str(tmp_path / "missing"))
    assert (await Door().ask("/v1/models"))[0] == 401
    (tmp_path / "empty").write_text(" \n")
    assert read_token(str(tmp_path / "empty")) is None


async def test_engine_without_a_token_can_be_read_but_not_changed() -> None:
    door = Door()
    assert (await door.ask("/kvcache/status", token=None))[0] == 200
    status, body = await door.ask("/kvcache/limit", {"size": "1g"}, token=None)
    assert (status, body["code"]) == (403, "no_token")
    assert door.backend.orders == []
    assert (await door.ask("/v1/models", token=None))[0] == 204


async def test_websocket_without_the_token_is_closed(door: Door) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await door.middleware({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send)
    assert (sent[0]["type"], sent[0]["code"]) == ("websocket.close", 1008)
    assert door.reached == []
    token = [(b"authorization", f"Bearer {TOKEN}".encode())]
    await door.middleware({"type": "websocket", "path": "/v1/realtime", "headers": token}, receive, send)
    assert door.reached == [("websocket", "/v1/realtime")]


async def test_lifespan_passes(door: Door) -> None:
    await door.middleware({"type": "lifespan"}, None, None)  # type: ignore[arg-type]
    assert door.reached == [("lifespan", None)]


@pytest.mark.parametrize("path", ["/m1/kvcache/status", "/kvcache/status", "/m1/kvcache/status/"])
async def test_root_path_may_be_there_or_not(door: Door, path: str) -> None:
    """F2."""
    assert (await door.ask(path, root_path="/m1"))[0] == 200
    assert (await door.ask("/m1/health", root_path="/m1", token=None))[0] == 204


@pytest.mark.parametrize(("path", "method"), [("/kvcache/status", "POST"), ("/kvcache/limit", "GET")])
async def test_wrong_method_is_405(door: Door, path: str, method: str) -> None:
    assert (await door.ask(path, method=method))[0] == 405


async def test_unknown_kvcache_path_goes_on_to_the_application(door: Door) -> None:
    assert (await door.ask("/kvcache/nonsense"))[0] == 204


async def test_large_body_is_refused(door: Door) -> None:
    assert (await door.ask("/kvcache/limit", b" " * 70_000))[0] == 413


@pytest.mark.parametrize(
    "body", [b"{", {"size": "5GiB"}, {"size": "1g", "force": "false"}, b'{"size": NaN}', b'{"size": 1e400}']
)
async def test_odd_order_is_400_and_nothing_is_written(door: Door, body: Any) -> None:
    assert (await door.ask("/kvcache/limit", body))[0] == 400
    assert door.backend.orders == []


async def test_limit_reaches_the_backend_and_its_answer_the_client(door: Door) -> None:
    status, body = await door.ask("/kvcache/limit", {"size": "2g", "revision": 4, "reclaim": "preempt", "by": "ann"})
    assert (status, body["status"], body["success"]) == (200, "applied", True)
    assert door.backend.orders == [LimitOrder(2 * GIB, 4, False, "preempt", "ann")]


async def test_refusal_of_the_backend_keeps_its_status_and_facts(door: Door) -> None:
    door.backend.error = Refused(409, "below_safety_floor", "too little", safety_floor_bytes=7)
    status, body = await door.ask("/kvcache/limit", {"size": "2g"})
    assert (status, body) == (409, {"error": "too little", "code": "below_safety_floor", "safety_floor_bytes": 7})


async def test_other_engines_segment_is_refused(door: Door) -> None:
    """F5."""
    assert (await door.ask("/kvcache/limit", {"size": "2g", "ipc_name": "sz-other"}))[0] == 404
    assert (await door.ask("/kvcache/trim", {"ipc_name": "sz-other"}))[0] == 404
    assert (await door.ask("/kvcache/limit", {"size": "2g", "ipc_name": "sz-test"}))[0] == 200
    assert len(door.backend.orders) == 1


async def test_percent_is_of_the_instances_own_smallest_gpu(door: Door) -> None:
    status, body = await door.ask("/kvcache/limit_percent", {"percent": 50})
    assert (status, body["gpu_total_memory"]) == (200, 40 * GIB)
    assert door.backend.orders[0].size_bytes == 20 * GIB


async def test_percent_without_a_readable_gpu_is_409(door: Door) -> None:
    door.backend.own_gpus = []
    status, body = await door.ask("/kvcache/limit_percent", {"percent": 50})
    assert (status, body["code"]) == (409, "unavailable")


async def test_trim_looks_twice_and_leaves_the_limit(door: Door) -> None:
    """B1, B8: the allocator may refill its reserve right after the first pass."""
    status, body = await door.ask("/kvcache/trim", b"", method="POST")
    assert (status, body["freed_bytes"], body["refilled_bytes"]) == (200, 80, 90)
    assert door.backend.calls == [("trim",), ("trim",)]
    assert door.backend.orders == []


async def test_trim_with_a_target_orders_the_limit_first(door: Door) -> None:
    await door.ask("/kvcache/trim", {"target": "1g", "force": True})
    assert door.backend.calls == [("limit",), ("trim",), ("trim",)]
    assert door.backend.orders[0].force is True


@pytest.mark.parametrize(
    ("path", "body", "call"),
    [
        ("sleep", {}, ("sleep", 1, "wait")),
        ("sleep", {"level": 2, "mode": "abort"}, ("sleep", 2, "abort")),
        ("wake", {}, ("wake", None)),
        ("wake", {"tags": ["weights"]}, ("wake", ("weights",))),
        ("pause", {}, ("pause", "keep")),
        ("resume", {}, ("resume",)),
        ("reset_prefix_cache", {}, ("reset_prefix_cache",)),
        ("abort_stuck", {}, ("abort_stuck",)),
    ],
)
async def test_the_engines_switches(door: Door, path: str, body: Any, call: Any) -> None:
    assert (await door.ask(f"/kvcache/{path}", body))[0] == 200
    assert door.backend.calls == [call]


async def test_slow_engine_is_pending_and_the_order_still_goes_through(guarded: None) -> None:
    door = Door(time_limit_s=0.01)
    door.backend.delay_s = 0.05
    status, body = await door.ask("/kvcache/limit", {"size": "2g"})
    assert (status, body["status"], body["success"]) == (202, "pending", False)
    assert door.backend.orders == []
    for _ in range(200):
        if door.backend.orders:
            break
        await asyncio.sleep(0.01)
    assert len(door.backend.orders) == 1


async def test_slow_order_that_fails_late_is_logged(guarded: None, caplog: pytest.LogCaptureFixture) -> None:
    door = Door(time_limit_s=0.01)
    door.backend.delay_s, door.backend.error = 0.03, Refused(409, "rejected", "no")
    assert (await door.ask("/kvcache/limit", {"size": "2g"}))[0] == 202
    for _ in range(200):
        if "pending failed" in caplog.text:
            break
        await asyncio.sleep(0.01)
    assert "pending failed: no" in caplog.text


async def test_dead_engine_is_503(door: Door) -> None:
    class EngineDeadError(Exception):
        pass

    door.backend.error = EngineDeadError()
    status, body = await door.ask("/kvcache/trim", {})
    assert (status, body["code"]) == (503, "engine_dead")


async def test_unforeseen_error_is_a_named_500(door: Door) -> None:
    door.backend.error = KeyError("x")
    status, body = await door.ask("/kvcache/trim", {})
    assert (status, body["code"]) == (500, "internal")
    assert "KeyError" in body["error"]


async def test_engine_that_is_not_up_yet_is_503(guarded: None) -> None:
    door = Door(backend=None)
    app = SimpleNamespace(state=SimpleNamespace(), routes=[])
    assert (await door.ask("/kvcache/status", app=app))[0] == 503


async def test_applications_own_backend_is_found(guarded: None) -> None:
    door = Door(backend=None)
    app = SimpleNamespace(state=SimpleNamespace(kvcache_backend=door.backend), routes=[])
    assert (await door.ask("/kvcache/status", app=app))[0] == 200


async def test_endpoints_of_the_pull_request_are_not_shadowed(door: Door) -> None:
    app = SimpleNamespace(state=SimpleNamespace(), routes=[SimpleNamespace(path="/kvcache/status")])
    assert (await door.ask("/kvcache/limit", {"size": "1g"}, app=app))[0] == 204
    assert (await door.ask("/kvcache/status", app=app))[0] == 204
    assert (await door.ask("/kvcache/sleep", {}, app=app))[0] == 200
    assert door.backend.orders == []


async def test_client_that_leaves_in_mid_body_orders_nothing(door: Door) -> None:
    messages = [
        {"type": "http.request", "body": b'{"size"', "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    token = [(b"authorization", f"Bearer {TOKEN}".encode())]
    scope = {"type": "http", "path": "/kvcache/limit", "method": "POST", "headers": token}
    await door.middleware(scope, receive, send)
    assert sent[0]["status"] == 400
    assert door.backend.orders == []
