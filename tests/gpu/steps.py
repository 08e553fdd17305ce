"""What is measured, one function a claim. Each takes the running product and returns figures for the results file.

Loads are written for an H200 and get smaller with the card. ``claims`` are what must hold; bytes are of one GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu.folders import small_with_weights
from tests.gpu.load import Burst
from tests.gpu.product import Meter, Product

GIB = 1024**3
Step = Callable[[Product, Meter], dict[str, Any]]
STEPS: dict[str, Step] = {}


def step(function: Step) -> Step:
    STEPS[function.__name__] = function
    return function


def burst(p: Product, model: str, n: int, prompt: int, tokens: int, **more: Any) -> Burst:
    return Burst(p.router, p.key, model, n, prompt, tokens, **more)


def instance_of(p: Product, model: str) -> dict[str, Any]:
    rows = p.call("GET", "/instances", params={"model": model, "live": True})
    return dict(rows[0])


def kv(p: Product, model: str) -> dict[str, Any]:
    """The newest reading of the model's instance: used, prealloc, limit, running, waiting …"""
    for gpu in p.call("GET", "/gpus"):
        for row in (gpu.get("latest") or {}).get("instances", []):
            if row["name"] == model:
                return dict(row)
    return {}


def ensure(p: Product, name: str, folder: str, **fields: Any) -> dict[str, Any]:
    """The model's ready instance, launched when there is none."""
    names = [row["served_model_name"] for row in p.call("GET", "/models")]
    if name not in names:
        p.model(name, str(p.models / folder), **({"gpu_uuids": [p.gpus[0]["uuid"]]} | fields))
    rows = [r for r in p.call("GET", "/instances", params={"model": name, "live": True}) if r["state"] == "ready"]
    return dict(rows[0]) if rows else p.launch(name)


def direct(p: Product, row: dict[str, Any]) -> tuple[str, str]:
    """Address and token of an engine: past the router, for what the router would not let through."""
    return f"http://127.0.0.1:{row['port']}", (_run_dir(p, row) / "token").read_text()


def _run_dir(p: Product, row: dict[str, Any]) -> Path:
    """Of the instance's newest start."""
    mark = f'"instance_id": {row["id"]},'
    folders = [file.parent for file in p.home.glob("runs/*/attempt.json") if mark in file.read_text()]
    return max(folders, key=lambda folder: int(folder.name))


def segment_of(p: Product, row: dict[str, Any]) -> str:
    """The name of its KV segment: others may run Sardeenz on this machine, too."""
    return str(json.loads((_run_dir(p, row) / "attempt.json").read_text())["ipc_name"])


def low_limit(row: dict[str, Any]) -> int:
    """Twelve bundles, or the safety floor where that is more: as low as needs no force."""
    return int(max(row["limit"]["bundle_bytes"] * 12, row["limit"]["safety_floor_bytes"]))


def a(p: Product) -> dict[str, Any]:
    return ensure(p, "a", "qwen3-0.6b", enforce_eager=True, max_model_len=32768, enable_prefix_caching=False)


@step
def start(p: Product, meter: Meter) -> dict[str, Any]:
    """Three models on one card: times to ready, and no request of the first fails while the others come up."""
    first = a(p)
    traffic = burst(p, "a", 8, 500, 6000, limit_s=400).start()
    second = ensure(p, "b", "llama-1b", enforce_eager=True, max_model_len=8192, enable_sleep_mode=True)
    third = ensure(p, "c", "qwen2.5-0.5b", enforce_eager=True, max_model_len=8192, initial_limit_bytes=4 * GIB)
    traffic.join()
    return {
        "a_ready_s": first.get("launch_s"), "b_ready_s": second.get("launch_s"), "c_ready_s": third.get("launch_s"),
        "first_model_meanwhile": traffic.summary(), "c_limit": third["limit"], "device_bytes": meter.used(),
        "claims": {"no request of the first model fails": traffic.complete},
    }  # fmt: skip


@step
def idle_limit(p: Product, meter: Meter) -> dict[str, Any]:
    """An idle engine that holds GBs in its prefix cache: limit → the bytes are back on the device."""
    row = ensure(p, "p", "qwen3-0.6b", enforce_eager=True, max_model_len=8192, enable_prefix_caching=True)
    load = burst(p, "p", 24, 2000, 200).run()
    time.sleep(2)
    before, reading = meter.used(), kv(p, "p")
    size = low_limit(row)
    since = time.monotonic()
    answer = p.limit(row["id"], size, reclaim="wait")
    freed = answer["freed_bytes"] or 0
    time.sleep(2)
    back = meter.first_below(before - freed, since)
    after = burst(p, "p", 4, 500, 50).run()
    return {
        "load": load.summary(), "reading_before": reading, "answer": answer, "device_before": before,
        "device_after": meter.used(), "back_s": back, "series": meter.series(since, (0.2, 0.5, 1, 2)),
        "serves_after": after.summary(),
        "claims": {
            "bytes came back": freed > 0 and back is not None, "in force": answer["status"] == "applied",
            "serves after": after.complete,
        },
    }  # fmt: skip


