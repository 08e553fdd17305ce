"""What the router answers when it cannot pass an answer on, in the error shape of the dialect that was spoken.

OpenAI's shape everywhere, Anthropic's for ``/v1/messages``. A fault of ours, or of an engine, is a 503 with
``Retry-After``; 401 means the client's key and nothing else.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import orjson


class Dialect(Enum):
    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    RESPONSES = "responses"


_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class RouterError(Exception):
    """An answer of the router's own: ``code`` is stable for programs, ``message`` is a sentence for people."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.headers = headers

    def payload(self, dialect: Dialect, request_id: str = "") -> dict[str, Any]:
        """The JSON object of a whole answer."""
        if dialect is Dialect.ANTHROPIC:
            kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
            return {
                "type": "error",
                "error": {"type": kind, "message": self.message, "code": self.code},
                "request_id": request_id,
            }
        kind = _OPENAI_TYPES.get(self.status, "api_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def body(self, dialect: Dialect, request_id: str = "") -> bytes:
        return orjson.dumps(self.payload(dialect, request_id))

    def response_headers(self, body: bytes) -> list[tuple[bytes, bytes]]:
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *self.headers]
        if self.retry_after_s is not None:
            # whole seconds, never 0: a client that comes back at once only makes things worse
            headers.append((b"retry-after", b"%d" % max(1, -int(-self.retry_after_s // 1))))
        if self.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        return headers

    def event(self, dialect: Dialect, request_id: str = "") -> bytes:
        """The SSE event that ends a stream which has begun; the status can no longer be told."""
        if dialect is Dialect.ANTHROPIC:
            return b"event: error\ndata: " + self.body(dialect, request_id) + b"\n\n"
        if dialect is Dialect.RESPONSES:
            data = {"type": "error", "code": self.code, "message": self.message, "param": self.param}
            return b"event: error\ndata: " + orjson.dumps(data) + b"\n\n"
        return b"data: " + self.body(dialect) + b"\n\n"


class UpstreamError(Exception):
    """An engine did not answer as it should. ``kind`` is one of a few words (a label of a metric)."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class StaleConnection(UpstreamError):
    """A kept connection was closed by the engine just as it was used: nobody's fault, ask again on a fresh one."""

    def __init__(self) -> None:
        super().__init__("stale", "the engine closed an idle connection")


def bad_request(message: str, *, code: str = "invalid_request", param: str | None = None) -> RouterError:
    return RouterError(400, code, message, param=param)


def model_not_found(name: str, known: list[str]) -> RouterError:
    shown = ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
    hint = f"Models that this key may use: {shown}." if known else "This key may use no model now."
    return RouterError(404, "model_not_found", f"The model '{name[:200]}' does not exist. {hint}", param="model")
