"""The few numbers that the sampler needs of an engine's ``/metrics``, found in the bytes without reading the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class EngineNumbers:
    """Of one engine at one moment; None for what it does not tell. Counters count from the engine's start.

    There is no KV usage here: ``vllm:kv_cache_usage_perc`` means something else under kvcached (0.997 was seen on an
    idle engine); use and limit come from the segment.
    """

    running: int | None
    waiting: int | None
    preemptions: int | None
    generation_tokens: int | None
    sleep_state: str | None


def parse_metrics(body: bytes) -> EngineNumbers:
    """Sums over the engines of a data-parallel server."""
    return EngineNumbers(
        running=_sum(body, b"vllm:num_requests_running"),
        waiting=_sum(body, b"vllm:num_requests_waiting"),
        preemptions=_sum(body, b"vllm:num_preemptions_total"),
        generation_tokens=_sum(body, b"vllm:generation_tokens_total"),
        sleep_state=_sleep_state(body),
    )


def _lines(body: bytes, name: bytes) -> list[bytes]:
    """The sample lines of one metric, with labels or without; never a longer name that begins like it."""
    lines = []
    at = body.find(name)
    while at >= 0:
        end = body.find(b"\n", at)
        end = len(body) if end < 0 else end
        after = body[at + len(name) : at + len(name) + 1]
        if (at == 0 or body[at - 1 : at] == b"\n") and after in (b"{", b" "):
            lines.append(body[at:end])
        at = body.find(name, end)
    return lines


def _sum(body: bytes, name: bytes) -> int | None:
    total = None
    for line in _lines(body, name):
        try:
            value = float(line[line.rindex(b" ") + 1 :])
        except ValueError:
            continue
        if value == value and value >= 0:  # not NaN
            total = int(value) + (total or 0)
    return total


def _sleep_state(body: bytes) -> str | None:
    """``awake``, ``weights_offloaded`` or ``discard_all``: the label whose sample is 1."""
    for line in _lines(body, b"vllm:engine_sleep_state"):
        if line.endswith((b" 1", b" 1.0")):
            start = line.find(b'sleep_state="')
            if start >= 0:
                start += len(b'sleep_state="')
                return line[start : line.find(b'"', start)].decode(errors="replace")
    return None


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """What ``/kvcache/status`` says of a limit: ``foreign`` when the segment holds a stranger's number.

    ``tells``: whether the engine keeps watch of strangers at all; one without our add-on does not.
    """

    capacity_bytes: int | None
    limit_bytes: int | None
    foreign: bool
    tells: bool = True


def parse_status(body: bytes) -> LimitFacts | None:
    """None when the answer is not a status or the engine has no segment."""
    try:
        answer: Any = orjson.loads(body)
        segment = answer["segments"][0]
        capacity = segment.get("capacity_bytes") or segment.get("capacity")
        limit = segment.get("limit_bytes") or segment.get("total_size")
        return LimitFacts(
            int(capacity) if capacity else None,
            int(limit) if limit else None,
            segment.get("drift_bytes") is not None,
            "drift_bytes" in segment,
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        return None
