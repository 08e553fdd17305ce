"""Secrets out of a log: what an engine, or a library in it, printed although it should not have."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

MASK = "***"
#: Shorter values are no secrets, and masking them would spoil the text.
_SHORTEST = 8

_PATTERNS = (
    re.compile(r"\b(?:hf|sk|sz)_[A-Za-z0-9_-]{16,}"),
    re.compile(r"(?i)(?<=\bbearer )[^\s\"',;]{8,}"),
    re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"),
    re.compile(
        r"(?i)(?:api[_-]?key|access[_-]?key|secret(?:[_-]?key)?|password|passwd|(?:auth|hf|access|api)[_-]?token)"
        r"[\"']?\s*[=:]\s*\[?[\"']?(?!None\b|null\b|\*\*\*)([^\s\"',;\])}]{4,})"
    ),
)


def redact(lines: Iterable[str], *, known: Collection[str] = ()) -> list[str]:
    """The lines with ``known`` secrets, and what looks like one, replaced by ``***``."""
    secrets = [one for one in known if len(one) >= _SHORTEST]
    return [_line(line, secrets) for line in lines]


def _line(line: str, secrets: list[str]) -> str:
    for secret in secrets:
        line = line.replace(secret, MASK)
    for pattern in _PATTERNS:
        line = pattern.sub(_masked, line)
    return line


def _masked(found: re.Match[str]) -> str:
    """All of the match, or its group: the name before a value stays readable."""
    if not found.re.groups:
        return MASK
    start = found.start(1) - found.start(0)
    return found.group(0)[:start] + MASK + found.group(0)[start + len(found.group(1)) :]