@step
def trim(p: Product, meter: Meter) -> dict[str, Any]:
    """Trim: bytes freed, time, and the same answers before and after."""
    row = a(p)
    prompts = {"n": 8, "prompt": 600, "tokens": 200}
    reference = burst(p, "a", *prompts.values()).run()
    time.sleep(1.5)
    before, since = meter.used(), time.monotonic()
    answer = p.call("POST", f"/instances/{row['id']}/trim", json={})
    took = time.monotonic() - since
    time.sleep(1)
    freed = before - meter.used()
    again = burst(p, "a", *prompts.values()).run()
    return {
        "answer": answer, "took_s": round(took, 3), "device_freed": freed,
        "outputs_identical": reference.digests == again.digests, "ok": again.summary(),
        "claims": {
            "bytes came back": freed > 0, "the limit stays": answer["limit_bytes"] == row["limit"]["limit_bytes"],
            "outputs identical": reference.digests == again.digests,
        },
    }  # fmt: skip


def _busy(p: Product, meter: Meter, reclaim: str, watch_s: float) -> dict[str, Any]:
    row = a(p)
    p.limit(row["id"], row["limit"]["capacity_bytes"], reclaim="wait")
    load = burst(p, "a", p.many(96), 12_000, 500, limit_s=280).start()
    p.wait(lambda: kv(p, "a").get("used", 0) > 0.6 * p.card_bytes or load.took_s_so_far() > 40, 60, "KV filled", 0.25)
    to = int(0.28 * p.card_bytes)
    before, reading = meter.used(), kv(p, "a")
    since = time.monotonic()
    answer = p.limit(row["id"], to, reclaim=reclaim)
    time.sleep(watch_s)
    series = meter.series(since)
    floor = before - (reading["used"] + reading["prealloc"] - to) + p.card_bytes // 70
    back = meter.first_below(floor, since)
    load.join()
    last = p.call("GET", f"/instances/{row['id']}")
    events = p.call("GET", f"/instances/{row['id']}/events", params={"limit": 20})
    p.limit(row["id"], row["limit"]["capacity_bytes"], reclaim="wait")
    return {
        "reading_before": reading, "device_before": before, "answer": answer, "series": series,
        "under_limit_after_s": back, "load": load.summary(), "limit_now": last["limit"],
        "events": [e for e in events if e["kind"] in ("limit", "reclaim")][:5],
        "claims": {
            "the limit was below use": reading["used"] > to, "no request fails": load.complete,
            "under the limit": back is not None or reclaim == "wait",
            "in force in the end": last["limit"]["status"] == "applied",
        },
    }  # fmt: skip


@step
def busy_preempt(p: Product, meter: Meter) -> dict[str, Any]:
    """A limit far below what a busy engine uses, with preemption: bytes back at once, no request failed."""
    return _busy(p, meter, "preempt", 5)


@step
def busy_wait(p: Product, meter: Meter) -> dict[str, Any]:
    """The same without preemption: bytes over time."""
    return _busy(p, meter, "wait", 20.5)


@step
def preempt_identity(p: Product, meter: Meter) -> dict[str, Any]:
    """Greedy outputs with limits squeezed three times in mid-stream are those of the undisturbed run."""
    row = a(p)
    shape = (24, 1500, 700)
    reference, second = burst(p, "a", *shape).run(), burst(p, "a", *shape).run()
    squeezed = burst(p, "a", *shape).start()
    answers = []
    for size in (20, 12, 16):
        time.sleep(1.5)
        answers.append(p.limit(row["id"], row["limit"]["bundle_bytes"] * size, reclaim="preempt", force=True))
    p.limit(row["id"], row["limit"]["capacity_bytes"])
    squeezed.join()
    return {
        "undisturbed_twice_identical": reference.digests == second.digests,
        "same_as_undisturbed": sum(x == y for x, y in zip(reference.digests, squeezed.digests, strict=True)),
        "of": shape[0], "undisturbed_same": sum(x == y for x, y in zip(reference.digests, second.digests, strict=True)),
        "ok": squeezed.summary(),
        "answers": [{k: x[k] for k in ("status", "preempted", "freed_bytes", "call_s")} for x in answers],
        "claims": {
            "requests were preempted": any((x["preempted"] or {}).get("requests") for x in answers),
            "no output changed": squeezed.digests == reference.digests or reference.digests != second.digests,
            "no request fails": squeezed.complete,
        },
    }  # fmt: skip


