"""Reading what the client sends: its body within limits, the model it asks for, and what is changed on the way.

A body goes upstream as it came wherever nothing must change; what is added (defaults, ``stream_options``) is put
before its last brace, so that a large prompt is neither parsed back nor copied more than once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import orjson

from models_app.router.endpoints import Endpoint
from models_app.router.errors import RouterError, bad_request
from models_app.router.multipart import Form
from models_app.router.table import ModelRoute, Name, Target

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_WANTED = frozenset(
    {
        b"accept",
        b"anthropic-beta",
        b"anthropic-version",
        b"authorization",
        b"content-length",
        b"content-type",
        b"traceparent",
        b"tracestate",
        b"x-api-key",
        b"x-request-id",
    }
)


#: Words that an engine's own models read as true where a boolean belongs.
_TRUE = frozenset({"1", "on", "t", "true", "y", "yes"})


def is_true(value: object) -> bool:
    """Whether an engine takes ``value`` for true: 1 and "yes" too, and who writes so is counted all the same."""
    return value.lower() in _TRUE if isinstance(value, str) else value == 1


class ClientGone(Exception):
    """The client left before it had sent all of its body."""


def wanted_headers(scope: Scope) -> dict[bytes, bytes]:
    """Those headers that the router looks at or passes on; all others stay here."""
    return {name: value for name, value in scope["headers"] if name in _WANTED}


def too_large(limit: int) -> RouterError:
    return RouterError(413, "request_too_large", f"The request body is larger than {limit // 1024**2} MiB.")


class Buffered:
    """Bytes of request bodies that this process holds now, with a bound: a refusal beats running out of memory."""

    __slots__ = ("held", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def take(self, size: int) -> None:
        if self.held + size > self.limit:
            raise RouterError(
                503, "router_busy", "The router holds too many request bodies at the moment.", retry_after_s=2
            )
        self.held += size

    def give(self, size: int) -> None:
        self.held -= size


class BodyWatch:
    """Ends requests whose client fell silent in the middle of its body. One sweep for all: a timer each would cost
    more than reading a small body does."""

    __slots__ = ("_expired", "_until", "limit_s")

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._until: dict[asyncio.Task[object], float] = {}
        self._expired: set[asyncio.Task[object]] = set()

    def sweep(self, now: float) -> None:
        for task in [task for task, until in self._until.items() if until < now]:
            del self._until[task]
            self._expired.add(task)
            task.cancel()

    async def receive(self, receive: Receive, task: asyncio.Task[object]) -> MutableMapping[str, Any]:
        """The next part of the body. Raises 408, or ClientGone."""
        self._until[task] = time.monotonic() + self.limit_s
        try:
            message = await receive()
        except asyncio.CancelledError:
            if task not in self._expired:
                raise
            task.uncancel()
            raise RouterError(
                408, "request_timeout", f"No part of the request body came for {self.limit_s:g} s."
            ) from None
        finally:
            self._until.pop(task, None)
            self._expired.discard(task)
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message


async def read_body(
    receive: Receive,
    task: asyncio.Task[object],
    headers: Mapping[bytes, bytes],
    limit: int,
    watch: BodyWatch,
    buffered: Buffered,
) -> bytes:
    """The whole body; the caller gives ``len(body)`` back to ``buffered``. ``task`` is the one that asks.

    Raises 413 before anything is read when the declared length is over the limit, and as soon as what came is.
    """
    declared = headers.get(b"content-length")
    if declared is not None:
        if not declared.isdigit():
            raise bad_request("Content-Length is not a number.")
        if int(declared) > limit:
            raise too_large(limit)
    message = await watch.receive(receive, task)
    if not message.get("more_body", False):
        body = bytes(message.get("body", b""))
        if len(body) > limit:
            raise too_large(limit)
        buffered.take(len(body))
        return body
    pieces = bytearray()
    try:
        while True:
            piece = message.get("body", b"")
            if len(pieces) + len(piece) > limit:
                raise too_large(limit)
            buffered.take(len(piece))
            pieces += piece
            if not message.get("more_body", False):
                return bytes(pieces)
            message = await watch.receive(receive, task)
    except BaseException:
        buffered.give(len(pieces))
        raise


class Ask:
    """One inference request, understood as far as the router must."""

    __slots__ = ("body", "content_type", "data", "endpoint", "form", "model", "stream", "strip_usage")

    def __init__(self, endpoint: Endpoint, body: bytes, content_type: bytes) -> None:
        """Raises 400 (as RouterError) for what is not well-formed."""
        self.endpoint = endpoint
        self.body = body
        self.content_type = content_type
        self.form: Form | None = None
        self.data: dict[str, Any] = {}
        self.strip_usage = False
        model: Any
        if endpoint.multipart:
            self.form = Form(body, content_type)
            model = self.form.field(b"model")
            self.stream = is_true(self.form.field(b"stream"))
        else:
            self.data = self._object(body)
            model = self.data.get("model")
            self.stream = endpoint.streams and is_true(self.data.get("stream"))
        if not isinstance(model, str) or not model:
            raise bad_request("Say which model in 'model' (a string).", code="missing_model", param="model")
        self.model: str = model

    @staticmethod
    def _object(body: bytes) -> dict[str, Any]:
        try:
            data = orjson.loads(body)
        except orjson.JSONDecodeError as exc:
            raise bad_request(f"The request body is not JSON: {exc}.", code="invalid_json") from None
        if not isinstance(data, dict):
            raise bad_request("The request body is not a JSON object.", code="invalid_json")
        return data

    def fitting(self, route: ModelRoute) -> tuple[Target, ...]:
        """The instances whose KV limit in force can hold this request: one that never fits would block an engine.

        Raises 400 (as RouterError) when none can. Only what is certain counts: tokens that the client asks for, and a
        prompt given as token ids. A text prompt counts nothing, for its tokens are not known here. Where the model's
        own context is what limits, the engine's refusal is the better answer.
        """
        if not route.tight or self.form is not None:
            return route.targets
        for name in self.endpoint.length_fields:
            wanted = self.data.get(name)
            if isinstance(wanted, int) and not isinstance(wanted, bool):
                break
        else:
            name, wanted = "", 0
        prompt = self._prompt_tokens()
        context = route.max_model_len or float("inf")
        fit = tuple(
            one
            for one in route.targets
            if one.token_limit is None or wanted + prompt <= one.token_limit or one.token_limit >= context
        )
        if fit:
            return fit
        limit = max(one.token_limit or 0 for one in route.targets)
        need = " plus ".join(
            ([f"a prompt of {prompt} tokens"] if prompt else []) + ([f"{name}={wanted}"] if wanted else [])
        )
        raise RouterError(
            400,
            "context_exceeds_kv_limit",
            f"This request needs room for {prompt + wanted} tokens ({need}), but the KV limit now in force for "
            f"'{route.name}' holds at most {limit} tokens of one request. Ask for fewer, or have the limit raised.",
            param=name or self.endpoint.prompt_field,
        )

    def _prompt_tokens(self) -> int:
        """Length of the longest prompt given as token ids, less what the client wants cut off."""
        prompt = self.data.get(self.endpoint.prompt_field) if self.endpoint.prompt_field else None
        if not isinstance(prompt, list) or not prompt:
            return 0
        if isinstance(prompt[0], int):
            tokens = len(prompt)
        else:
            tokens = max((len(one) for one in prompt if isinstance(one, list)), default=0)
        cut = self.data.get("truncate_prompt_tokens")
        if isinstance(cut, int):
            tokens = min(tokens, cut) if cut >= 0 else 0
        return tokens

    def upstream_body(self, name: Name, route: ModelRoute) -> bytes:
        """What the engine gets: the served name for an alias, defaults for what is absent, usage asked for."""
        if self.form is not None:
            return self.body if self.model == route.name else self.form.with_field(b"model", route.name)
        data = self.data
        added = {key: value for key, value in name.defaults.items() if key not in data} if name.defaults else {}
        changed: dict[str, Any] = {}
        if self.model != route.name:
            changed["model"] = route.name
        self.strip_usage = False
        if self.stream and self.endpoint.include_usage:
            options = data.get("stream_options")
            if options is None:
                self.strip_usage = True
                if "stream_options" in data:
                    changed["stream_options"] = {"include_usage": True}
                else:
                    added["stream_options"] = {"include_usage": True}
            elif isinstance(options, dict) and not is_true(options.get("include_usage")):
                self.strip_usage = True
                changed["stream_options"] = {**options, "include_usage": True}
                if options.get("continuous_usage_stats"):  # without usage at the end it has no effect: keep it so
                    changed["stream_options"]["continuous_usage_stats"] = False
        if changed:
            return orjson.dumps({**data, **changed, **added})
        if added:
            return self.body[: self.body.rindex(b"}")] + b"," + orjson.dumps(added)[1:]
        return self.body

    def affinity_text(self) -> str:
        """The beginning of the prompt: requests that share it find it cached in the engine that saw it last."""
        prompt = self.data.get("messages") or self.data.get("prompt") or self.data.get("input") or ""
        if isinstance(prompt, list):
            text = ""
            for one in prompt[:2]:
                text += str(one.get("content", "")) if isinstance(one, dict) else str(one)
                if len(text) >= 1024:
                    break
            return text[:1024]
        return str(prompt)[:1024]
