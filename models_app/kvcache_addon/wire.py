"""The ``/kvcache`` wire format: strict parsing of what comes in, one shape for what goes out.

A superset of kvcached's unmerged pull request 324, so that its documented curl calls work here. Differences, on purpose: a
value that is not plainly a size is refused with 400 and nothing is written (the pull request turned ``G`` into 0 and ``inf``
into a 500); ``"force": "false"`` is refused rather than taken as true; ``ipc_name`` may only name this instance's own segment.

Byte fields here are per GPU. The pull request's names (``total_size``, ``physical_occupied``, ``new_total_size``) are added at
this edge only; inside, the words are those of the glossary.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

MAX_BODY_BYTES = 64 * 1024
#: Above any memory that exists (8 EiB is also where the segment's signed 64-bit number ends).
MAX_SIZE_BYTES = 2**63 - 1
RECLAIM = ("wait", "preempt", "abort")
SLEEP_LEVELS = (1, 2)
WAKE_TAGS = ("weights", "kv_cache")
PAUSE_MODES = ("abort", "wait", "keep")

_UNITS = {
    "": 1, "b": 1,
    "k": 2**10, "kb": 2**10, "kib": 2**10,
    "m": 2**20, "mb": 2**20, "mib": 2**20,
    "g": 2**30, "gb": 2**30, "gib": 2**30,
    "t": 2**40, "tb": 2**40, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"([0-9]+(?:[_,][0-9]{3})*(?:\.[0-9]+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)


class Refused(Exception):
    """An answer that is not a success: HTTP status, stable code, a sentence, and facts that go into the JSON beside them."""

    def __init__(self, status: int, code: str, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.facts = facts

    def to_json(self) -> dict[str, Any]:
        return {"error": self.message, "code": self.code, **self.facts}


def bad(message: str) -> Refused:
    """400 with a sentence."""
    return Refused(400, "invalid", message)


@dataclass(frozen=True)
class LimitOrder:
    """A parsed ``POST /kvcache/limit``. ``revision`` None: the engine takes the next one; ``reclaim`` None: ``wait``."""

    size_bytes: int
    revision: int | None = None
    force: bool = False
    reclaim: str = "wait"
    by: str = ""


@dataclass(frozen=True)
class TrimOrder:
    """A parsed ``POST /kvcache/trim``. ``target``: also set this limit, as the pull request did."""

    target: LimitOrder | None = None
