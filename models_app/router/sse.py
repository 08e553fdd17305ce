"""What the router must understand of an event stream: where events end, the first content, and the usage.

Events are handed on whole: the beginning of one that has not ended yet is held back until the rest is there. So a
comment can always be put between two events, and a stream whose engine died can be ended with an event that parses.
"""

from __future__ import annotations

from typing import Any

import orjson

#: An event that grows past this is handed on in pieces; comments wait until it has ended.
MAX_HELD_BYTES = 1024 * 1024


def events_end(data: bytes) -> int:
    """Index just after the last event that is complete in ``data``; 0 when none is."""
    end = data.rfind(b"\n\n") + 2
    if end < 2:
        end = 0
    if b"\r" in data:
        for separator in (b"\r\n\r\n", b"\r\r"):
            other = data.rfind(separator)
            if other >= 0:
                end = max(end, other + len(separator))
    return end


def event_data(event: bytes) -> dict[str, Any] | None:
    """The JSON object in the data lines of one event, if it is one."""
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    if not lines:
        return None
    try:
        data = orjson.loads(b"\n".join(lines))
    except orjson.JSONDecodeError:
        return None
    return data if isinstance(data, dict) else None


def split_events(block: bytes) -> list[bytes]:
    """Whole events, each with the blank line that ends it."""
    if b"\r" in block:
        return [event.replace(b"\n", b"\r\n") + b"\r\n\r\n" for event in _parts(block.replace(b"\r\n", b"\n"))]
    return [event + b"\n\n" for event in _parts(block)]


def _parts(block: bytes) -> list[bytes]:
    return [part for part in block.split(b"\n\n") if part]


def usage_of(data: dict[str, Any]) -> tuple[int, int] | None:
    """(prompt tokens, completion tokens) told in an answer or an event of any dialect; -1 where one is not told."""
    for holder in (data, data.get("response"), data.get("message")):
        usage = holder.get("usage") if isinstance(holder, dict) else None
        if isinstance(usage, dict):
            prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
            completion = usage.get("completion_tokens", usage.get("output_tokens"))
            if isinstance(prompt, int) or isinstance(completion, int):
                return (prompt if isinstance(prompt, int) else -1, completion if isinstance(completion, int) else -1)
    return None


def has_content(data: dict[str, Any]) -> bool:
    """Whether an event carries something that was generated (a role alone, or an opening event, does not)."""
    for choice in data.get("choices") or ():
        if not isinstance(choice, dict):
            continue
        if choice.get("text"):
            return True
        delta = choice.get("delta")
        if isinstance(delta, dict) and any(value for name, value in delta.items() if name != "role"):
            return True
    kind = data.get("type")
    return isinstance(kind, str) and (kind == "content_block_delta" or kind.endswith(".delta"))