@step
def starve_and_raise(p: Product, meter: Meter) -> dict[str, Any]:
    """A limit under one request's need starves the engine; after the raise it serves within a second (stock: never)."""
    row = a(p)
    bundle = row["limit"]["bundle_bytes"]
    p.limit(row["id"], bundle * 4, force=True, reclaim="preempt")
    time.sleep(3)
    p.wait(lambda: kv(p, "a").get("limit") == bundle * 4, 10, "routers know the limit")
    refused = burst(p, "a", 1, 6000, 20, limit_s=20).run().records[0].error
    load = Burst(*direct(p, row), "a", 1, 6000, 20, limit_s=60).start()
    time.sleep(4)
    starved = p.call("GET", f"/instances/{row['id']}")
    since = time.monotonic()
    answer = p.limit(row["id"], row["limit"]["capacity_bytes"])
    load.join()
    first = load.records[0].ttft_s
    return {
        "router_says": refused, "health_meanwhile": starved["health"],
        "reason_meanwhile": starved["health_reason"], "raise": answer,
        "first_token_after_raise_s": round(first + load.began - since, 3) if first else None,
        "claims": {
            "the router refuses what cannot fit": refused.startswith("400"),
            "it serves after the raise": load.complete,
        },
    }  # fmt: skip


@step
def shrink_then_raise(p: Product, meter: Meter) -> dict[str, Any]:
    """Shrink, then ask for more than the start-up capacity: clamped, no crash, outputs as of an unlimited run."""
    row = a(p)
    capacity = row["limit"]["capacity_bytes"]
    shape = (32, 1000, 300)
    reference = burst(p, "a", *shape).run()
    p.limit(row["id"], low_limit(row), reclaim="preempt")
    burst(p, "a", 16, 500, 100).run()
    asked = int(1.4 * p.card_bytes)
    answer = p.limit(row["id"], asked)
    after = burst(p, "a", *shape).run()
    big = burst(p, "a", p.many(90), 12_000, 50).run()
    return {
        "asked": asked, "capacity": capacity, "answer": answer, "ok": after.summary(), "big": big.summary(),
        "same": sum(x == y for x, y in zip(reference.digests, after.digests, strict=True)), "of": shape[0],
        "health": instance_of(p, "a")["health"],
        "claims": {
            "cut to the capacity": answer["limit_bytes"] <= capacity,
            "no output changed": reference.digests == after.digests,
            "no request fails": after.complete and big.complete,
        },
    }  # fmt: skip


@step
def kvctl_cost(p: Product, meter: Meter) -> dict[str, Any]:
    """Reading and writing a limit: kvctl against REST (whole round trip with the engine's answer) and the segment."""
    from gpus_app.probes.segments import read_segment

    row = a(p)
    name = segment_of(p, row)
    kvctl = os.environ.get("SARDEENZ_KVCTL", "kvctl").split()
    times: dict[str, list[float]] = {"kvctl_list": [], "kvctl_limit": [], "rest_limit": [], "segment_read": []}
    segment = read_segment(name)
    there = shutil.which(kvctl[0]) is not None
    for _ in range(3):
        for key, argv in (
            (
                ("kvctl_list", ["list", "--json"]),
                ("kvctl_limit", ["limit", name, str(segment.limit_bytes)]),
            )
            if there
            else ()
        ):
            since = time.monotonic()
            subprocess.run([*kvctl, *argv], capture_output=True, timeout=60, check=False)
            times[key].append(round(time.monotonic() - since, 3))
        times["rest_limit"].append(p.limit(row["id"], segment.limit_bytes)["call_s"])
        since = time.perf_counter()
        read_segment(name)
        times["segment_read"].append(round(time.perf_counter() - since, 6))
    return {**times, "kvctl_there": there}


