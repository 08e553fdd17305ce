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
    uuids = [gpu["uuid"] for gpu in p.gpus[:2]]
    before = _used(meter)
    row = ensure(
        p, "t", "qwen3-8b", enforce_eager=True, max_model_len=16384, tensor_parallel_size=2, gpu_uuids=uuids,
        enable_sleep_mode=True, enable_prefix_caching=True, restart_policy="on_failure",
    )  # fmt: skip
    launched = _used(meter)
    claims = {"memory is taken on both GPUs": all(now > was + 2**30 for now, was in zip(launched, before, strict=True))}
    figures: dict[str, Any] = {"launch_s": row.get("launch_s"), "device_before": before, "launched": launched}
    reference = burst(p, "t", 8, 2000, 60).run()
    for name, act in (("limit", _limit), ("trim", _trim)):
        time.sleep(1.5)
        held, answer = _used(meter), act(p, row)
        p.wait(lambda held=held: all(now < was for now, was in zip(_used(meter), held, strict=True)), 20, name)
        figures[name] = {"answer": answer, "freed": [was - now for was, now in zip(held, _used(meter), strict=True)]}
        claims[f"{name}: bytes come back on both GPUs"] = min(figures[name]["freed"]) > 0
        claims[f"{name}: the answer is of one GPU"] = answer["freed_bytes"] <= max(figures[name]["freed"]) + 2**26
        burst(p, "t", 8, 2000, 60, seed=len(figures)).run()
    figures["sleep"] = nap(p, meter, row, "t", 1)
    claims |= {f"sleep: {text}": holds for text, holds in figures["sleep"].pop("claims").items()}
    figures["killed"], more = _kill_one_rank(p, meter, row)
    again = burst(p, "t", 8, 2000, 60).run()
    claims |= more | {"same answers in the end": again.digests == reference.digests, "it serves": again.complete}
    p.call("POST", f"/instances/{row['id']}/stop", json={})
    p.until(row["id"], {"stopped", "failed"}, 120)
    figures["device_after"] = _used(meter)
    leeway = 2**28
    claims["all memory is back"] = all(x <= y + leeway for x, y in zip(figures["device_after"], before, strict=True))
    return figures | {"claims": claims}


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
