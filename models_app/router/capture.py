"""Requests and answers kept for looking at, for a key whose capture is switched on and only until it runs out.

Nothing of a prompt is kept otherwise, and no header ever is. What is kept is cut to a bound and redacted. Removed are:

- keys by their well-known beginnings (``sk-``, ``sz-``, ``hf_``, ``ghp_``, ``AKIA``, ``AIza`` …), JSON web tokens,
  private keys in PEM form;
- what follows ``Bearer`` or ``Basic``, values of password, secret, api_key and token, user and password in addresses;
- the bytes of images and audio.

The text of a stream is put together first, for a secret may lie in pieces over many events. A secret that looks like
none of these stays: that is why capture has a permission of its own. The receiver keeps a ring, so old captures go by
themselves.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from models_app.router.sse import event_data, split_events
from models_app.router.table import Key

#: Takes one capture. Must not block.
CaptureSink = Callable[[dict[str, Any]], None]

KEEP_BYTES = 32 * 1024
_LOOK_BYTES = 256 * 1024  # looking for secrets in more would hold up everyone else
_LONGEST_SECRET = 512

_SECRETS = re.compile(
    r"(?:sk|sz|hf|ghp|gho|glpat|xox[abp])[-_][A-Za-z0-9_\-]{12,}"  # keys by their well-known beginnings
    r"|github_pat_[A-Za-z0-9_]{20,}"
    r"|AKIA[A-Z0-9]{16}"
    r"|AIza[A-Za-z0-9_\-]{35}"
    r"|eyJ[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]*"  # JSON web tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_AUTHORIZATION = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=\-]{8,}")
_PASSWORD = re.compile(r"(?i)(\\?\"?(?:password|passwd|secret|api_?key|token)\\?\"?\s*[:=]\s*\\?\"?)[^\s\"\\,;}]{4,}")
_IN_ADDRESS = re.compile(r"(\w://)[^\s/:@\"\\]+:[^\s/@\"\\]+@")
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,[A-Za-z0-9+/=\s]+")
_BASE64_FIELD = re.compile(r'("(?:data|b64_json|audio|image)"\s*:\s*")[A-Za-z0-9+/=]{256,}')


def redact(text: str) -> str:
    """The text without what looks like a secret and without the bytes of media."""
    text = _DATA_URL.sub(r"data:\1;base64,[removed]", text)
    text = _BASE64_FIELD.sub(r"\1[removed]", text)
    text = _SECRETS.sub("[redacted]", text)
    text = _IN_ADDRESS.sub(r"\1[redacted]@", text)
    text = _AUTHORIZATION.sub(r"\1 [redacted]", text)
    return _PASSWORD.sub(r"\1[redacted]", text)


def is_on(key: Key) -> bool:
    return key.capture_until is not None and key.capture_until > time.time()


#: Where the events of every dialect carry what was generated.
_TEXT_FIELDS = frozenset(
    {"content", "text", "reasoning_content", "reasoning", "refusal", "arguments", "delta", "partial_json", "thinking"}
)


def stream_text(events: bytes) -> str:
    """What the events of a stream say, put together; each part under its name where there are several."""
    parts: dict[str, list[str]] = {}
    for event in split_events(events):
        data = event_data(event)
        if data is None:
            continue
        kind = data.get("type")
        if isinstance(data.get("error"), dict):
            parts.setdefault("error", []).append(str(data["error"].get("message", "")))
        elif isinstance(kind, str):  # events that repeat the whole at the end are left out
            if kind.endswith("delta"):
                _collect({**data, "type": None}, kind.removesuffix("delta").strip("._"), parts)
        else:
            _collect(data.get("choices"), "choice", parts)
    texts = {name: "".join(pieces) for name, pieces in parts.items()}
    if len(texts) == 1:
        return next(iter(texts.values()))
    return "\n\n".join(f"[{name}]\n{text}" for name, text in texts.items())


def _collect(value: object, name: str, parts: dict[str, list[str]]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            if isinstance(inner, str):
                if key in _TEXT_FIELDS and inner:
                    number = value.get("index", value.get("output_index"))
                    label = name if key == "delta" else f"{name} {key}"
                    parts.setdefault(label if number is None else f"{label} {number}", []).append(inner)
            elif key in ("delta", "message"):
                number = value.get("index", 0)
                _collect(inner, f"{name} {number}" if number else name, parts)
            else:
                _collect(inner, f"{name} {key}", parts)
    elif isinstance(value, list):
        for inner in value:
            _collect(inner, name, parts)


def _are_events(answer: bytes) -> bool:
    return answer.startswith((b"data:", b"event:", b":", b"id:"))


class Capture:
    """One request being captured."""

    __slots__ = ("_answer", "_answer_bytes", "_at", "_body", "key", "path")

    def __init__(self, key: Key, path: str, body: bytes, *, is_text: bool) -> None:
        self.key = key
        self.path = path
        self._at = time.time()
        self._body = body if is_text else b""
        self._answer = bytearray()
        self._answer_bytes = 0

    def feed(self, data: bytes) -> None:
        """The next part of the answer; only its beginning is kept."""
        self._answer_bytes += len(data)
        room = _LOOK_BYTES - len(self._answer)
        if room > 0:
            self._answer += data[:room]

    def to_json(self, model: str, status: int, request_id: str) -> dict[str, Any]:
        request = self._body[:_LOOK_BYTES].decode("utf-8", "replace")
        request_cut = len(self._body) > _LOOK_BYTES
        kept = bytes(self._answer)
        streamed = _are_events(kept)
        answer = stream_text(kept) if streamed else kept.decode("utf-8", "replace")
        answer_cut = self._answer_bytes > _LOOK_BYTES
        request, request_cut = _clean(request, request_cut)
        answer, answer_cut = _clean(answer, answer_cut)
        return {
            "at": self._at,
            "until": self.key.capture_until,
            "key_id": self.key.id,
            "key_name": self.key.name,
            "model": model,
            "path": self.path,
            "status": status,
            "request_id": request_id,
            "request": request,
            "request_cut": request_cut,
            "answer": answer,
            "answer_cut": answer_cut,
            "streamed": streamed,
        }


def _clean(text: str, was_cut: bool) -> tuple[str, bool]:
    """Redacted and cut to the bound; whether anything is missing."""
    text = redact(text)
    if was_cut:  # half a secret at the cut is no secret to the patterns
        text = text[:-_LONGEST_SECRET]
    kept = text.encode()[:KEEP_BYTES].decode("utf-8", "ignore")
    return kept, was_cut or len(kept) < len(text)
