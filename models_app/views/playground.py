"""Trying a model from the browser: the session's rights, no API key, straight to one of the model's ready engines.

Programs use ``/v1`` with a key; this door exists so that no key has to live in a page.
"""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
from asgiref.sync import sync_to_async
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse, StreamingHttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_http_methods, require_POST

from models_app.models import Instance, Model
from models_app.permissions import require_role, role_of
from models_app.presentation.words import state_word

LIMITS = httpx.Timeout(connect=5.0, read=300.0, write=30.0, pool=5.0)
MOST_MESSAGES = 200
MOST_CHARS = 400_000
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request goes. ``token`` is the engine's own and never reaches the browser."""

    url: str
    token: str
    name: str
    defaults: dict[str, Any]


class Refused(Exception):
    """The request cannot be served; the sentence is for the reader."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


@dataclass(slots=True)
class Ask:
    """What the reader typed."""

    model: str
    messages: list[dict[str, str]]
    temperature: float | None
    max_tokens: int | None


def models_to_try() -> list[dict[str, Any]]:
    """Every model with whether it answers now, ready ones first: two queries."""
    best: dict[int, str] = {}
    ready: set[int] = set()
    for instance in Instance.objects.live().select_related("model"):
        best.setdefault(instance.model_id, state_word(instance).text.lower())
        if instance.is_routable:
            ready.add(instance.model_id)
    found = [
        {"name": model.served_model_name, "ready": model.pk in ready, "state": best.get(model.pk, "not launched")}
        for model in Model.objects.all()
    ]
    return sorted(found, key=lambda entry: (not entry["ready"], entry["name"]))


def target_of(name: str) -> Target:
    """A ready engine of the model with this served name or alias. Raises Refused with the reason."""
    model = Model.objects.filter(Q(served_model_name=name) | Q(aliases__name=name)).first()
    if model is None:
        raise Refused(f"There is no model named {name[:128]!r}.", 404)
    rows = list(model.instances.live().select_related("host"))
    ready = [row for row in rows if row.is_routable and row.base_url]
    if not ready:
        if rows:
            raise Refused(f"{model} is {state_word(rows[0]).text.lower()}: it answers when it is ready.", 503)
        raise Refused(f"{model} is not launched. Launch it from its page, then ask again.", 503)
    row = random.choice(ready)  # noqa: S311  spreads load, guards nothing
    return Target(row.base_url or "", row.engine_token, model.served_model_name, dict(model.request_defaults))


def read_ask(data: dict[str, Any]) -> Ask:
    """Check what came from the browser. Raises Refused."""
    messages = data.get("messages")
    if not isinstance(messages, list) or not messages or len(messages) > MOST_MESSAGES:
        raise Refused(f"Send between 1 and {MOST_MESSAGES} messages.", 422)
    clean = []
    for message in messages:
        if (
            not isinstance(message, dict)
            or message.get("role") not in ROLES
            or not isinstance(message.get("content"), str)
        ):
            raise Refused("Each message needs a role (system, user, assistant) and a text.", 422)
        clean.append({"role": message["role"], "content": message["content"]})
    if sum(len(message["content"]) for message in clean) > MOST_CHARS:
        raise Refused("The conversation is too long; begin a new one.", 422)
    return Ask(
        model=str(data.get("model") or ""),
        messages=clean,
        temperature=_number(data.get("temperature"), "temperature", 0.0, 2.0),
        max_tokens=_whole(data.get("max_tokens")),
    )


def _number(value: Any, name: str, low: float, high: float) -> float | None:
    if value in (None, ""):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise Refused(f"The {name} is not a number.", 422) from None
    if not low <= number <= high:
        raise Refused(f"Use a {name} from {low:g} to {high:g}.", 422)
    return number


def _whole(value: Any) -> int | None:
    if value in (None, ""):
        return None
    text = str(value).strip()
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise Refused("Use a whole number of tokens from 1 to 1000000.", 422)
    return int(text)


def body_of(ask: Ask, target: Target, *, stream: bool) -> dict[str, Any]:
    body: dict[str, Any] = {**target.defaults, "model": target.name, "messages": ask.messages, "stream": stream}
    if ask.temperature is not None:
        body["temperature"] = ask.temperature
    if ask.max_tokens is not None:
        body["max_tokens"] = ask.max_tokens
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body


def _message_of(content: bytes, status: int) -> str:
    """The engine's own sentence out of its error body."""
    try:
        error = json.loads(content).get("error")
        text = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = None
    return str(text or f"The engine answered {status}.")[:1000]


