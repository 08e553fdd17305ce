"""From the body of a generation request to prompts, answers and limits; refusals in vLLM's words."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from models_app.simulator import answers, text
from models_app.simulator.answers import Answer
from models_app.simulator.config import Config
from models_app.simulator.http import ApiError, invalid

ROLES = {"system", "user", "assistant", "tool", "developer", "function"}
MAX_CHOICES = 128


@dataclass
class Choice:
    """One answer under way: what will be said, and how far it has got."""

    index: int
    prompt: list[int]
    answer: Answer
    request_id: str
    done: int = 0


@dataclass
class Job:
    """All of one generation request: its choices, and how the client wants them."""

    model: str
    choices: list[Choice]
    prompt_tokens: int
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    tool: Mapping[str, Any] | None = None
    echo: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


def served_model(config: Config, body: Mapping[str, Any]) -> str:
    """The name under which the model was asked for. Raises the 404 that vLLM answers for any other."""
    name = body.get("model")
    if name is None:
        return config.served_names[0]
    if name not in config.served_names:
        message = f"The model `{name}` does not exist."
        if config.version >= (0, 32):
            message = f"The model `{name}` does not exist. Valid aliases: {', '.join(config.served_names)}."
        raise ApiError(404, message, "NotFoundError", "model")
    return str(name)


def chat_prompt(body: Mapping[str, Any]) -> str:
    """The messages as one text, through a chat template of the common kind."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise invalid(("body", "messages"), "Field required", "missing")
    if not messages:
        raise ApiError(400, "list object has no element 0")
    parts = []
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ROLES:
            raise invalid(("body", "messages", number, "role"), f"Unexpected message role: {role!r}", "literal_error")
        parts.append(f"<|{role}|>\n{content_text(message.get('content'))}\n")
        if message.get("tool_calls"):
            parts.append(json.dumps(message["tool_calls"]))
    if body.get("tools"):
        parts.insert(0, json.dumps(body["tools"]))
    return "".join(parts) + "<|assistant|>\n"


def content_text(content: Any) -> str:
    """A message's text; a text-only model takes no pictures."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(("body", "messages", "content"), "Input should be a valid string or list", "string_type")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            parts.append(part)
        elif kind in ("text", "input_text", "output_text", "refusal"):
            parts.append(str(part.get("text") or part.get("refusal") or ""))
        elif kind in ("image_url", "input_audio", "video_url", "audio_url", "input_image"):
            raise ApiError(400, f"At most 0 {str(kind).split('_', maxsplit=1)[0]}(s) may be provided in one prompt.")
        else:
            raise ApiError(400, f"Unknown part type: {kind}")
    return "\n".join(parts)


def completion_prompts(prompt: Any) -> list[list[int]]:
    """``prompt`` of /v1/completions: a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [text.encode(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(each, str) for each in prompt):
            return [text.encode(each) for each in prompt]
        if all(_is_token(each) for each in prompt):
            return [list(prompt)]
        if all(isinstance(each, list) and each and all(_is_token(token) for token in each) for each in prompt):
            return [list(each) for each in prompt]
    raise ApiError(400, "Either prompt or prompt_embeds must be provided and non-empty.")


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def choices(
    config: Config,
    prompts: Sequence[list[int]],
    body: Mapping[str, Any],
    *,
    default_tokens: int | None,
    name: str,
    forced: str | None = None,
) -> list[Choice]:
    """The answers of a request: ``n`` of them for each prompt. ``default_tokens`` None: as far as the context
    reaches.
    """
    count = _whole(body, "n", 1, low=1, high=MAX_CHOICES) or 1
    asked = _whole(body, "max_completion_tokens", None, low=1)
    asked = _whole(body, "max_tokens", None, low=1) if asked is None else asked
    temperature = body.get("temperature")
    if isinstance(temperature, (int, float)) and temperature < 0:
        raise ApiError(400, f"temperature must be non-negative, got {temperature}.", param="temperature")
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else [str(each) for each in stop]
    varied = (body.get("seed"), temperature) if temperature else ()
    found: list[Choice] = []
    for prompt in prompts:
        limit = _room(config, len(prompt), asked, default_tokens)
        for number in range(count):
            seed = text.seed_of(prompt, *varied, *((number,) if number else ()))
            answer = (
                answers.fixed(forced, limit)
                if forced is not None
                else answers.prose(
                    seed,
                    limit,
                    stop=stop,
                    ignore_eos=bool(body.get("ignore_eos")),
                    minimum=_whole(body, "min_tokens", 0, low=0) or 0,
                )
            )
            index = len(found)
            found.append(Choice(index, prompt, answer, name if not index else f"{index}_{name}"))
    return found


def _room(config: Config, prompt_tokens: int, asked: int | None, default: int | None) -> int:
    """Output tokens that may be produced. Raises the 400 of a request that is longer than the context."""
    length = config.max_model_len
    left = length - prompt_tokens
    if left <= 0 or (asked is not None and asked > left):
        wanted = asked if asked is not None else (default or 1)
        raise ApiError(
            400,
            f"This model's maximum context length is {length} tokens. However, you requested {wanted} output tokens "
            f"and your prompt contains {prompt_tokens} input tokens, for a total of {prompt_tokens + wanted} tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens.",
            param="input_tokens",
        )
    if asked is not None:
        return asked
    return left if default is None else min(default, left)


def _whole(body: Mapping[str, Any], name: str, default: int | None, *, low: int, high: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid(("body", name), "Input should be a valid integer", "int_type")
    if value < low:
        raise ApiError(400, f"{name} must be at least {low}, got {value}.", param=name)
    if high is not None and value > high:
        raise ApiError(400, f"{name} must be at most {high}, got {value}.", param=name)
    return value


def tool_wanted(body: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The function that must be called, with made-up arguments; None when the answer is text."""
    tools = [tool.get("function") or {} for tool in body.get("tools") or () if isinstance(tool, dict)]
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        name = (choice.get("function") or {}).get("name")
        named = [tool for tool in tools if tool.get("name") == name]
        if not named:
            raise ApiError(400, f"Tool '{name}' has not been passed in the tools parameter.")
        wanted = named[0]
    elif choice == "required" and tools:
        wanted = tools[0]
    elif choice == "required":
        raise ApiError(400, "When using `tool_choice`, `tools` must be set.")
    else:
        return None
    arguments = answers.from_schema(wanted.get("parameters") or {"type": "object"})
    return {"name": wanted.get("name"), "arguments": json.dumps(arguments)}


def stream_options(body: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """``stream``, usage at the end, usage in every chunk."""
    stream = bool(body.get("stream"))
    options = body.get("stream_options") or {}
    if options and not stream:
        raise ApiError(400, "Stream options can only be defined when `stream=True`.", param="stream_options")
    return stream, bool(options.get("include_usage")), bool(options.get("continuous_usage_stats"))


def request_name(prefix: str, headers: Mapping[str, str]) -> str:
    """``chatcmpl-…``: the client's ``X-Request-Id`` when it sent one."""
    return f"{prefix}-{headers.get('x-request-id') or uuid.uuid4().hex}"
