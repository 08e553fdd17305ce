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


def chat_prompt(body: Mapping[str, Any], model: str) -> str:
    """The messages as one text, through a chat template of the common kind."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        kind, text_ = (
            ("missing", "Field required") if messages is None else ("list_type", "Input should be a valid list")
        )
        raise invalid("body.messages", text_, kind, body if messages is None else messages)
    if not messages:
        raise ApiError(400, "Cannot apply chat template to an empty conversation. Provide at least one message.")
    parts = []
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        # Any role is taken that is a text: what becomes of it is the template's affair.
        if not isinstance(role, str):
            raise invalid(f"body.messages.{number}.role", "Field required", "missing", message)
        parts.append(f"<|{role}|>\n{content_text(message.get('content'), model)}\n")
        if message.get("tool_calls"):
            parts.append(json.dumps(message["tool_calls"]))
    if body.get("tools"):
        parts.insert(0, json.dumps(body["tools"]))
    return "".join(parts) + "<|assistant|>\n"


def content_text(content: Any, model: str) -> str:
    """A message's text; a text-only model takes no pictures."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid("body.messages.content", "Input should be a valid string", "string_type", content)
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            parts.append(part)
        elif kind in ("text", "input_text", "output_text", "refusal"):
            parts.append(str(part.get("text") or part.get("refusal") or ""))
        elif kind in ("image_url", "input_audio", "video_url", "audio_url", "input_image"):
            raise ApiError(400, f"{model} is not a multimodal model")
        else:
            raise ApiError(400, f"Unknown part type: {kind}")
    return "\n".join(parts)


def completion_prompts(prompt: Any) -> list[list[int]]:
    """``prompt`` of /v1/completions: a text, token ids, or a list of either."""
    if isinstance(prompt, str) and prompt:
        return [text.encode(prompt)]
    if prompt == []:
        raise ApiError(400, "You must pass at least one prompt")
    if isinstance(prompt, list):
        if all(isinstance(each, str) for each in prompt):
            return [text.encode(each) for each in prompt]
        if all(_is_token(each) for each in prompt):
            return [list(prompt)]
        if all(isinstance(each, list) and each and all(_is_token(token) for token in each) for each in prompt):
            return [list(each) for each in prompt]
    raise ApiError(400, "Either prompt or prompt_embeds must be provided and non-empty.", named="prompt")


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
    name_of_limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    asked = _whole(body, name_of_limit, None, low=1)
    if asked is not None and asked > config.max_model_len:
        raise ApiError(
            400,
            f"{name_of_limit}={asked} cannot be greater than max_model_len=max_total_tokens={config.max_model_len}. "
            "Please request fewer output tokens.",
            named=name_of_limit,
            value=asked,
        )
    temperature = body.get("temperature")
    if isinstance(temperature, (int, float)) and temperature < 0:
        number_ = float(temperature)
        raise ApiError(400, f"temperature must be non-negative, got {number_}.", named="temperature", value=number_)
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
    wanted = asked if asked is not None else (default or 0)
    if left <= 0 or wanted > left:
        # vLLM stops counting when it knows enough, hence "at least".
        least = length - wanted + 1
        raise ApiError(
            400,
            f"This model's maximum context length is {length} tokens. However, you requested {wanted} output tokens "
            f"and your prompt contains at least {least} input tokens, for a total of at least {length + 1} tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens.",
            named="input_tokens",
            value=least,
        )
    return wanted or left


def _whole(body: Mapping[str, Any], name: str, default: int | None, *, low: int, high: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        if isinstance(value, str):
            message = "Input should be a valid integer, unable to parse string as an integer"
            raise invalid(f"body.{name}", message, "int_parsing", value)
        raise invalid(f"body.{name}", "Input should be a valid integer", "int_type", value)
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if value < low else f"at most {high}"
        error = f"{name} must be {bound}, got {value}."
        # Of the sampling parameters that vLLM checks late, ``n`` alone is not named.
        raise ApiError(400, error) if name == "n" else ApiError(400, error, named=name, value=value)
    return value


def tool_wanted(body: Mapping[str, Any], *, auto_tools: bool) -> Mapping[str, Any] | None:
    """The function that must be called, with made-up arguments; None when the answer is text."""
    if body.get("tools") == []:
        raise ApiError(
            400,
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
            named="tools",
        )
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
        raise ApiError(400, "When using `tool_choice`, `tools` must be set.", named="tool_choice")
    else:
        if tools and choice in (None, "auto") and not auto_tools:
            raise ApiError(
                400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
            )
        return None
    arguments = answers.from_schema(wanted.get("parameters") or {"type": "object"})
    return {"name": wanted.get("name"), "arguments": json.dumps(arguments)}


def stream_options(body: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """``stream``, usage at the end, usage in every chunk."""
    stream = bool(body.get("stream"))
    options = body.get("stream_options") or {}
    if options and not stream:
        raise ApiError(400, "Stream options can only be defined when `stream=True`.", named="stream_options")
    include = bool(options.get("include_usage"))
    return stream, include, include and bool(options.get("continuous_usage_stats"))


def request_name(prefix: str, headers: Mapping[str, str]) -> str:
    """``chatcmpl-…``: the client's ``X-Request-Id`` when it sent one."""
    return f"{prefix}-{headers.get('x-request-id') or uuid.uuid4().hex[:16]}"
