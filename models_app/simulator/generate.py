"""/v1/chat/completions, /v1/completions and /v1/responses: whole and streamed. All async."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from models_app.simulator import answers, prompts, text
from models_app.simulator.client import Aborted, EngineClient, EngineDeadError
from models_app.simulator.http import DONE, ApiError, Request, event
from models_app.simulator.metrics import Metrics
from models_app.simulator.prompts import Choice, Job

DEFAULT_COMPLETION_TOKENS = 16
#: What vLLM 0.30 ends its answers with.
_TAIL = {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}


class Generator:
    """Runs generation requests on the engine."""

    def __init__(self, client: EngineClient, metrics: Metrics) -> None:
        self._client = client
        self._config = client.config
        self._metrics = metrics
        self._fingerprint = f"vllm-{client.config.vllm_version}-simulated"

    # -- the engine ----------------------------------------------------------------------------------------------

    async def tokens(self, choice: Choice, prompt_tokens: int) -> AsyncGenerator[tuple[str, str | None], None]:
        """The pieces of one choice as they come: text and, with the last, the finish reason."""
        config, answer = self._config, choice.answer
        hashes = text.block_hashes(choice.prompt, config.block_tokens) if config.prefix_caching else []
        watch = self._metrics.request(prompt_tokens, answer.count)
        stream = self._client.generate(choice.request_id, len(choice.prompt), answer.count, hashes)
        try:
            async with contextlib.aclosing(stream):
                async for count in stream:
                    watch.tokens(count)
                    start, choice.done = choice.done, choice.done + count
                    last = choice.done >= answer.count
                    yield answer.part(start, choice.done), answer.finish_reason if last else None
            watch.finished(answer.finish_reason)
        except Aborted:
            watch.finished("abort")
            yield "", "abort"

    async def finish(self, job: Job) -> list[tuple[str, str]]:
        """Every choice to its end: text and finish reason."""

        async def one(choice: Choice) -> tuple[str, str]:
            said, reason = [], "abort"
            async for piece, ended in self.tokens(choice, len(choice.prompt)):
                said.append(piece)
                reason = ended or reason
            return "".join(said), reason

        return list(await asyncio.gather(*map(one, job.choices)))

    async def merged(self, job: Job) -> AsyncGenerator[tuple[Choice, str, str | None], None]:
        """The pieces of all choices in the order in which they come."""
        if len(job.choices) == 1:
            only = job.choices[0]
            pieces = self.tokens(only, len(only.prompt))
            async with contextlib.aclosing(pieces):
                async for piece, reason in pieces:
                    yield only, piece, reason
            return
        queue: asyncio.Queue[tuple[Choice, str, str | None] | BaseException] = asyncio.Queue()

        async def feed(choice: Choice) -> None:
            try:
                async for piece, reason in self.tokens(choice, len(choice.prompt)):
                    queue.put_nowait((choice, piece, reason))
            except Exception as error:
                queue.put_nowait(error)

        feeds = [asyncio.ensure_future(feed(choice)) for choice in job.choices]
        try:
            left = len(feeds)
            while left:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                left -= item[2] is not None
        finally:
            for each in feeds:
                each.cancel()
            await asyncio.gather(*feeds, return_exceptions=True)

    def refuse_when_draining(self) -> None:
        """During ``--shutdown-timeout`` new requests fail in this odd way (vLLM 0.30)."""
        if self._client.draining:
            raise ApiError(500, "cannot schedule new futures after shutdown", "InternalServerError")

    # -- chat ----------------------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> None:
        self.refuse_when_draining()
        body = await request.json()
        model = prompts.served_model(self._config, body)
        stream, usage, always = prompts.stream_options(body)
        prompt = text.encode(prompts.chat_prompt(body, model))
        tool = prompts.tool_wanted(body, auto_tools=self._config.auto_tools)
        forced = str(tool["arguments"]) if tool else answers.forced_json(body.get("response_format"))
        name = prompts.request_name("chatcmpl", request.headers)
        found = prompts.choices(self._config, [prompt], body, default_tokens=None, name=name, forced=forced)
        job = Job(model, found, len(prompt), stream, usage or always, always, tool)
        if stream:
            await request.reply_events(self._chat_events(job, name))
            return
        results = await request.unless_gone(self.finish(job))
        await request.reply_json(
            {
                **_head(name, "chat.completion", model),
                "choices": [
                    {
                        "index": choice.index,
                        "message": _message(said, tool),
                        "logprobs": None,
                        "finish_reason": _reason(reason, tool),
                        "stop_reason": choice.answer.stop_reason,
                        "token_ids": None,
                        "routed_experts": None,
                    }
                    for choice, (said, reason) in zip(job.choices, results, strict=True)
                ],
                "service_tier": None,
                "system_fingerprint": self._fingerprint,
                "usage": _usage(job),
                "prompt_logprobs": None,
                "prompt_token_ids": None,
                "prompt_text": None,
                **_TAIL,
            }
        )

    async def _chat_events(self, job: Job, name: str) -> AsyncGenerator[bytes, None]:
        head = _head(name, "chat.completion.chunk", job.model)
        opening = {"prompt_token_ids": None, "prompt_text": None}

        def chunk(choice: Choice, delta: dict[str, Any], reason: str | None, **more: Any) -> bytes:
            shown = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": reason, **more}
            usage = {"usage": _counts(job)} if job.continuous_usage else {}
            return event({**head, "choices": [shown], **(opening if "role" in delta else {}), **usage})

        started: set[int] = set()
        try:
            pieces = self.merged(job)
            async with contextlib.aclosing(pieces):
                async for choice, piece, reason in pieces:
                    if choice.index not in started:
                        started.add(choice.index)
                        yield chunk(choice, {"role": "assistant", "content": ""}, None)
                        if job.tool:
                            yield chunk(choice, _tool_start(job.tool), None)
                    delta: dict[str, Any] = {"content": piece}
                    if job.tool:
                        delta = {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}
                    more = {"stop_reason": choice.answer.stop_reason} if reason else {}
                    yield chunk(choice, delta, _reason(reason, job.tool), **more, token_ids=None)
            if job.include_usage:
                yield event({**head, "choices": [], "usage": _counts(job), "system_fingerprint": self._fingerprint})
        except EngineDeadError as error:
            yield event(_died(error))
        yield DONE

    # -- completions ---------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> None:
        self.refuse_when_draining()
        body = await request.json()
        model = prompts.served_model(self._config, body)
        stream, usage, always = prompts.stream_options(body)
        given = prompts.completion_prompts(body.get("prompt"))
        name = prompts.request_name("cmpl", request.headers)
        found = prompts.choices(
            self._config,
            given,
            body,
            default_tokens=DEFAULT_COMPLETION_TOKENS,
            name=name,
            forced=answers.forced_json(body.get("response_format")),
        )
        echo = text.decode(given[0]) if body.get("echo") else ""
        job = Job(model, found, sum(map(len, given)), stream, usage or always, always, echo=echo)
        if stream:
            await request.reply_events(self._completion_events(job, name))
            return
        results = await request.unless_gone(self.finish(job))
        await request.reply_json(
            {
                **_head(name, "text_completion", model),
                "choices": [
                    {**_completion_choice(choice, echo + said, reason), "prompt_logprobs": None, "routed_experts": None}
                    for choice, (said, reason) in zip(job.choices, results, strict=True)
                ],
                "service_tier": None,
                "system_fingerprint": self._fingerprint,
                "usage": _usage(job),
                **_TAIL,
            }
        )

    async def _completion_events(self, job: Job, name: str) -> AsyncGenerator[bytes, None]:
        head = _head(name, "text_completion", job.model)
        started: set[int] = set()
        try:
            pieces = self.merged(job)
            async with contextlib.aclosing(pieces):
                async for choice, piece, reason in pieces:
                    said = piece if choice.index in started else job.echo + piece
                    started.add(choice.index)
                    usage = {"usage": _counts(job)} if job.continuous_usage else {}
                    yield event({**head, "choices": [_completion_choice(choice, said, reason)], **usage})
            if job.include_usage:
                yield event({**head, "choices": [], "usage": _counts(job), "system_fingerprint": self._fingerprint})
        except EngineDeadError as error:
            yield event(_died(error))
        yield DONE

    # -- responses -----------------------------------------------------------------------------------------------

    async def responses(self, request: Request) -> None:
        """The Responses API in its plainest form: one text, no state kept between requests."""
        self.refuse_when_draining()
        body = await request.json()
        model = prompts.served_model(self._config, body)
        given = body.get("input")
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        prompt = text.encode(prompts.chat_prompt({"messages": messages}, model))
        name = f"resp_{uuid.uuid4().hex[:16]}"
        asked = {**body, "max_tokens": body.get("max_output_tokens"), "n": 1}
        found = prompts.choices(self._config, [prompt], asked, default_tokens=None, name=name)
        job = Job(model, found, len(prompt))
        if body.get("stream"):
            await request.reply_events(self._response_events(job, name))
            return
        ((said, reason),) = await request.unless_gone(self.finish(job))
        await request.reply_json(_response(job, name, said, "incomplete" if reason == "length" else "completed"))

    async def _response_events(self, job: Job, name: str) -> AsyncGenerator[bytes, None]:
        number = 0

        def named(kind: str, **content: Any) -> bytes:
            nonlocal number
            number += 1
            return f"event: {kind}\n".encode() + event({"type": kind, "sequence_number": number - 1, **content})

        said = []
        reason: str | None = None
        yield named("response.created", response=_response(job, name, "", "in_progress"))
        pieces = self.merged(job)
        async with contextlib.aclosing(pieces):
            async for _choice, piece, ended in pieces:
                said.append(piece)
                reason = ended or reason
                yield named("response.output_text.delta", item_id=f"msg_{name}", output_index=0, delta=piece)
        status = "incomplete" if reason == "length" else "completed"
        yield named("response.completed", response=_response(job, name, "".join(said), status))


def _head(name: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def _counts(job: Job) -> dict[str, Any]:
    done = sum(choice.done for choice in job.choices)
    return {"prompt_tokens": job.prompt_tokens, "total_tokens": job.prompt_tokens + done, "completion_tokens": done}


def _usage(job: Job) -> dict[str, Any]:
    return {**_counts(job), "prompt_tokens_details": None, "completion_tokens_details": None}


def _reason(reason: str | None, tool: Any) -> str | None:
    return "tool_calls" if tool and reason == "stop" else reason


def _message(said: str, tool: Any) -> dict[str, Any]:
    calls = {}
    if tool:
        function = {"name": tool["name"], "arguments": said}
        calls = {"tool_calls": [{"id": _call_id(), "type": "function", "function": function}]}
    return {
        "role": "assistant",
        "content": None if tool else said,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        **calls,
        "reasoning": None,
    }


def _call_id() -> str:
    return f"chatcmpl-tool-{uuid.uuid4().hex[:16]}"


def _tool_start(tool: Any) -> dict[str, Any]:
    function = {"name": tool["name"], "arguments": ""}
    call = {"index": 0, "id": _call_id(), "type": "function", "function": function}
    return {"tool_calls": [call]}


def _completion_choice(choice: Choice, said: str, reason: str | None) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": said,
        "logprobs": None,
        "finish_reason": reason,
        "stop_reason": choice.answer.stop_reason if reason else None,
        "prompt_token_ids": None,
        "token_ids": None,
    }


def _response(job: Job, name: str, said: str, status: str) -> dict[str, Any]:
    done = sum(choice.done for choice in job.choices)
    content: list[dict[str, Any]] = [{"type": "output_text", "text": said, "annotations": [], "logprobs": None}]
    message = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": content}
    finished = status != "in_progress"
    usage = {"input_tokens": job.prompt_tokens, "output_tokens": done, "total_tokens": job.prompt_tokens + done}
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "model": job.model,
        "output": [message] if finished else [],
        "usage": usage if finished else None,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "temperature": None,
        "top_p": None,
    }


def _died(error: Exception) -> dict[str, Any]:
    return ApiError(500, str(error), "InternalServerError").body
