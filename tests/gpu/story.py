"""The operator's story and the comparisons: deploy on a full card, rebalance against thirds, cost."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

import httpx

from tests.gpu.load import Burst
from tests.gpu.product import Meter, Product
from tests.gpu.steps import a, burst, direct, ensure, kv, step


@step
def make_room(p: Product, meter: Meter) -> dict[str, Any]:
    """The card is full of the running model's KV cache; the next model is deployed: planned, verified, served."""
    row = a(p)
    p.call("PATCH", "/models/a", json={"memory_policy": {"reclaim": "preempt", "priority": 40}})
    p.call("POST", f"/instances/{row['id']}/limit/automatic", json={})
    names = [one["served_model_name"] for one in p.call("GET", "/models")]
    if "d" not in names:
        p.model(
            "d",
            str(p.models / "qwen3-8b"),
            enforce_eager=True,
            max_model_len=16384,
            gpu_uuids=[p.gpus[0]["uuid"]],
            memory_policy={"priority": 60},
        )
    reserve = p.card_bytes // 12
    try:
        for gpu in p.gpus:
            p.call("PATCH", f"/gpus/{gpu['uuid']}/policy", json={"reserve_bytes": reserve})
        tokens = 6000 if p.simulated else 1200  # simulated engines hurry; the load must outlast the plan
        load = burst(p, "a", p.many(110), 14_000, tokens, limit_s=400).start()
        looks: list[str] = []

        def full() -> bool:
            """Four looks in a row: the card fills over some seconds, and limits are still moving."""
            looks.append(_verdict(p))
            return looks[-4:] == ["fits_after_making_room"] * 4

        p.wait(lambda: full() or load.took_s_so_far() > 60, 90, "no room for the next", 0.5)
        return _story(p, meter, load)
    finally:
        for gpu in p.gpus:
            p.call("PATCH", f"/gpus/{gpu['uuid']}/policy", json={"reserve_bytes": 0})


def _verdict(p: Product) -> str:
    return str(p.call("POST", "/models/d/fit", json={"gpu_uuids": [p.gpus[0]["uuid"]]})["verdict"])


def _story(p: Product, meter: Meter, load: Burst) -> dict[str, Any]:
    """From the verdict to the newcomer's first answers."""
    full = meter.used()
    where = {"gpu_uuids": [p.gpus[0]["uuid"]]}
    fit = p.call("POST", "/models/d/fit", json=where)
    since = time.monotonic()
    operation = p.call("POST", "/models/d/make_room", json=where)
    phases: list[tuple[float, str]] = []
    while time.monotonic() - since < 400:
        operation = p.call("GET", f"/operations/{operation['id']}")
        if not phases or phases[-1][1] != operation["phase"]:
            phases.append((round(time.monotonic() - since, 2), operation["phase"]))
        if operation["state"] not in ("pending", "running"):
            break
        time.sleep(0.1)
    took = round(time.monotonic() - since, 1)
    served = burst(p, "d", 8, 500, 100).run()
    time.sleep(3)
    limits = {name: kv(p, name) for name in ("a", "d")}
    load.join()
    return {
        "device_full": full, "fit": fit, "operation": operation, "phases": phases, "took_s": took,
        "newcomer": served.summary(), "squeezed_model": load.summary(), "limits_after": limits,
        "claims": {
            "room had to be made": fit["verdict"] == "fits_after_making_room",
            "the newcomer is ready": operation["state"] == "succeeded",
            "no step failed": all(step["state"] in ("verified", "short") for step in operation["steps"]),
            "the newcomer serves": served.complete, "no request of the squeezed model fails": load.complete,
        },
    }  # fmt: skip


def _bursts(p: Product, names: list[str], n: int) -> dict[str, Any]:
    """Each model in turn gets a burst while the others have a trickle."""
    figures: dict[str, Any] = {}
    for name in names:
        trickle = [burst(p, other, 2, 500, 200, seed=7).start() for other in names if other != name]
        load = burst(p, name, p.many(n), 12_000, 300, limit_s=200).run()
        for one in trickle:
            one.join()
        figures[name] = load.summary()
    means = [one["ttft_mean_s"] or float("nan") for one in figures.values()]
    tails = [one["ttft_p99_s"] or float("nan") for one in figures.values()]
    ok = sum(one["ok"] for one in figures.values())
    return {
        "ok": ok,
        "of": p.many(n) * len(names),
        "ttft_mean_s": sum(means) / len(means),
        "ttft_p99_s": max(tails),
        "each": figures,
    }


