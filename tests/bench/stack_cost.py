"""What a whole Sardeenz costs: ``python -m tests.bench.stack_cost`` starts the demo and prints a Markdown table.

Memory is resident (RSS) and proportional (PSS, shared pages counted once). Times are of this machine as busy as it is.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
from websockets.sync.client import connect
from websockets.typing import Origin

from tests.bench import fleet
from tests.sardeenz_site.stack import Stack
from tests.sardeenz_site.traffic import Api

MIB = 1024**2
LISTEN_S = 20.0
LAUNCHES = 5
#: Nothing here takes longer unless it hangs.
LIMIT_S = 90.0
#: The readings' way is measured twice: in the demo, and beside a fleet's samplers.
FEW_PAGES = 20
FLEET_PAGES, FLEET_GPUS, FLEET_INSTANCES = 200, 64, 256
#: The badge of a ready instance.
READY = re.compile(r"</i>\s*Ready\s*</span>")


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


def launches(stack: Stack, api: Api, browser: httpx.Client) -> tuple[list[float], list[float]]:
    """Seconds from sending POST launch to the engine's exec, as its guardian wrote it down; and from the engine's first
    healthy answer until a page that is told of changes has fetched one that says *Ready*."""
    execs, shown = [], []
    for number in range(LAUNCHES):
        name = f"m{number}"
        api.post("/models", served_model_name=name, source="catalogue", model="Qwen/Qwen3-0.6B")
        before = set((stack.home / "runs").glob("*/status.json"))
        listening = threading.Event()
        with ThreadPoolExecutor(1) as threads:
            ready = threads.submit(shown_ready_at, stack, browser, name, listening)
            while not listening.wait(0.1):
                assert not ready.done(), ready.exception()
            sent = time.time()
            api.post(f"/models/{name}/launch")
            status = wait_for_new(stack, before)
            healthy_at = first_healthy_at(int(json.loads((status.parent / "attempt.json").read_text())["port"]))
            execs.append(json.loads(status.read_text())["started_at"] - sent)
            shown.append(ready.result(LIMIT_S) - healthy_at)
    return execs, shown


def wait_for_new(stack: Stack, before: set[Path]) -> Path:
    """The record of the start that was not there before, once its engine has been started."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        for path in set((stack.home / "runs").glob("*/status.json")) - before:
            if json.loads(path.read_text()).get("started_at"):
                return path
        time.sleep(0.01)
    raise TimeoutError("no engine was started")


def first_healthy_at(port: int) -> float:
    end = time.monotonic() + LIMIT_S
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=2) as engine:
        while time.monotonic() < end:
            try:
                if engine.get("/health").status_code == 200:
                    return time.time()
            except httpx.HTTPError:
                pass
            time.sleep(0.01)
    raise TimeoutError(f"nothing healthy on port {port}")


def shown_ready_at(stack: Stack, browser: httpx.Client, name: str, listening: threading.Event) -> float:
    """Do as ``live.js``: fetch what a note is about, until the model's instance is ready there. Returns that time."""
    address, who = f"ws://127.0.0.1:{stack.port}/ws/live", {"Cookie": cookies(browser)}
    with connect(address, origin=Origin(stack.url), additional_headers=who) as link:
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end:
            frame = json.loads(link.recv(15))
            listening.set()
            for instance in frame.get("instances", ()):
                page = browser.get(f"/instances/{instance}/", headers={"HX-Request": "true"}).text
                if f"{name}</h1>" in page and READY.search(page):
                    return time.time()
            link.send(json.dumps({"ack": frame["n"]}))
    raise TimeoutError("no page said that it was ready")


def cookies(browser: httpx.Client) -> str:
    return "; ".join(f"{name}={value}" for name, value in browser.cookies.items())


def lags_of(heard: dict[str, list[float]]) -> list[float]:
    return [lag for lags in heard.values() for lag in lags]


def quantiles(values: list[float]) -> str:
    p50, p95 = (sorted(values)[int((len(values) - 1) * share)] for share in (0.5, 0.95))
    return f"{p50:.2f} / {p95:.2f} s"


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
            execs, shown = launches(stack, api, browser)
            engines = [p for p in psutil.process_iter(["cmdline"]) if is_engine(p, stack)]
            engine_rss = max(p.memory_info().rss for p in engines)
            few = lags_of(fleet.listen(stack, cookies(browser), pages=FEW_PAGES, seconds=LISTEN_S))
            with fleet.samplers(stack, gpus=FLEET_GPUS, instances=FLEET_INSTANCES):
                fleet.wait_for_hosts(stack, cookies(browser), FLEET_GPUS // fleet.GPUS_PER_HOST)
                many = lags_of(fleet.listen(stack, cookies(browser), pages=FLEET_PAGES, seconds=LISTEN_S))
    rows = [
        ("start of all processes, until pages answer", f"{start_s:.1f} s", "≤ 10 s"),
        ("all our processes, idle, resident", f"{rss / MIB:.0f} MiB", "≤ 900 MB"),
        ("the same, shared pages counted once", f"{proportional / MIB:.0f} MiB", ""),
        ("all our processes, idle, CPU", f"{idle_cpu:.1%} of a core", ""),
        ("one simulated engine with its guardian, largest process", f"{engine_rss / MIB:.0f} MiB", "≤ 70 MB"),
        (f"POST launch → engine exec, median of {LAUNCHES}", f"{statistics.median(execs):.2f} s", "≤ 0.5 s"),
        (f"engine healthy → page says ready, median of {LAUNCHES}", f"{statistics.median(shown):.2f} s", ""),
        (f"engine healthy → page says ready, longest of {LAUNCHES}", f"{max(shown):.2f} s", "≤ 1.5 s"),
        (f"sample → screen with {FEW_PAGES} pages, p50 / p95", quantiles(few), "≤ 1.5 s"),
        (
            f"sample → screen with {FLEET_PAGES} pages, {FLEET_GPUS} GPUs, {FLEET_INSTANCES} instances, p50 / p95",
            quantiles(many),
            "≤ 1.5 s",
        ),
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
