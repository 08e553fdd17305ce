"""The ``/kvcache`` wire format, incoming half: strict parsing of sizes, percentages, flags and whole bodies.

A superset of kvcached's unmerged pull request 324, so that its documented curl calls work here. Differences, on
purpose: a value that is not plainly a size is refused with 400 and nothing is written (the pull request turned ``G``
into 0 and ``inf`` into a 500); ``"force": "false"`` is refused rather than taken as true; ``ipc_name`` may only name
this instance's own segment. ``answers.py`` is the outgoing half.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

MAX_BODY_BYTES = 64 * 1024
#: The segment holds a signed 64-bit number; no memory is that large.
MAX_SIZE_BYTES = 2**63 - 1
MAX_REVISION = 2**53
RECLAIM = ("wait", "preempt", "abort")
SLEEP_LEVELS = (1, 2)
WAKE_TAGS = ("weights", "kv_cache")
MODES = ("wait", "keep", "abort")

#: The pull request's suffixes, 1024-based. ``5GiB`` and ``10TB`` were errors there and are here.
UNITS = {"": 1, "b": 1, "k": 2**10, "kb": 2**10, "m": 2**20, "mb": 2**20, "g": 2**30, "gb": 2**30}
_SIZE = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?)\s*([a-z]*)", re.IGNORECASE | re.ASCII)
_UNIT_NAMES = "b, k, kb, m, mb, g, gb (1024-based)"


class Refused(Exception):
    """An answer that is not a success: HTTP status, stable code, a sentence, and facts that go into the JSON beside
    them."""

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
    """A parsed ``POST /kvcache/limit``. ``revision`` None: the engine takes the next one."""

    size_bytes: int
    revision: int | None = None
    force: bool = False
    reclaim: str = "wait"
    by: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "size_bytes": self.size_bytes,
            "revision": self.revision,
            "force": self.force,
            "reclaim": self.reclaim,
            "by": self.by,
        }


@dataclass(frozen=True)
class TrimOrder:
    """A parsed ``POST /kvcache/trim``. ``target``: set this limit as well, as the pull request did."""

    target: LimitOrder | None = None


def parse_size(value: Any, name: str = "size") -> int:
    """Bytes, from an integer, a finite number or a string with one of ``UNITS``; above 0, at most ``MAX_SIZE_BYTES``.

    A fraction of a byte is cut off. Raises ``Refused`` (400) for everything else, ``true`` and ``[1]`` included.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise bad(f"{name} must be a number of bytes or a text such as 512m or 3g, not {_shown(value)}")
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise bad(f"{name}: {_shown(value)} is not a size; write a number above 0 and one of {_UNIT_NAMES}")
        unit = UNITS.get(match.group(2).lower())
        if unit is None:
            raise bad(f"{name}: unknown unit {match.group(2)!r}; use one of {_UNIT_NAMES}")
        digits = match.group(1).replace("_", "").replace(",", "")
        number: int | float = float(digits) if "." in digits else int(digits) if len(digits) <= 30 else math.inf
    else:
        unit, number = 1, value
    if isinstance(number, float) and not math.isfinite(number):
        raise bad(f"{name} must be finite, not {_shown(value)}")
    size = int(number * unit)
    if size <= 0:
        raise bad(f"{name} must be above 0, not {_shown(value)}")
    if size > MAX_SIZE_BYTES:
        raise bad(f"{name}: {_shown(value)} is more than a limit can hold ({MAX_SIZE_BYTES} bytes)")
    return size


