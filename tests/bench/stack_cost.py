"""What a whole Sardeenz costs: ``python -m tests.bench.stack_cost`` starts the demo and prints a Markdown table.

Memory is resident (RSS) and proportional (PSS, shared pages counted once). Times are of this machine as busy as it is.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil
from websockets.asyncio.client import connect

from tests.sardeenz_site.stack import Stack
from tests.sardeenz_site.traffic import Api

MIB = 1024**2
PAGES = 20
LISTEN_S = 20.0
LAUNCHES = 5


def pss(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def memory(processes: Iterable[psutil.Process]) -> tuple[int, int]:
    found = list(processes)
    return sum(p.memory_info().rss for p in found), sum(pss(p.pid) for p in found)


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in processes)


def launch_overheads(stack: Stack, api: Api) -> list[float]:
    """Seconds from sending POST launch to the engine's exec, as its guardian wrote it down."""
    found = []
    for number in range(LAUNCHES):
        name = f"m{number}"
        api.post("/models", served_model_name=name, source="catalogue", model="Qwen/Qwen3-0.6B")
        before = {p.name for p in (stack.home / "runs").glob("*")}
        sent = time.time()
        instance = int(api.post(f"/models/{name}/launch")["id"])
        api.wait_state(instance, "ready")
        made = [p for p in (stack.home / "runs").glob("*") if p.name not in before]
        found.append(json.loads((made[0] / "status.json").read_text())["started_at"] - sent)
    return found


async def sample_lags(stack: Stack, cookie: str) -> list[float]:
    """Seconds from a reading's own time to its arrival in a browser, over all pages together."""
    lags: list[float] = []

    async def page() -> None:
        url = f"ws://127.0.0.1:{stack.port}/ws/live?samples=1"
        async with connect(url, origin=stack.url, additional_headers={"Cookie": cookie}) as link:  # type: ignore[arg-type]
            end = time.monotonic() + LISTEN_S
            while time.monotonic() < end:
                frame = json.loads(await asyncio.wait_for(link.recv(), 15))
                lags.extend(time.time() - record["t"] for record in frame.get("samples", ()))
                await link.send(json.dumps({"ack": frame["n"]}))

    await asyncio.gather(*(page() for _ in range(PAGES)))
    return lags


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def main() -> None:
    began = time.monotonic()
    with Stack(SARDEENZ_SIM_SPEED="10") as stack:
        start_s = time.monotonic() - began
        assert stack.process is not None
        assert stack.password is not None
        launcher = psutil.Process(stack.process.pid)
        ours = [launcher, *launcher.children(recursive=True)]
        time.sleep(5)
        before = cpu_s(ours)
        time.sleep(20)
        idle_cpu = (cpu_s(ours) - before) / 20
        rss, proportional = memory(ours)
        with Api(stack) as api, stack.login(stack.password) as browser:
            overheads = launch_overheads(stack, api)
            engines = [p for p in psutil.process_iter(["cmdline"]) if is_engine(p, stack)]
            engine_rss = max(p.memory_info().rss for p in engines)
            cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
            lags = asyncio.run(sample_lags(stack, cookie))
    rows = [
        ("start of all processes, until pages answer", f"{start_s:.1f} s", "≤ 10 s"),
        ("all our processes, idle, resident", f"{rss / MIB:.0f} MiB", "≤ 900 MB"),
        ("the same, shared pages counted once", f"{proportional / MIB:.0f} MiB", ""),
        ("all our processes, idle, CPU", f"{idle_cpu:.1%} of a core", ""),
        ("one simulated engine with its guardian, largest process", f"{engine_rss / MIB:.0f} MiB", "≤ 70 MB"),
        ("POST launch → engine exec, median of 5", f"{statistics.median(overheads):.2f} s", "≤ 0.5 s"),
        (f"sample → screen with {PAGES} pages, p50", f"{quantile(lags, 0.5):.2f} s", ""),
        (f"sample → screen with {PAGES} pages, p95", f"{quantile(lags, 0.95):.2f} s", "≤ 1.5 s"),
    ]
    sys.stdout.write("| what | measured | to hold |\n|---|---|---|\n")
    for row in rows:
        sys.stdout.write("| " + " | ".join(row) + " |\n")


def is_engine(process: psutil.Process, stack: Stack) -> bool:
    """A simulated engine of this stack, or its guardian."""
    words = " ".join(process.info["cmdline"] or ())
    if "models_app.simulator" not in words:
        return False
    try:
        return str(stack.home) in " ".join(process.environ().values())
    except psutil.Error:
        return False


if __name__ == "__main__":
    main()
