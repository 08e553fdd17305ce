"""The thin layer between ASGI and the handlers: a request, JSON answers, server-sent events, vLLM's error shapes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ApiError(Exception):
    """An error answer in vLLM's shape: ``{"error": {"message", "type", "param", "code"}}``."""

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class ClientGone(Exception):
    """The client hung up; there is nobody to answer."""


def invalid(location: tuple[object, ...], message: str, kind: str = "value_error") -> ApiError:
    """What a failed validation of the body looks like: 400 with pydantic's list as text."""
    shown = [{"type": kind, "loc": location, "msg": message}]
    return ApiError(400, str(shown), HTTPStatus.BAD_REQUEST.phrase)


class Request:
    """One HTTP request. The body is read once; afterwards ``gone`` tells when the client hangs up."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, path: str) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path = path
        self._receive = receive
        self._send = send
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self.query = {name: values[-1] for name, values in parse_qs(scope.get("query_string", b"").decode()).items()}
        self._body: bytes | None = None

    async def body(self) -> bytes:
        if self._body is None:
            chunks = []
            more = True
            while more:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunks.append(message.get("body", b""))
                more = message.get("more_body", False)
            self._body = b"".join(chunks)
        return self._body

    async def json(self) -> dict[str, Any]:
        """The JSON object in the body. Raises ``ApiError`` as vLLM answers it."""
        raw = await self.body()
        if not self.headers.get("content-type", "application/json").startswith("application/json"):
            raise ApiError(415, "Unsupported Media Type: Only 'application/json' is allowed", "UnsupportedMediaType")
        try:
            value = json.loads(raw)
        except ValueError as error:
            position = getattr(error, "pos", 0)
            shown = [
                {
                    "type": "json_invalid",
                    "loc": ("body", position),
                    "msg": "JSON decode error",
                    "input": {},
                    "ctx": {"error": getattr(error, "msg", str(error))},
                }
            ]
            raise ApiError(400, str(shown), HTTPStatus.BAD_REQUEST.phrase) from None
        if not isinstance(value, dict):
            raise invalid(("body",), "Input should be a valid dictionary", "model_attributes_type")
        return value

    async def gone(self) -> None:
        """Return when the client has hung up."""
        await self.body()
        while (await self._receive())["type"] != "http.disconnect":
            pass

    # -- answers -------------------------------------------------------------------------------------------------

    async def reply(
        self, status: int, content: bytes, kind: str, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        length = (b"content-length", str(len(content)).encode())
        start = {
            "type": "http.response.start",
            "status": status,
            "headers": [length, *(((b"content-type", kind.encode()),) if kind else ()), *headers],
        }
        await self._send(start)
        await self._send({"type": "http.response.body", "body": content})

    async def reply_json(self, value: Any, status: int = 200) -> None:
        await self.reply(status, dumps(value), "application/json")

    async def reply_empty(self, status: int = 200) -> None:
        await self.reply(status, b"", "")

    async def reply_events(self, events: AsyncGenerator[bytes, None]) -> None:
        """Stream server-sent events until they end, or until the client hangs up: then stop making them at once."""
        await self._send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
            }
        )

        async def pump() -> None:
            async with contextlib.aclosing(events):
                async for event in events:
                    await self._send({"type": "http.response.body", "body": event, "more_body": True})
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

        await self.unless_gone(pump())

    async def unless_gone(self, work: Any) -> Any:
        """The result of ``work``, which is cancelled when the client hangs up first (``ClientGone``)."""
        task = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self.gone())
        try:
            await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientGone
            return task.result()
        finally:
            for each in (task, leaving):
                if not each.done():
                    each.cancel()
            await asyncio.gather(task, leaving, return_exceptions=True)


def dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(value: Any) -> bytes:
    """One server-sent event, in vLLM's spelling."""
    return b"data: " + (value if isinstance(value, bytes) else dumps(value)) + b"\n\n"


DONE = event(b"[DONE]")
