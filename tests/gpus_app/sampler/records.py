"""Records for tests, in plain functions."""

from __future__ import annotations

from typing import Any

from gpus_app.sampler.record import GpuPart, HostRecord, InstancePart

GIB = 1024**3


def instance_part(**values: Any) -> InstancePart:
    part: InstancePart = {
        "id": 1,
        "name": "qwen",
        "replica": 0,
        "ipc": "sz-0a1b2c3d-i1-a1",
        "resident": 5 * GIB,
        "baseline": 3 * GIB,
        "used": GIB,
        "prealloc": GIB,
        "limit": 8 * GIB,
        "capacity": 20 * GIB,
        "running": 1,
        "waiting": 0,
        "preemptions": 0,
        "gen_tokens": 10,
        "gen_tokens_per_s": 5.0,
        "sleep_state": "awake",
        "metrics_age_s": 0.1,
        "state": "ok",
        "note": "",
        "drift": None,
    }
    return part | values  # type: ignore[return-value]


def gpu_part(**values: Any) -> GpuPart:
    part: GpuPart = {
        "uuid": "GPU-a",
        "index": 0,
        "name": "Simulated H100 80GB",
        "total": 80 * GIB,
        "used": 5 * GIB,
        "free": 75 * GIB,
        "util": 50.0,
        "temp": 40.0,
        "power": 200.0,
        "power_limit": 700.0,
        "error": None,
        "other": 0,
        "other_processes": [],
        "instances": [instance_part()],
    }
    return part | values  # type: ignore[return-value]


def record(t: float = 1_800_000_000.0, *gpus: GpuPart, host: str = "host-a", seq: int = 1) -> HostRecord:
    return {
        "type": "sample",
        "host": host,
        "t": t,
        "seq": seq,
        "sampler": {"lag_s": 0.0, "took_s": 0.01},
        "gpus": list(gpus) or [gpu_part()],
        "stale_segments": [],
    }
