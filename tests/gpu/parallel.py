"""An engine over two GPUs: its limit is one number for both, and the death of a part is the death of the whole."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from tests.gpu.product import Meter, Product
from tests.gpu.steps import burst, ensure, kv, nap, step


@step
def tp2(p: Product, meter: Meter) -> dict[str, Any]:
    """Launch, limit, trim, sleep, wake, and kill one rank, with the bytes of both GPUs after each."""
    if len(p.gpus) < 2:
        return {"skipped": "needs two GPUs"}
    before = _used(meter)
    row = ensure(
        p, "t", "qwen3-8b", enforce_eager=True, max_model_len=16384, tensor_parallel_size=2,
        gpu_uuids=[gpu["uuid"] for gpu in p.gpus[:2]], enable_sleep_mode=True, enable_prefix_caching=True,
        restart_policy="on_failure",
    )  # fmt: skip
    launched = _used(meter)
    try:
        figures = _lives(p, meter, row)
    finally:
        p.call("POST", f"/instances/{row['id']}/stop", json={})
        p.until(row["id"], {"stopped", "failed"}, 120)
    figures |= {"launch_s": row.get("launch_s"), "device_before": before, "launched": launched}
    figures["device_after"] = after = _used(meter)
    figures["claims"] |= {
        "memory is taken on both GPUs": all(now > was + 2**30 for now, was in zip(launched, before, strict=True)),
        "all memory is back": all(now <= was + 2**28 for now, was in zip(after, before, strict=True)),
    }
    return figures


def _lives(p: Product, meter: Meter, row: dict[str, Any]) -> dict[str, Any]:
    claims: dict[str, bool] = {}
    figures: dict[str, Any] = {}
    reference = burst(p, "t", 8, 2000, 60).run()
    for name, act in (("limit", _limit), ("trim", _trim)):
        time.sleep(2.5)  # readings are of the second before
        held, answer = _footprints(p), act(p, row)
        p.wait(lambda held=held: all(now < was for now, was in zip(_footprints(p), held, strict=True)), 20, name)
        figures[name] = {"answer": answer, "freed": [was - now for was, now in zip(held, _footprints(p), strict=True)]}
        claims[f"{name}: the same comes back on both GPUs"] = len(set(figures[name]["freed"])) == 1
        claims[f"{name}: the answer is of one GPU"] = answer["freed_bytes"] <= figures[name]["freed"][0] + 2**28
        burst(p, "t", 8, 2000, 60, seed=len(figures)).run()
    figures["sleep"] = nap(p, meter, row, "t", 1)
    claims |= {f"sleep: {text}": holds for text, holds in figures["sleep"].pop("claims").items()}
    figures["killed"], more = _kill_one_rank(p, meter, row)
    again = burst(p, "t", 8, 2000, 60).run()
    claims |= more | {"same answers in the end": again.digests == reference.digests, "it serves": again.complete}
    return figures | {"claims": claims}


def _footprints(p: Product) -> list[int]:
    """KV bytes that the instance has mapped on each of its GPUs, by the newest readings."""
    rows = [row for gpu in p.call("GET", "/gpus") for row in (gpu.get("latest") or {}).get("instances", [])]
    return [(row["used"] or 0) + (row["prealloc"] or 0) for row in rows if row["name"] == "t"]


def _used(meter: Meter) -> list[int]:
    return [meter.used(0), meter.used(1)]


def _limit(p: Product, row: dict[str, Any]) -> dict[str, Any]:
    """To half of what it holds: beside neighbours that may be little."""
    reading = kv(p, "t")
    held = (reading["used"] or 0) + (reading["prealloc"] or 0)
    return p.limit(row["id"], max(held // 2, row["limit"]["bundle_bytes"] * 3), reclaim="preempt", force=True)


def _trim(p: Product, row: dict[str, Any]) -> dict[str, Any]:
    return dict(p.call("POST", f"/instances/{row['id']}/trim", json={}))


def _kill_one_rank(p: Product, meter: Meter, row: dict[str, Any]) -> tuple[dict[str, Any], dict[str, bool]]:
    """SIGKILL for a process that holds memory of the second GPU, and if there is such a one, none of the first."""
    pids = meter.pids(1)
    victim = max(pids - meter.pids(0) or pids)
    name = f"{victim} of {sorted(pids)}"
    since = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    p.until(row["id"], {"failed", "pending", "scheduled", "starting", "stopping"}, 120)
    noticed = round(time.monotonic() - since, 2)
    last = p.until(row["id"], {"ready"}, 400)
    took = round(time.monotonic() - since, 1)
    p.wait(lambda: p.serves("t"), 60, "the router serves t", 0.05)
    events = p.call("GET", f"/instances/{row['id']}/events", params={"limit": 30})
    failure = next((event for event in events if event["to_state"] == "failed"), None)
    figures = {"pid": name, "noticed_s": noticed, "ready_again_s": took, "reason": failure and failure["reason"]}
    return figures, {
        "the death is explained": bool(failure and failure["reason"]),
        "ready again": last["state"] == "ready",
    }