@step
def rebalance_against_thirds(p: Product, meter: Meter) -> dict[str, Any]:
    """Three models in bursts: limits moved by the controller, against a fixed third of the card each."""
    _stop_all(p)
    shape = {"enforce_eager": True, "max_model_len": 32768, "enable_prefix_caching": False}
    results: dict[str, Any] = {}
    for kind, options in (
        ("controller", {}),
        ("thirds", {"kvcached": False, "extra_args": "--gpu-memory-utilization 0.31"}),
    ):
        names = [f"{kind}-{i}" for i in range(3)]
        for name in names:
            ensure(p, name, "qwen3-0.6b", gpu_uuids=[p.gpus[0]["uuid"]], **(shape | options))
        if kind == "controller":
            _divided(p, names)
        results[kind] = {"below_the_knee": _bursts(p, names, 16), "above": _bursts(p, names, 64)}
        _stop_all(p)
    for load in ("below_the_knee", "above"):
        for figure in ("ttft_mean_s", "ttft_p99_s"):
            results[f"{load}_{figure}_ratio"] = round(
                results["thirds"][load][figure] / results["controller"][load][figure], 2
            )
    results["claims"] = {
        f"no request fails: {kind}, {load}": results[kind][load]["ok"] == results[kind][load]["of"]
        for kind in ("controller", "thirds")
        for load in ("below_the_knee", "above")
    }
    return results


def _stop_all(p: Product) -> None:
    p.call("POST", "/instances/stop_all", json={})
    p.wait(lambda: not p.call("GET", "/instances", params={"live": True}), 120, "all stopped")


def _divided(p: Product, names: list[str]) -> None:
    """Wait until the controller has divided the card among these."""
    p.wait(lambda: all(kv(p, name).get("limit") for name in names), 30, "limits are read")
    fair = (p.card_bytes - sum(kv(p, name)["baseline"] or 0 for name in names)) // (2 * len(names))
    p.wait(lambda: all((kv(p, name).get("limit") or 0) >= fair for name in names), 60, "each has its part", 0.5)
    p.wait(lambda: _promised(p, names) <= p.card_bytes, 60, "the limits fit the card", 0.5)


def _promised(p: Product, names: list[str]) -> int:
    """Bytes that the limits in force and the rest of these engines come to."""
    rows = [kv(p, name) for name in names]
    return sum((row.get("baseline") or 0) + (row.get("limit") or 0) for row in rows)


@step
def cost(p: Product, meter: Meter) -> dict[str, Any]:
    """Throughput of an engine with add-on and readings every second against ``vllm serve`` + kvcached alone."""
    if p.simulated:
        return {"skipped": "needs a real engine"}
    row = a(p)
    env = os.environ | {
        "ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "1", "KVCACHED_IPC_NAME": "bare-peer",
        "VLLM_USE_V2_MODEL_RUNNER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    command = os.environ.get("SARDEENZ_VLLM", "vllm")
    bare = subprocess.Popen(
        [command, "serve", str(p.models / "qwen3-0.6b"), "--served-model-name", "a", "--host", "127.0.0.1",
         "--port", "18222", "--load-format", "dummy", "--enforce-eager", "--max-model-len", "32768",
         "--no-enable-prefix-caching"],
        env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        p.wait(lambda: _healthy("http://127.0.0.1:18222"), 200, "bare engine", 0.5)
        ours, theirs = [], []
        for round_ in range(4):
            ours.append(Burst(*direct(p, row), "a", 256, 512, 128, seed=round_).run().summary())
            theirs.append(Burst("http://127.0.0.1:18222", "none", "a", 256, 512, 128, seed=round_).run().summary())
    finally:
        os.killpg(bare.pid, signal.SIGKILL)
        bare.wait()
    mine = sum(one["tokens_per_s"] for one in ours[1:])
    peer = sum(one["tokens_per_s"] for one in theirs[1:])
    ratio = round(mine / peer, 3)
    return {"with_addon": ours, "bare": theirs, "ratio": ratio, "claims": {"at least 0.99": ratio >= 0.99}}


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