class Scanner:
    """Looks at a stream block by block. ``feed`` answers what may be handed on now, always whole events."""

    __slots__ = (
        "_held",
        "completion_tokens",
        "content_seen",
        "ended",
        "failed",
        "inside",
        "prompt_tokens",
        "strip_usage",
    )

    def __init__(self, *, strip_usage: bool) -> None:
        self.strip_usage = strip_usage  # the client did not ask for the usage event that we asked for
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.content_seen = False
        self.failed = False  # the engine said in an event that it failed
        self.ended = False  # the dialect's last event was seen
        self.inside = False  # part of an event was handed on: no comment now
        self._held = b""

    def feed(self, block: bytes) -> bytes:
        if self._held or self.inside or not block.endswith(b"\n\n"):
            block = self._whole_events(block)
            if not block:
                return b""
        if not self.content_seen or b'"usage"' in block or b'"error"' in block:
            return self._look_at(block)
        if block.endswith(b"[DONE]\n\n"):
            self.ended = True
        return block

    def lets_pass(self, chunks: bytes) -> bool:
        """Whether whole HTTP chunks hold whole events that nobody has to look into."""
        if not chunks.endswith(b"\n\n\r\n") or self._held or self.inside or not self.content_seen:
            return False
        if b'"usage"' in chunks or b'"error"' in chunks:
            return False
        if chunks.endswith(b"[DONE]\n\n\r\n"):
            self.ended = True
        return True

    def rest(self) -> bytes:
        """What was held back, at the end of the stream."""
        held, self._held = self._held, b""
        return held

    def _whole_events(self, block: bytes) -> bytes:
        data = self._held + block
        end = events_end(data)
        if end == 0 and len(data) > MAX_HELD_BYTES:
            self._held = b""
            self.inside = True
            return data
        self._held = data[end:]
        if end:
            self.inside = False
        return data[:end]

    def _look_at(self, block: bytes) -> bytes:
        events = split_events(block)
        kept = [event for event in events if self._keep(event)]
        return block if len(kept) == len(events) else b"".join(kept)

    def _keep(self, event: bytes) -> bool:
        if event.rstrip().endswith(b"[DONE]"):
            self.ended = True
            return True
        data = event_data(event)
        if data is None:
            return True
        if not self.content_seen and has_content(data):
            self.content_seen = True
        kind = data.get("type")
        if kind in ("message_stop", "response.completed", "response.incomplete"):
            self.ended = True
        if (isinstance(data.get("error"), dict) or kind in ("error", "response.failed")) and not data.get("choices"):
            self.failed = True
        usage = usage_of(data)
        if usage is None:
            return True
        prompt, completion = usage
        self.prompt_tokens = max(self.prompt_tokens, prompt)
        self.completion_tokens = max(self.completion_tokens, completion)
        return not (self.strip_usage and data.get("choices") == [])


class AnswerTail:
    """Finds the usage in an answer that is not a stream; of the answer, no more than its last bytes is kept.

    Some answers tell it long before their end: a ranking before its documents, a chat before its prompt's tokens.
    """

    __slots__ = ("_seen", "_tail")

    KEEP_BYTES = 16 * 1024

    def __init__(self) -> None:
        self._tail = b""
        self._seen: tuple[int, int] | None = None

    def feed(self, block: bytes) -> None:
        tail = self._tail + block if self._tail else block
        if len(tail) > self.KEEP_BYTES:
            self._seen = self._find(tail) or self._seen
            tail = tail[-self.KEEP_BYTES :]
        self._tail = tail

    def usage(self) -> tuple[int, int]:
        """(prompt tokens, completion tokens), 0 where not told.

        Inside a JSON string every quote is escaped, so text that an engine generated cannot look like the key here.
        """
        prompt, completion = self._find(self._tail) or self._seen or (0, 0)
        return max(0, prompt), max(0, completion)

    @classmethod
    def _find(cls, tail: bytes) -> tuple[int, int] | None:
        for name in (b'"usage"', b'"billed_units"'):  # the latter is Cohere's
            if name in tail and (found := cls._told(tail, name)) is not None:
                return found
        return None

    @staticmethod
    def _told(tail: bytes, name: bytes) -> tuple[int, int] | None:
        """The last object of this name that tells tokens."""
        at = tail.rfind(name)
        while at >= 0:
            start = tail.find(b"{", at, at + len(name) + 5)
            if start >= 0:
                told = _object_at(tail, start)
                found = None if told is None else usage_of({"usage": told})
                if found is not None:
                    return found
            at = tail.rfind(name, 0, at)
        return None


def _object_at(data: bytes, start: int) -> dict[str, Any] | None:
    """The JSON object that begins at ``start``; usage objects hold no strings with braces, so counting is enough."""
    end = start
    while True:
        end = data.find(b"}", end) + 1
        if end == 0:
            return None
        if data.count(b"{", start, end) == data.count(b"}", start, end):
            try:
                found = orjson.loads(data[start:end])
            except orjson.JSONDecodeError:
                return None
            return found if isinstance(found, dict) else None
