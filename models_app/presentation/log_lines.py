"""Log lines with the tone in which to show them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

_BAD = re.compile(r"\b(ERROR|CRITICAL|FATAL|Traceback|\w+Error:|\w+Exception:|out of memory)\b")
_WARN = re.compile(r"\bWARN(ING)?\b")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class LogLine(NamedTuple):
    tone: str
    text: str


def log_lines(lines: Iterable[str]) -> list[LogLine]:
    """Escape sequences of terminals taken out, errors and warnings marked."""
    found = []
    for line in lines:
        text = _ANSI.sub("", line)
        found.append(LogLine("bad" if _BAD.search(text) else "warn" if _WARN.search(text) else "", text))
    return found
