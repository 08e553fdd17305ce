"""What the engine is going to say: the tokens of an answer, known in full before the first of them is due.

Knowing the length beforehand lets the scheduler work with numbers alone. Stop words, token limits, forced JSON and
forced tool calls are settled here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from models_app.simulator import text

#: Pieces into which text that is not prose is cut, about a token each.
PIECE_CHARACTERS = 4


@dataclass(frozen=True)
class Answer:
    """The tokens of one choice: ``count`` of them, the last perhaps an end-of-text that shows as nothing."""

    count: int
    finish_reason: str
    seed: int = 0
    pieces: tuple[str, ...] | None = None
    visible: int = 0
    tail: str | None = None
    stop_reason: str | None = None

    def part(self, start: int, end: int) -> str:
        """The text of the tokens ``start`` to ``end``."""
        last = min(end, self.visible)
        if self.pieces is not None:
            shown = "".join(self.pieces[start:last])
        else:
            shown = "".join(text.word(self.seed, number) for number in range(start, last))
        # Of the token in which a stop word began only what stands before it is shown.
        return shown + (self.tail if self.tail and start <= self.visible < end else "")

    def whole(self) -> str:
        return self.part(0, self.count)


def prose(seed: int, limit: int, *, stop: Sequence[str] = (), ignore_eos: bool = False, minimum: int = 0) -> Answer:
    """Ordinary words, as many as the model would say by itself, at most ``limit`` tokens."""
    natural = limit if ignore_eos else max(minimum, text.natural_length(seed))
    count, reason = (natural + 1, "stop") if natural < limit else (limit, "length")
    answer = Answer(count, reason, seed, visible=min(natural, limit))
    return _stopped(answer, stop)


def fixed(content: str, limit: int) -> Answer:
    """This very text, cut at ``limit`` tokens."""
    pieces = tuple(content[at : at + PIECE_CHARACTERS] for at in range(0, len(content), PIECE_CHARACTERS))
    if len(pieces) < limit:
        return Answer(len(pieces) + 1, "stop", pieces=pieces, visible=len(pieces))
    return Answer(limit, "length", pieces=pieces, visible=limit)


def _stopped(answer: Answer, stop: Sequence[str]) -> Answer:
    words = [word for word in stop if word]
    if not words:
        return answer
    said = ""
    longest = max(map(len, words))
    for number in range(answer.visible):
        before = len(said)
        said += answer.part(number, number + 1)
        found = [(at, word) for word in words if (at := said.find(word, max(0, before - longest))) >= 0]
        if found:
            at, word = min(found)
            kept, start = 0, 0
            while start + len(answer.part(kept, kept + 1)) <= at:
                start += len(answer.part(kept, kept + 1))
                kept += 1
            return Answer(number + 1, "stop", answer.seed, visible=kept, tail=said[start:at] or None, stop_reason=word)
    return answer


def from_schema(schema: Any, depth: int = 0) -> Any:
    """The plainest value that a JSON schema allows; what it says beyond types, enums and required keys is not looked
    at.
    """
    if not isinstance(schema, dict) or depth > 8:
        return {}
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return from_schema(schema[key][0], depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties") or {}
        wanted = schema.get("required") or list(properties)
        return {name: from_schema(properties.get(name, {"type": "string"}), depth + 1) for name in wanted}
    if kind == "array":
        return [from_schema(schema.get("items") or {}, depth + 1) for _ in range(max(1, schema.get("minItems", 1)))]
    plain = {"string": "simulated", "integer": 1, "number": 0.5, "boolean": True, "null": None}
    return plain.get(str(kind))


def forced_json(response_format: Any) -> str | None:
    """The text for ``response_format``, None when it asks for nothing."""
    if not isinstance(response_format, dict):
        return None
    if response_format.get("type") == "json_object":
        return json.dumps({"simulated": True, "answer": "a small quiet engine"})
    if response_format.get("type") == "json_schema":
        wrapper = response_format.get("json_schema") or {}
        return json.dumps(from_schema(wrapper.get("schema") or {}))
    return None