def parse_percent(value: Any) -> float:
    """A finite number above 0 and up to 100. Raises ``Refused`` (400)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise bad(f"percent must be a number, not {_shown(value)}")
    if not math.isfinite(value) or not 0 < value <= 100:
        raise bad(f"percent must be above 0 and at most 100, not {_shown(value)}")
    return float(value)


def parse_body(raw: bytes, *, required: bool) -> dict[str, Any]:
    """The JSON object of a request. An empty body counts as ``{}`` unless one is required."""
    if not raw.strip() and not required:
        return {}
    try:
        body = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as exc:
        raise bad("the body is not JSON") from exc
    if not isinstance(body, dict):
        raise bad(f"the body must be a JSON object, not {_shown(body)}")
    return body


def limit_order(body: dict[str, Any]) -> LimitOrder:
    """``{"size" | "size_bytes", "revision"?, "force"?, "reclaim"?, "by"?}``; ``size_bytes`` wins, as in the pull
    request."""
    if "size_bytes" in body:
        size = _size_bytes(body["size_bytes"], "size_bytes")
    elif "size" in body:
        size = parse_size(body["size"])
    else:
        raise bad("size or size_bytes is missing")
    return _order(body, size)


def percent_order(body: dict[str, Any], total_bytes: int) -> LimitOrder:
    """The same for ``{"percent"}`` of ``total_bytes``."""
    if "percent" not in body:
        raise bad("percent is missing")
    size = int(total_bytes * parse_percent(body["percent"]) / 100)
    if size <= 0:
        raise bad("percent of this GPU comes to less than one byte")
    return _order(body, size)


def trim_order(body: dict[str, Any]) -> TrimOrder:
    """``{}`` or ``{"target" | "target_bytes", …}``."""
    if "target_bytes" in body:
        return TrimOrder(_order(body, _size_bytes(body["target_bytes"], "target_bytes")))
    if "target" in body:
        return TrimOrder(_order(body, parse_size(body["target"], "target")))
    return TrimOrder()


def sleep_level(body: dict[str, Any]) -> int:
    """``{"level": 1 | 2}``; 1 when left out."""
    level = body.get("level", 1)
    if isinstance(level, bool) or not isinstance(level, int) or level not in SLEEP_LEVELS:
        raise bad(f"level must be 1 (weights to host memory) or 2 (weights dropped), not {_shown(level)}")
    return level


def mode(body: dict[str, Any], default: str) -> str:
    """``{"mode": "wait" | "keep" | "abort"}``: what becomes of requests under way."""
    return _choice(body, "mode", MODES, default)


def wake_tags(body: dict[str, Any]) -> tuple[str, ...] | None:
    """``{"tags": ["weights", "kv_cache"]}``; None (all) when left out or null."""
    tags = body.get("tags")
    if tags is None:
        return None
    if not isinstance(tags, list) or not tags or any(tag not in WAKE_TAGS for tag in tags if isinstance(tag, str)):
        raise bad(f"tags must be a list of {' and '.join(WAKE_TAGS)}, not {_shown(tags)}")
    if not all(isinstance(tag, str) for tag in tags):
        raise bad(f"tags must be a list of {' and '.join(WAKE_TAGS)}, not {_shown(tags)}")
    return tuple(dict.fromkeys(tags))


def flag(body: dict[str, Any], name: str) -> bool:
    """A JSON boolean, False when left out. ``"false"``, 0 and null are refused: a truthy text has forced limits
    before."""
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise bad(f"{name} must be true or false, not {_shown(value)}")
    return value


def own_segment(body: dict[str, Any], ipc_name: str | None) -> None:
    """Refuse an ``ipc_name`` that is not this instance's: an engine's port rules over no other engine's memory."""
    asked = body.get("ipc_name")
    if asked is None or (ipc_name and asked == ipc_name):
        return
    raise Refused(
        404,
        "unknown_segment",
        f"this engine manages its own segment only, not {_shown(asked)}",
        available_segments=[ipc_name] if ipc_name else [],
    )


def _order(body: dict[str, Any], size: int) -> LimitOrder:
    revision = body.get("revision")
    if revision is not None and (
        isinstance(revision, bool) or not isinstance(revision, int) or not 0 <= revision <= MAX_REVISION
    ):
        raise bad(f"revision must be a whole number from 0, not {_shown(revision)}")
    by = body.get("by", "")
    if not isinstance(by, str):
        raise bad(f"by must be a text, not {_shown(by)}")
    return LimitOrder(
        size_bytes=size,
        revision=revision,
        force=flag(body, "force"),
        reclaim=_choice(body, "reclaim", RECLAIM, "wait"),
        by=by[:200],
    )


def _size_bytes(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad(f"{name} must be a whole number of bytes, not {_shown(value)}")
    return parse_size(value, name)


def _choice(body: dict[str, Any], name: str, choices: tuple[str, ...], default: str) -> str:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str) or value not in choices:
        raise bad(f"{name} must be one of {', '.join(choices)}, not {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str) if not isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"