@require_http_methods(["GET", "POST"])
@require_role("viewer")
def playground(request: HttpRequest) -> HttpResponse:
    """The page; its POST is the way without JavaScript and answers when the whole answer is there."""
    context: dict[str, Any] = {"messages_so_far": [], "error": "", "chosen": request.GET.get("model", "")}
    status = 200
    if request.method == "POST":
        context |= _plain_round(request)
        status = 200 if not context["error"] else 422
    context["models"] = models_to_try()
    context["history"] = json.dumps(context["messages_so_far"])
    return render(request, "models_app/playground.html", context, status=status)


def _plain_round(request: HttpRequest) -> dict[str, Any]:
    data = request.POST
    try:
        history = json.loads(data.get("history") or "[]")
    except ValueError:
        history = []
    history = history if isinstance(history, list) else []
    prompt = data.get("prompt", "").strip()
    messages = [*history, {"role": "user", "content": prompt}]
    system = data.get("system", "").strip()
    found: dict[str, Any] = {
        "messages_so_far": history,
        "chosen": data.get("model", ""),
        "prompt": prompt,
        "system": system,
        "temperature": data.get("temperature", ""),
        "max_tokens": data.get("max_tokens", ""),
        "error": "",
    }
    if not prompt:
        return found | {"error": "Write something to the model first."}
    try:
        sent = [{"role": "system", "content": system}, *messages] if system else messages
        ask = read_ask({**data.dict(), "messages": sent})
        target = target_of(ask.model)
        response = httpx.post(
            f"{target.url}/v1/chat/completions",
            headers={"Authorization": f"Bearer {target.token}"},
            json=body_of(ask, target, stream=False),
            timeout=LIMITS,
        )
        if response.status_code != 200:
            raise Refused(_message_of(response.content, response.status_code), 422)
        answer = response.json()["choices"][0]["message"].get("content") or ""
    except Refused as exc:
        return found | {"error": exc.message}
    except (httpx.HTTPError, ValueError, LookupError):
        return found | {"error": "The engine did not answer. See its state and log on its page."}
    return found | {"messages_so_far": [*messages, {"role": "assistant", "content": answer}], "prompt": ""}


@require_POST
async def chat(request: HttpRequest) -> HttpResponseBase:
    """One round as server-sent events, the engine's own chunks. The reader leaving ends the engine's work."""
    user = await request.auser()
    if await sync_to_async(role_of)(user) is None:
        return JsonResponse({"error": "Log in first."}, status=401)
    try:
        data = json.loads(request.body)
        if not isinstance(data, dict):
            raise Refused("Send a JSON object.", 422)
        ask = read_ask(data)
        target = await sync_to_async(target_of)(ask.model)
    except Refused as exc:
        return JsonResponse({"error": exc.message}, status=exc.status)
    except ValueError:
        return JsonResponse({"error": "This is no JSON."}, status=400)
    client = httpx.AsyncClient(timeout=LIMITS)
    try:
        upstream = await client.send(
            client.build_request(
                "POST",
                f"{target.url}/v1/chat/completions",
                headers={"Authorization": f"Bearer {target.token}"},
                json=body_of(ask, target, stream=True),
            ),
            stream=True,
        )
    except httpx.HTTPError:
        await client.aclose()
        return JsonResponse({"error": "The engine did not answer. See its state and log on its page."}, status=503)
    if upstream.status_code != 200:
        content = await upstream.aread()
        await upstream.aclose()
        await client.aclose()
        return JsonResponse({"error": _message_of(content, upstream.status_code)}, status=422)
    response = StreamingHttpResponse(_relay(client, upstream), content_type="text/event-stream")
    response.headers["X-Accel-Buffering"] = "no"
    response.headers["Cache-Control"] = "no-store"
    return response


async def _relay(client: httpx.AsyncClient, upstream: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in upstream.aiter_raw():
            yield chunk
    except httpx.HTTPError:
        yield b'data: {"error": {"message": "The engine ended in the middle of its answer."}}\n\n'
    finally:
        await upstream.aclose()
        await client.aclose()
