"""Control calls to one engine: short, authenticated, each with a time limit. Synchronous, for workers.

A request of a client never goes this way (the router carries those). Answers of ``/kvcache`` are returned as the add-on
sent them (``kvcache_addon/wire.py``); refusals are raised with the engine's own sentence and code.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping, Sequence
from functools import cache
from types import TracebackType
from typing import Any

import httpx

from models_app.engines.metrics import EngineMetrics, parse_metrics
from models_app.errors import EngineUnavailable, SardeenzError

__all__ = ["EngineClient", "EngineMetrics", "EngineRefused"]


_CONNECT_S = 2.0
_SENTENCE_LIMIT = 500


@cache
def _certificates() -> ssl.SSLContext:
    """Read once per process: httpx would read the authorities' certificates anew for every client, 30 ms each."""
    return httpx.create_ssl_context(trust_env=False)


class EngineRefused(SardeenzError):
    """The engine answered, and the answer is no. ``code`` and message are its own, ``facts`` the rest of its answer.

    ``status`` is the engine's HTTP status: 400 bad value, 401 wrong token, 404 no such endpoint, 409 below the floor …
    """

    def __init__(self, message: str, *, code: str, status: int, **facts: Any) -> None:
        super().__init__(message, **facts)
        self.code = code
        self.status = status


