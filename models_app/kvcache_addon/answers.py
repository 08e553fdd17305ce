"""The ``/kvcache`` wire format, outgoing half: a backend's facts become the JSON that clients read.

Adds, at this edge only, the names of kvcached's pull request 324 (``total_size``, ``physical_occupied``,
``new_total_size``) and a readable text beside each byte field. Byte fields are per GPU (one tensor-parallel rank).
"""

from __future__ import annotations

import time
from typing import Any

API = "sardeenz/1"


def human(size: int | None) -> str:
    """``1.25 GB``, 1024-based, in the pull request's style."""
    if size is None:
        return "N/A"
    value, sign = float(abs(size)), "-" if size < 0 else ""
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1024:
            return f"{sign}{value:.2f} {unit}"
        value /= 1024
    return f"{sign}{value:.2f} TB"


def with_human(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    """The same dict with ``NAME_human`` beside each named byte field."""
    return {**fields, **{f"{name}_human": human(fields.get(name)) for name in names}}


def status_answer(facts: dict[str, Any], gpus: list[dict[str, Any]]) -> dict[str, Any]:
    """``GET /kvcache/status`` from a backend's ``STATUS_KEYS``: section by section as the pull request, then ours.

    ``segments`` holds this engine's own segment only, and is empty when there is none.
    """
    engine = facts.get("engine") or {}
    known = facts.get("ipc_name") and facts.get("used_bytes") is not None
    first = gpus[0] if gpus else {}
    return {
        "self_ipc_name": facts.get("ipc_name"),
        "api": API,
        "provider": facts.get("provider"),
        "kvcached_active": bool(facts.get("kvcached_active")),
        "engine": engine,
        "segments": [_segment(facts, engine)] if known else [],
        "limit_bytes": facts.get("wanted_limit_bytes"),
        "limit_revision": facts.get("limit_revision"),
        "last_change": facts.get("last_change"),
        "last_reclaim": facts.get("last_reclaim"),
        "last_drift": facts.get("last_drift"),
        "requests": facts.get("requests") or {"running": None, "waiting": None, "stuck": []},
        "sleep": facts.get("sleep") or {"level": None},
        "warnings": facts.get("warnings") or [],
        "gpus": gpus,
        "gpu_total_memory": first.get("total", 0),
        "gpu_total_memory_human": human(first.get("total")),
        "gpu_free_memory": first.get("free", 0),
        "gpu_free_memory_human": human(first.get("free")),
        "time": time.time(),
    }


def _segment(facts: dict[str, Any], engine: dict[str, Any]) -> dict[str, Any]:
    total, used, prealloc = facts["limit_bytes"] or 0, facts["used_bytes"], facts["prealloc_bytes"] or 0
    requests = facts.get("requests") or {}
    pull_request = {
        "ipc_name": facts["ipc_name"],
        "total_size": total,
        "used_size": used,
        "prealloc_size": prealloc,
        "free_size": max(total - used - prealloc, 0),
        "usage_percent": round(used / total * 100, 2) if total > 0 else None,
        "physical_occupied": used + prealloc,
        "min_effective_limit": used,
        "min_safe_limit": facts.get("safety_floor_bytes"),
        "safety_floor": facts.get("safety_floor_bytes"),
    }
    human_names = [name for name in pull_request if name not in ("ipc_name", "usage_percent")]
    tensor_parallel = engine.get("tp") or 1
    return {
        **with_human(pull_request, *human_names),
        "limit_bytes": total,
        "used_bytes": used,
        "prealloc_bytes": prealloc,
        "footprint_bytes": used + prealloc,
        "overage_bytes": max(used + prealloc - total, 0) if total > 0 else 0,
        "capacity": facts.get("capacity_bytes"),
        "capacity_bytes": facts.get("capacity_bytes"),
        "bundle_bytes": facts.get("bundle_bytes"),
        "page_size": facts.get("page_bytes"),
        "num_layers": facts.get("num_layers"),
        "num_kv_buffers": facts.get("num_kv_buffers"),
        "block_size_tokens": facts.get("block_size_tokens"),
        "blocks_per_page": facts.get("blocks_per_page"),
        "state": facts.get("state") or "unknown",
        "in_shrink": bool(facts.get("in_shrink")),
        "shrink_target": facts.get("shrink_target_bytes"),
        "prefix_cached_bytes": facts.get("prefix_cached_bytes"),
        "retired_bytes": facts.get("retired_bytes"),
        "requests_running": requests.get("running"),
        "requests_waiting": requests.get("waiting"),
        "hard_minimum": facts.get("hard_minimum_bytes"),
        "hard_minimum_bytes": facts.get("hard_minimum_bytes"),
        "safety_floor_bytes": facts.get("safety_floor_bytes"),
        "full_context_floor": facts.get("full_context_floor_bytes"),
        "full_context_floor_bytes": facts.get("full_context_floor_bytes"),
        "immediate_floor_bytes": facts.get("immediate_floor_bytes"),
        "effective_limit_bytes": facts.get("effective_limit_bytes"),
        "drift_bytes": facts.get("drift_bytes"),
        "stale": bool(facts.get("stale")),
        "per_gpu": True,
        "tp_multiplier": tensor_parallel,
    }


def limit_answer(facts: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """``POST /kvcache/limit`` from a backend's ``LIMIT_KEYS``. ``success`` tells that the order was taken, not that the
    memory is back: that is ``status`` (``applied``) and ``overage_bytes``."""
    status = facts["status"]
    ours = with_human(facts, "limit_bytes", "used_bytes", "freed_bytes", "overage_bytes", "capacity_bytes")
    pull_request: dict[str, Any] = {
        "success": True,
        "previous_total_size": facts["previous_limit_bytes"],
        "new_total_size": facts["limit_bytes"],
        "current_used_size": facts["used_bytes"],
        "immediate_reclaim": status == "applied",
        "safety_floor": facts["safety_floor_bytes"],
        "message": facts.get("message") or limit_message(facts),
    }
    if facts["clamped"]:
        pull_request["requested_size"] = facts["requested_bytes"]
    names = [name for name in pull_request if name.endswith("_size") or name == "safety_floor"]
    return {**with_human(pull_request, *names), **ours, **extra}


def limit_message(facts: dict[str, Any]) -> str:
    """One sentence for people: what is in force now, and what is still to come."""
    limit, over = human(facts["limit_bytes"]), facts["overage_bytes"]
    if facts["status"] == "applied":
        return f"limit {limit} is in force"
    if facts["status"] == "starved":
        return (
            f"limit {limit} is in force, and a waiting request needs more than it: raise the limit or abort the request"
        )
    if facts["status"] == "deferred":
        return f"limit {limit} is set; {human(over)} more come back as requests end (reclaim=preempt takes them now)"
    return f"limit {limit} is written; the engine has not taken it yet"


def trim_answer(first: dict[str, Any], second: dict[str, Any] | None, limit: dict[str, Any] | None) -> dict[str, Any]:
    """``POST /kvcache/trim``: two passes and, with a target, the limit's answer. ``freed_bytes`` is measured, never
    below 0; ``refilled_bytes`` is what the allocator had mapped again between the passes."""
    last = second or first
    refilled = max(second["before_bytes"] - first["after_bytes"], 0) if second else 0
    before = first["before_bytes"] + (limit["freed_bytes"] if limit else 0)
    freed = max(before - last["after_bytes"], 0)
    answer = {
        "success": True,
        "status": last["status"],
        "ipc_name": last["ipc_name"],
        "freed_bytes": freed,
        "refilled_bytes": refilled,
        "before_bytes": before,
        "after_bytes": last["after_bytes"],
        "limit_bytes": last["limit_bytes"],
        "used_bytes": last["used_bytes"],
        "prealloc_bytes": last["prealloc_bytes"],
        "previous_total": limit["previous_limit_bytes"] if limit else last["limit_bytes"],
        "new_limit": last["limit_bytes"],
        "freed_estimate": freed,
        "message": f"{human(freed)} given back; the limit is {human(last['limit_bytes'])}",
    }
    answer = with_human(answer, "freed_bytes", "refilled_bytes", "before_bytes", "after_bytes", "limit_bytes")
    return {**answer, "limit": limit_answer(limit)} if limit else answer


def floor_answer(facts: dict[str, Any]) -> dict[str, Any]:
    """``GET /kvcache/safety_floor``."""
    names = ("hard_minimum_bytes", "safety_floor_bytes", "full_context_floor_bytes", "immediate_floor_bytes")
    return {
        **with_human(facts, *names),
        "safety_floor": facts["safety_floor_bytes"],
        "safety_floor_human": human(facts["safety_floor_bytes"]),
        "model_min_safe_limit": facts["safety_floor_bytes"],
        "hard_minimum": facts["hard_minimum_bytes"],
    }
