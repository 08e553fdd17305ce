"""The allow-list: which paths exist, and what the router must know of each.

A path that is not here does not exist, whatever an engine offers: developer routes, ``/metrics``, ``/kvcache/*``,
``/invocations`` and the ``render`` routes are never reachable. Left out as well are what vLLM offers only when it is
started in a special way (``/cohere/v2/chat``, ``/inference/v1/generate``, the WebSocket ``/v1/realtime``) and answers
that live in one engine's memory (``/v1/responses/{id}``). The path that goes upstream is the constant written
here, never what the client sent, and no query string goes with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from models_app.router.errors import Dialect


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """One inference route of the engine."""

    path: str
    dialect: Dialect = Dialect.OPENAI
    multipart: bool = False
    streams: bool = False  # honours "stream": true
    include_usage: bool = False  # tells usage in a stream only when stream_options asks for it
    length_fields: tuple[str, ...] = ()  # where a request declares how many tokens it may generate
    prompt_field: str = ""  # where a prompt may be a list of token ids


_CHAT_LENGTHS = ("max_completion_tokens", "max_tokens")

_ALL = (
    Endpoint("/v1/chat/completions", streams=True, include_usage=True, length_fields=_CHAT_LENGTHS),
    Endpoint("/v1/chat/completions/batch", length_fields=_CHAT_LENGTHS),
    Endpoint("/v1/completions", streams=True, include_usage=True, length_fields=("max_tokens",), prompt_field="prompt"),
    Endpoint("/v1/responses", Dialect.RESPONSES, streams=True, length_fields=("max_output_tokens",)),
    Endpoint("/v1/messages", Dialect.ANTHROPIC, streams=True, length_fields=("max_tokens",)),
    Endpoint("/v1/messages/count_tokens", Dialect.ANTHROPIC),
    Endpoint("/v1/embeddings", prompt_field="input"),
    Endpoint("/v2/embed"),
    Endpoint("/v1/rerank"),
    Endpoint("/v2/rerank"),
    Endpoint("/rerank"),
    Endpoint("/v1/score"),
    Endpoint("/score"),
    Endpoint("/pooling"),
    Endpoint("/classify"),
    Endpoint("/generative_scoring"),
    Endpoint("/tokenize"),
    Endpoint("/detokenize"),
    Endpoint("/v1/audio/transcriptions", multipart=True, streams=True),
    Endpoint("/v1/audio/translations", multipart=True, streams=True),
)

ENDPOINTS: dict[str, Endpoint] = {endpoint.path: endpoint for endpoint in _ALL}

#: Paths that accept Anthropic's ``x-api-key`` beside a bearer key.
ANTHROPIC_PREFIX = "/v1/messages"


def dialect_of(path: str) -> Dialect:
    """The dialect to speak of errors in, for any path."""
    endpoint = ENDPOINTS.get(path)
    if endpoint is not None:
        return endpoint.dialect
    return Dialect.ANTHROPIC if path.startswith(ANTHROPIC_PREFIX) else Dialect.OPENAI