class EngineClient:
    """Speaks to the engine at ``base_url`` with its ``token``. ``timeout`` in seconds bounds every call.

    May be used as a context manager; without, it opens and closes a connection for each call.
    """

    def __init__(
        self, base_url: str, token: str, timeout: float = 10.0, *, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout = timeout
        self._transport = transport
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._open: httpx.Client | None = None

    def __enter__(self) -> EngineClient:
        self._open = self._client()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    # --- life

    def health(self) -> bool:
        """Whether ``/health`` says 200. 503 means that the engine core is dead and the server about to end.

        False as well while nobody listens yet. A hung engine still says True: ask ``probe_token`` to be sure.
        """
        try:
            return self._send("GET", "/health").status_code == 200
        except EngineUnavailable:
            return False

    def models(self) -> list[str]:
        """The names that ``/v1/models`` lists: ours must be among them, or a stranger answers on the port."""
        body = self._json("GET", "/v1/models")
        return [str(item.get("id")) for item in body.get("data", []) if isinstance(item, dict)]

    def metrics(self) -> EngineMetrics:
        """Requests, tokens, preemptions and sleep state."""
        answer = self._checked(self._send("GET", "/metrics"))
        return parse_metrics(answer.text)

    def version(self) -> str:
        """vLLM's own version."""
        return str(self._json("GET", "/version").get("version", ""))

    def probe_token(self, model: str | None = None) -> str:
        """Have one token made, and return it: the only proof that the engine still works. Empty when it made none.

        Raises EngineUnavailable when nothing comes within the time limit, which ``/health`` would not show. ``model``:
        the served name (asked for when not given).
        """
        name = model or next(iter(self.models()), "")
        body = self._json(
            "POST", "/v1/completions", json={"model": name, "prompt": "1", "max_tokens": 1, "temperature": 0}
        )
        choices = body.get("choices") or [{}]
        return str(choices[0].get("text") or "")

    # --- KV memory

    def kvcache_status(self) -> dict[str, Any]:
        """``GET /kvcache/status``; ``segments[0]`` is the engine's own."""
        return self._json("GET", "/kvcache/status")

    def kvcache_limit(
        self,
        size_bytes: int,
        *,
        revision: int | None = None,
        force: bool = False,
        reclaim: str | None = None,
        by: str = "",
    ) -> dict[str, Any]:
        """Set the limit, bytes per GPU. Answers ``status`` applied, deferred, starved, or pending (told, not done yet).

        Raises EngineRefused with code ``below_safety_floor``, ``below_hard_minimum``, ``stale``, ``conflict`` ….
        """
        order: dict[str, Any] = {"size_bytes": size_bytes, "force": force}
        if revision is not None:
            order["revision"] = revision
        if reclaim:
            order["reclaim"] = reclaim
        if by:
            order["by"] = by
        return self._json("POST", "/kvcache/limit", json=order)

    def kvcache_trim(self) -> dict[str, Any]:
        """Give idle KV memory back; the limit stays. ``freed_bytes`` is measured."""
        return self._json("POST", "/kvcache/trim", json={})

    def safety_floor(self) -> dict[str, Any]:
        """The lowest limits at which the engine can still make progress."""
        return self._json("GET", "/kvcache/safety_floor")

    def reset_prefix_cache(self) -> dict[str, Any]:
        return self._json("POST", "/kvcache/reset_prefix_cache", json={})

    def abort_stuck(self) -> dict[str, Any]:
        """End waiting requests that can never fit into the limit in force; ``aborted`` lists their ids."""
        return self._json("POST", "/kvcache/abort_stuck", json={})

    # --- sleep

    def sleep(self, level: int = 1, *, mode: str | None = None) -> dict[str, Any]:
        """Level 1 keeps the weights in host memory, 2 drops them. Refused while requests run, unless ``mode`` says."""
        order: dict[str, Any] = {"level": level}
        if mode:
            order["mode"] = mode
        return self._json("POST", "/kvcache/sleep", json=order)

    def wake(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Awake when all parts are: ``status`` says ``awake`` or ``partly_awake``."""
        return self._json("POST", "/kvcache/wake", json={"tags": list(tags)} if tags else {})

    def pause(self, mode: str | None = None) -> dict[str, Any]:
        return self._json("POST", "/kvcache/pause", json={"mode": mode} if mode else {})

    def resume(self) -> dict[str, Any]:
        return self._json("POST", "/kvcache/resume", json={})

    # --- transport

    def _client(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.base_url,
            headers=self._headers,
            timeout=httpx.Timeout(self.timeout, connect=min(_CONNECT_S, self.timeout)),
            transport=self._transport,
            verify=_certificates(),
            trust_env=False,  # an engine is on this host or a private link: never through a proxy
            follow_redirects=False,
        )

    def _send(self, method: str, path: str, *, json: Mapping[str, Any] | None = None) -> httpx.Response:
        try:
            if self._open is not None:
                return self._open.request(method, path, json=json)
            with self._client() as client:
                return client.request(method, path, json=json)
        except httpx.TimeoutException as exc:
            raise EngineUnavailable(
                f"The engine did not answer {path} within {self.timeout:g} s.", path=path, reason="timeout"
            ) from exc
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as exc:
            raise EngineUnavailable(
                f"The engine cannot be reached at {self.base_url}: {exc or type(exc).__name__}.",
                path=path,
                reason="unreachable",
            ) from exc

    def _checked(self, answer: httpx.Response) -> httpx.Response:
        if answer.is_success:
            return answer
        body = _object(answer)
        sentence, code = _refusal(body, answer)
        if answer.status_code in (502, 503, 504):
            raise EngineUnavailable(sentence, path=answer.request.url.path, reason=code)
        facts = {key: value for key, value in body.items() if key not in ("error", "code", "message", "status")}
        raise EngineRefused(sentence, code=code, status=answer.status_code, **facts)

    def _json(self, method: str, path: str, *, json: Mapping[str, Any] | None = None) -> dict[str, Any]:
        answer = self._checked(self._send(method, path, json=json))
        body = _object(answer)
        if not body:
            raise EngineUnavailable(
                f"The engine's answer to {path} cannot be read: {answer.text[:80]!r}.", path=path, reason="not_json"
            )
        return body


def _object(answer: httpx.Response) -> dict[str, Any]:
    try:
        body = answer.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def _refusal(body: Mapping[str, Any], answer: httpx.Response) -> tuple[str, str]:
    """The engine's sentence and code: of the add-on, of OpenAI's error object, or of FastAPI."""
    error = body.get("error")
    if isinstance(error, Mapping):  # vLLM's own: {"error": {"message", "type", "code"}}
        return str(error.get("message", ""))[:_SENTENCE_LIMIT], _code(error.get("type"))
    sentence = error or body.get("detail") or body.get("message") or f"The engine answered {answer.status_code}."
    return str(sentence)[:_SENTENCE_LIMIT], _code(body.get("code") or f"http_{answer.status_code}")


def _code(value: object) -> str:
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(value or "error"))
    return re.sub(r"\W+", "_", text).strip("_").lower()[:64]
