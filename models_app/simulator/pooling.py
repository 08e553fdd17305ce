"""Embeddings, scores, rankings, classes and transcriptions: one forward pass each, no answer to generate. All async.

A model serves either text or these, as in vLLM; which, is told by its architecture, by ``--runner pooling`` or by its
name.
"""

from __future__ import annotations

import base64
import contextlib
import struct
import time
import uuid
from collections.abc import Sequence
from typing import Any

from models_app.simulator import prompts, text
from models_app.simulator.client import EngineClient
from models_app.simulator.config import Config
from models_app.simulator.http import ApiError, Handler, Request, invalid

CLASSES = ("LABEL_0", "LABEL_1")
_EMBED = ("embed", "bge-", "e5-", "gte-", "minilm")
_SCORE = ("rerank", "cross-encoder", "classif")
#: Bytes of 16 kHz 16-bit mono sound, for a rough guess of an upload's length.
_SOUND_BYTES_PER_S = 32_000


def tasks(config: Config) -> frozenset[str]:
    """What the model can be asked for: ``generate``, ``embed``, ``score`` (with ``classify``) or ``transcription``."""
    name = config.model.lower()
    architecture = config.facts.architecture
    if "whisper" in name or architecture.startswith("Whisper"):
        return frozenset({"transcription", "generate"})
    if any(part in name for part in _SCORE) or architecture.endswith("ForSequenceClassification"):
        return frozenset({"score", "classify"})
    pooling = config.shown_args.get("runner") == "pooling" or config.shown_args.get("task") == "embed"
    if pooling or any(part in name for part in _EMBED) or architecture.endswith("Model"):
        return frozenset({"embed"})
    return frozenset({"generate"})


