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


#: What answers one route.
Handler = Callable[["Request"], Awaitable[None]]
NOT_GIVEN = object()


class ApiError(Exception):
    """An error answer in vLLM's shape: ``{"error": {"message", "type", "param", "code"}}``.

    ``named`` appends vLLM's ``(parameter=…, value=…)`` for the parameter, with the value when there is one.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "BadRequestError",
        param: str | None = None,
        *,
        named: str | None = None,
        value: object = NOT_GIVEN,
    ) -> None:
        super().__init__(message)
        if named is not None:
            message += f" (parameter={named})" if value is NOT_GIVEN else f" (parameter={named}, value={value})"
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param or named, "code": status}}


class ClientGone(Exception):
    """The client hung up; there is nobody to answer."""


def invalid(location: str, message: str, kind: str, given: object, **context: object) -> ApiError:
    """What a failed validation of the body looks like: 400 with pydantic's findings as text (vLLM 0.30)."""
    return invalid_all([(location, message, kind, given)], **context)


def invalid_all(findings: list[tuple[str, str, str, object]], **context: object) -> ApiError:
    """Several findings at once; the first names the parameter."""
    shown = [
        {"type": kind, "loc": location, "msg": message, "input": _brief(given), **context}
        for location, message, kind, given in findings
    ]
    count = f"{len(shown)} validation error{'s' if len(shown) > 1 else ''}"
    text = "\n".join((f"{count}:", *(f"  {each}" for each in shown)))
    return ApiError(400, text, HTTPStatus.BAD_REQUEST.phrase, findings[0][0])


def _brief(given: object) -> str:
    if isinstance(given, (dict, list)):
        return f"<{type(given).__name__} of {len(given)} items>"
    return str(given)


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
            text = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
            raise ApiError(400, text, HTTPStatus.BAD_REQUEST.phrase)
        if not raw:
            raise invalid("body", "Field required", "missing", None)
        try:
            value = json.loads(raw)
        except ValueError as error:
            where = f"body.{getattr(error, 'pos', 0)}"
            context = {"error": getattr(error, "msg", str(error))}
            raise invalid(where, "JSON decode error", "json_invalid", {}, ctx=context) from None
        if not isinstance(value, dict):
            message = "Input should be a valid dictionary or object to extract fields from"
            raise invalid("body", message, "model_attributes_type", value)
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
