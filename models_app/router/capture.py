"""Requests and answers kept for looking at, for a key whose capture is switched on and only until it runs out.

Nothing of a prompt is kept otherwise. What is kept is cut to a bound and redacted: what looks like a secret, and the
bytes of images and audio. The receiver keeps a ring, so old captures go by themselves.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from models_app.router.table import Key

#: Takes one capture. Must not block.
CaptureSink = Callable[[dict[str, Any]], None]

KEEP_BYTES = 32 * 1024
_LOOK_BYTES = 256 * 1024  # looking for secrets in more would hold up everyone else
_LONGEST_SECRET = 512

_SECRETS = re.compile(
    r"(?:sk|sz|hf|ghp|gho|glpat|xox[abp])[-_][A-Za-z0-9_\-]{12,}"  # keys by their well-known beginnings
    r"|AKIA[A-Z0-9]{16}"
    r"|eyJ[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]{10,}\.[A-Za-z0-9_\-]*"  # JSON web tokens
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_AUTHORIZATION = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=\-]{8,}")
_PASSWORD = re.compile(r"(?i)(\\?\"?(?:password|passwd|secret|api_?key|token)\\?\"?\s*[:=]\s*\\?\"?)[^\s\"\\,;}]{4,}")
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,[A-Za-z0-9+/=\s]+")
_BASE64_FIELD = re.compile(r'("(?:data|b64_json|audio|image)"\s*:\s*")[A-Za-z0-9+/=]{256,}')


def redact(text: str) -> str:
    """The text without what looks like a secret and without the bytes of media."""
    text = _DATA_URL.sub(r"data:\1;base64,[removed]", text)
    text = _BASE64_FIELD.sub(r"\1[removed]", text)
    text = _SECRETS.sub("[redacted]", text)
    text = _AUTHORIZATION.sub(r"\1 [redacted]", text)
    return _PASSWORD.sub(r"\1[redacted]", text)


def is_on(key: Key) -> bool:
    return key.capture_until is not None and key.capture_until > time.time()


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
        room = KEEP_BYTES - len(self._answer)
        if room > 0:
            self._answer += data[:room]

    def to_json(self, model: str, status: int, request_id: str) -> dict[str, Any]:
        request = redact(self._body[:_LOOK_BYTES].decode("utf-8", "replace"))
        if len(self._body) > _LOOK_BYTES:  # half a secret at the cut is no secret to the patterns
            request = request[:-_LONGEST_SECRET]
        return {
            "at": self._at,
            "until": self.key.capture_until,
            "key_id": self.key.id,
            "key_name": self.key.name,
            "model": model,
            "path": self.path,
            "status": status,
            "request_id": request_id,
            "request": request[:KEEP_BYTES],
            "request_cut": len(request) > KEEP_BYTES or len(self._body) > _LOOK_BYTES,
            "answer": redact(self._answer.decode("utf-8", "replace")),
            "answer_cut": self._answer_bytes > KEEP_BYTES,
        }