class Pooling:
    """The handlers of the pooling routes."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._config = client.config

    def handlers(self) -> dict[tuple[str, str], Handler]:
        """The routes of the tasks that the model has; vLLM 0.30 has no others (404)."""
        by_task: dict[str, dict[str, Handler]] = {
            "embed": {"/v1/embeddings": self.embeddings, "/pooling": self.pooling},
            "score": {
                "/score": self.score,
                "/v1/score": self.score,
                "/rerank": self.rerank,
                "/v1/rerank": self.rerank,
                "/v2/rerank": self.rerank,
            },
            "classify": {"/classify": self.classify},
            "transcription": {"/v1/audio/transcriptions": self.transcription},
        }
        found = tasks(self._config)
        return {("POST", path): run for task in by_task.keys() & found for path, run in by_task[task].items()}

    async def _pass(self, request: Request, inputs: Sequence[list[int]]) -> int:
        """Run the inputs through the engine; the number of their tokens."""
        for tokens in inputs:
            if len(tokens) > self._config.max_model_len:
                raise ApiError(
                    400,
                    f"This model's maximum context length is {self._config.max_model_len} tokens. However, you "
                    f"requested {len(tokens)} tokens in the input for embedding generation. Please reduce the length "
                    "of the input.",
                )

        async def run() -> None:
            for tokens in inputs:
                stream = self._client.generate(f"pool-{uuid.uuid4().hex}", max(1, len(tokens)), 1, [])
                async with contextlib.aclosing(stream):
                    async for _count in stream:
                        pass

        await request.unless_gone(run())
        return sum(map(len, inputs))

    async def embeddings(self, request: Request) -> None:
        body = await request.json()
        model = prompts.served_model(self._config, body)
        given = body.get("input", body.get("messages"))
        if given is None:
            raise invalid("body.input", "Field required", "missing", body)
        inputs = prompts.completion_prompts(given if "input" in body else prompts.chat_prompt(body, model))
        used = await self._pass(request, inputs)
        size = body.get("dimensions") or self._config.facts.hidden_size
        packed = body.get("encoding_format") == "base64"
        rows: list[Any] = [text.unit_vector(text.seed_of(tokens), int(size)) for tokens in inputs]
        if packed:
            rows = [base64.b64encode(struct.pack(f"<{len(row)}f", *row)).decode() for row in rows]
        await request.reply_json(
            {
                "id": prompts.request_name("embd", request.headers),
                "object": "list",
                "created": int(time.time()),
                "model": model,
                "data": [{"index": number, "object": "embedding", "embedding": row} for number, row in enumerate(rows)],
                "usage": _usage(used),
            }
        )

    async def pooling(self, request: Request) -> None:
        body = await request.json()
        model = prompts.served_model(self._config, body)
        inputs = prompts.completion_prompts(body.get("input"))
        used = await self._pass(request, inputs)
        size = self._config.facts.hidden_size
        rows = [text.unit_vector(text.seed_of(tokens), size) for tokens in inputs]
        await request.reply_json(
            {
                "id": prompts.request_name("pool", request.headers),
                "object": "list",
                "created": int(time.time()),
                "model": model,
                "data": [{"index": number, "object": "pooling", "data": row} for number, row in enumerate(rows)],
                "usage": _usage(used),
            }
        )

    async def rerank(self, request: Request) -> None:
        body = await request.json()
        model = prompts.served_model(self._config, body)
        query, documents = body.get("query"), body.get("documents")
        if not isinstance(query, str) or not isinstance(documents, list):
            missing = "query" if not isinstance(query, str) else "documents"
            raise invalid(f"body.{missing}", "Field required", "missing", body)
        texts = [str(each.get("text", "")) if isinstance(each, dict) else str(each) for each in documents]
        used = await self._pass(request, [text.encode(query + each) for each in texts])
        rows = [
            {"index": number, "document": {"text": each, "multi_modal": None}, "relevance_score": _score(query, each)}
            for number, each in enumerate(texts)
        ]
        rows.sort(key=lambda row: -float(str(row["relevance_score"])))
        wanted = body.get("top_n") or len(rows)
        await request.reply_json(
            {
                "id": prompts.request_name("rerank", request.headers),
                "model": model,
                "usage": {"prompt_tokens": used, "total_tokens": used},
                "results": rows[: int(wanted)],
            }
        )

    async def score(self, request: Request) -> None:
        body = await request.json()
        model = prompts.served_model(self._config, body)
        left, right = body.get("text_1", body.get("queries")), body.get("text_2", body.get("documents"))
        if left is None or right is None:
            raise invalid(f"body.{'text_1' if left is None else 'text_2'}", "Field required", "missing", body)
        lefts = [left] if isinstance(left, str) else list(left)
        rights = [right] if isinstance(right, str) else list(right)
        if len(lefts) > 1 and len(lefts) != len(rights):
            raise ApiError(400, "Input lengths must be either 1:1, 1:N or N:N")
        lefts = lefts * len(rights) if len(lefts) == 1 else lefts
        pairs = [(str(one), str(other)) for one, other in zip(lefts, rights, strict=True)]
        used = await self._pass(request, [text.encode(one + other) for one, other in pairs])
        await request.reply_json(
            {
                "id": prompts.request_name("score", request.headers),
                "object": "list",
                "created": int(time.time()),
                "model": model,
                "data": [
                    {"index": number, "object": "score", "score": _score(*pair)} for number, pair in enumerate(pairs)
                ],
                "usage": _usage(used),
            }
        )

    async def classify(self, request: Request) -> None:
        body = await request.json()
        model = prompts.served_model(self._config, body)
        inputs = prompts.completion_prompts(body.get("input"))
        used = await self._pass(request, inputs)
        rows = []
        for number, tokens in enumerate(inputs):
            share = round((text.seed_of(tokens) % 1000) / 1000, 3)
            label = CLASSES[share < 0.5]
            rows.append({"index": number, "label": label, "probs": [1 - share, share], "num_classes": len(CLASSES)})
        await request.reply_json(
            {
                "id": prompts.request_name("classify", request.headers),
                "object": "list",
                "created": int(time.time()),
                "model": model,
                "data": rows,
                "usage": _usage(used),
            }
        )

    async def transcription(self, request: Request) -> None:
        """Words for an uploaded sound; as many as fit its guessed length."""
        fields = form_fields(await request.body(), request.headers.get("content-type", ""))
        model = {"model": fields["model"].decode()} if "model" in fields else {}
        prompts.served_model(self._config, model)
        sound = fields.get("file")
        if sound is None:
            raise invalid("body.file", "Field required", "missing", None)
        seconds = max(1, len(sound) // _SOUND_BYTES_PER_S)
        seed = text.seed_of((), sound)
        words = "".join(text.word(seed, number) for number in range(min(400, 2 * seconds)))
        await self._pass(request, [text.encode(words)])
        if fields.get("response_format") == b"text":
            await request.reply(200, (words + "\n").encode(), "text/plain; charset=utf-8")
            return
        await request.reply_json({"text": words, "usage": {"type": "duration", "seconds": seconds}})


def form_fields(body: bytes, content_type: str) -> dict[str, bytes]:
    """The parts of a ``multipart/form-data`` body by name. Raises 400 when it is none."""
    _, _, boundary = content_type.partition("boundary=")
    boundary = boundary.split(";")[0].strip().strip('"')
    if not content_type.startswith("multipart/form-data") or not boundary:
        raise invalid("body.file", "Field required", "missing", None)
    fields: dict[str, bytes] = {}
    for part in body.split(b"--" + boundary.encode())[1:]:
        head, separator, content = part.partition(b"\r\n\r\n")
        _, found, name = head.partition(b'name="')
        if separator and found:
            fields[name.partition(b'"')[0].decode("utf-8", "replace")] = content.removesuffix(b"\r\n")
    return fields


def _score(one: str, other: str) -> float:
    """More shared words, higher score; a little of the text itself, so that no two are quite alike."""
    left, right = set(one.lower().split()), set(other.lower().split())
    shared = len(left & right) / max(1, len(left))
    noise = text.seed_of(text.encode(one + "\n" + other)) % 1000 / 1e5
    return round(min(1.0, 0.02 + 0.95 * shared + noise), 6)


def _usage(tokens: int) -> dict[str, Any]:
    return {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