@step
def foreign_writer(p: Product, meter: Meter) -> dict[str, Any]:
    """A stranger writes more than the capacity into the segment: seen as drift, named, put back."""
    import struct

    from gpus_app.probes.segments import read_segment

    row = a(p)
    name = segment_of(p, row)
    good = read_segment(name).limit_bytes
    with (Path("/dev/shm") / name).open("r+b") as file:
        file.write(struct.pack("<q", int(1.4 * p.card_bytes)))
    since = time.monotonic()
    back = p.wait(lambda: read_segment(name).limit_bytes <= row["limit"]["capacity_bytes"], 20, "put back", 0.05)
    seen: list[dict[str, Any]] = []

    def told() -> bool:
        seen[:] = [
            e for e in p.call("GET", f"/instances/{row['id']}/events", params={"limit": 5}) if e["kind"] == "drift"
        ]
        return bool(seen) or bool(kv(p, "a").get("drift"))

    noticed = p.wait(told, 10, "noticed")
    return {
        "before": good,
        "put_back_s": round(back, 2),
        "seen_s": round(time.monotonic() - since, 2),
        "event": seen[0] if seen else None,
        "claims": {"within two seconds, looks of a second included": back + noticed < 4.0},
    }


def nap(p: Product, meter: Meter, row: dict[str, Any], model: str, level: int) -> dict[str, Any]:
    """Sleep and wake once: bytes back, seconds, and the same answers after as before."""
    reference = burst(p, model, 2, 50, 40).run()
    before, since = meter.used(), time.monotonic()
    p.call("POST", f"/instances/{row['id']}/sleep", json={"level": level})
    asleep = p.until(row["id"], {"sleeping", "failed", "ready"}, 120)
    if asleep["state"] != "sleeping":
        return {"refused": asleep["reason"], "claims": {"it sleeps": False}}
    slept, sleep_s = meter.used(), round(time.monotonic() - since, 2)
    since = time.monotonic()
    p.call("POST", f"/instances/{row['id']}/wake", json={})
    state = p.until(row["id"], {"ready", "failed"}, 180)
    wake_s = round(time.monotonic() - since, 2)
    routed = p.wait(lambda: p.serves(model), 60, f"the router serves {model}", 0.05)
    after = burst(p, model, 2, 50, 40).run()
    same = after.digests == reference.digests
    return {
        "freed": before - slept, "sleep_s": sleep_s, "wake_s": wake_s, "routed_after_s": round(routed, 2),
        "state": state["state"],
        "reason": state["reason"], "same_answers": same, "ok": after.summary(),
        "claims": {"bytes came back": before > slept, "same answers": same, "it serves": after.complete},
    }  # fmt: skip


@step
def sleep_wake(p: Product, meter: Meter) -> dict[str, Any]:
    """Level 1: what came back, how long, the same answer after waking. Level 2 is refused: nothing to reload."""
    row = ensure(p, "b", "llama-1b", enforce_eager=True, max_model_len=8192, enable_sleep_mode=True)
    first = nap(p, meter, row, "b", 1)
    p.call("POST", f"/instances/{row['id']}/sleep", json={"level": 2})
    second = p.until(row["id"], {"ready", "sleeping", "failed"}, 60)
    first["level_2_with_random_weights"] = {"state": second["state"], "reason": second["reason"]}
    first["claims"]["level 2 is refused for random weights"] = second["state"] == "ready"
    return first


@step
def sleep_level_2(p: Product, meter: Meter) -> dict[str, Any]:
    """Level 2 drops the weights: after waking they are read again, and the answers are the same. Needs real weights."""
    names = [row["served_model_name"] for row in p.call("GET", "/models")]
    if "real" not in names:
        folder = small_with_weights(p.models, p.models / "small-real")
        options = {"enforce_eager": True, "max_model_len": 2048, "enable_sleep_mode": True}
        ensure(p, "real", folder.name, load_format="auto", **options)
    return nap(p, meter, ensure(p, "real", "small-real"), "real", 2)


@step
def stop(p: Product, meter: Meter) -> dict[str, Any]:
    """Stop while streaming: drained, ended, memory back; the neighbour serves on."""
    row = ensure(p, "c", "qwen2.5-0.5b", enforce_eager=True, max_model_len=8192, initial_limit_bytes=4 * GIB)
    neighbour = burst(p, "a", 4, 200, 1500).start()
    own = burst(p, "c", 4, 200, 400).start()
    time.sleep(1)
    before, since = meter.used(), time.monotonic()
    p.call("POST", f"/instances/{row['id']}/stop", json={})
    last = p.until(row["id"], {"stopped", "failed"}, 90)
    took = round(time.monotonic() - since, 2)
    freed = before - meter.used()
    own.join()
    neighbour.join()
    return {
        "state": last["state"], "reason": last["reason"], "took_s": took, "device_freed": freed,
        "own_streams": own.summary(), "neighbour": neighbour.summary(),
        "claims": {"drained": own.complete, "the neighbour serves on": neighbour.complete},
    }  # fmt: skip
