"""Starts the product as an operator would and talks to it over REST and /v1; reads its GPUs by NVML, or the ledger."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from gpus_app.probes.sim_ledger import Ledger
from tests.gpu import folders

ROOT = Path(__file__).resolve().parents[2]


#: Bytes of the card for which the loads of the steps are written: an H200. Others get their part of them.
WRITTEN_FOR_BYTES = 143_771 * 2**20
SIMULATED = {"SARDEENZ_SIM_GPUS": "2", "SARDEENZ_SIM_GPU_BYTES": "48GiB", "SARDEENZ_SIM_SPEED": "20"}


class Product:
    """One running product: ``with Product(home) as p``. Everything it started is ended, the engines too.

    ``engine``: "vllm" on this machine's GPUs, or "simulated" on two cards that are none, to prove the steps themselves.
    """

    def __init__(
        self, home: Path, *, engine: str = "vllm", port: int = 8000, router_port: int = 8001, **env: str
    ) -> None:
        self.home, self.port, self.router_port, self.engine = home, port, router_port, engine
        self.models = folders.of(engine, home)
        self.env = (
            os.environ
            | {
                "SARDEENZ_HOME": str(home),
                "PORT": str(port),
                "ROUTER_PORT": str(router_port),
                "SARDEENZ_ENGINE": engine,
                "SARDEENZ_MODEL_ROOTS": str(self.models.parent if engine == "simulated" else self.models),
                "SARDEENZ_SIM_DIR": str(home / "simgpu"),
                "SARDEENZ_ADMIN_PASSWORD": "measure-me-once",
            }
            | (SIMULATED if engine == "simulated" else {})
            | env
        )
        self.base = f"http://127.0.0.1:{port}"
        self.router = f"http://127.0.0.1:{router_port}"

    def __enter__(self) -> Product:
        self.home.mkdir(parents=True, exist_ok=True)
        self.log = (self.home / "product.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sardeenz_site.run"], cwd=ROOT, env=self.env, stdout=self.log, stderr=self.log,
            start_new_session=True,
        )  # fmt: skip
        self._wait_ready(120)
        out = subprocess.run(
            [sys.executable, "manage.py", "create_api_key", "measure", "--role", "admin"],
            cwd=ROOT, env=self.env, capture_output=True, text=True, timeout=60, check=True,
        ).stdout  # fmt: skip
        match = re.search(r"sz-[A-Za-z0-9_-]{20,}", out)
        assert match, out
        self.key = match[0]
        self.http = httpx.Client(base_url=f"{self.base}/api/v1", headers=self.auth, timeout=60)
        self.wait(lambda: self.call("GET", "/gpus"), 60, "GPUs are read")
        self.gpus = sorted(self.call("GET", "/gpus"), key=lambda gpu: gpu["index"])
        self.card_bytes = int(self.gpus[0]["total_bytes"])
        return self

    @property
    def simulated(self) -> bool:
        return self.engine == "simulated"

    def many(self, requests: int) -> int:
        """So many requests on an H200, in proportion on a smaller card."""
        return max(4, round(requests * min(1.0, self.card_bytes / WRITTEN_FOR_BYTES)))

    @property
    def auth(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def _wait_ready(self, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"the product ended with {self.process.returncode}: see {self.home}/product.log")
            try:
                if httpx.get(f"{self.base}/readyz", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
        raise TimeoutError("the product did not become ready")

    def __exit__(self, *_: object) -> None:
        try:
            self.http.post("/instances/stop_all", json={})
            self.wait(lambda: not self.http.get("/instances", params={"live": True}).json(), 90, "all stopped")
        finally:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
            self.log.close()

    @staticmethod
    def wait(done: Any, limit_s: float, what: str, every_s: float = 0.1) -> float:
        """Wait until ``done()`` is true; the seconds it took. Raises TimeoutError with ``what``."""
        start = time.monotonic()
        while time.monotonic() - start < limit_s:
            if done():
                return time.monotonic() - start
            time.sleep(every_s)
        raise TimeoutError(f"{what}: not within {limit_s:g} s")

    def call(self, method: str, path: str, **kwargs: Any) -> Any:
        """One REST call; raises with the answer's words when it is refused."""
        answer = self.http.request(method, path, **kwargs)
        if answer.status_code >= 400:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text[:1000]}")
        return answer.json() if answer.content else None

    def model(self, name: str, folder: str, **fields: Any) -> None:
        body = {"served_model_name": name, "source": "local", "model": folder, "load_format": "dummy"} | fields
        self.call("POST", "/models", json=body)

    def launch(self, name: str, *, wait_s: float = 300, **fields: Any) -> dict[str, Any]:
        """Launch and wait until ready; the instance, with the seconds it took under ``launch_s``."""
        start = time.monotonic()
        instance = self.call("POST", f"/models/{name}/launch", json=fields)
        state = self.until(instance["id"], {"ready", "failed"}, wait_s)
        if state["state"] != "ready":
            raise RuntimeError(f"{name}: {state['state']}: {state['reason']}")
        took = round(time.monotonic() - start, 2)
        routed = self.wait(lambda: self.serves(name), 60, f"the router serves {name}", 0.05)
        return state | {"launch_s": took, "routed_after_s": round(routed, 2)}

    def serves(self, name: str) -> bool:
        """Whether the router has an answer of the model: it hears of a ready instance a moment after the database."""
        body = {"model": name, "prompt": [40, 41], "max_tokens": 1}
        return httpx.post(f"{self.router}/v1/completions", json=body, headers=self.auth, timeout=60).status_code == 200

    def until(self, instance_id: int, states: set[str], limit_s: float) -> dict[str, Any]:
        last: dict[str, Any] = {}

        def reached() -> bool:
            nonlocal last
            last = self.call("GET", f"/instances/{instance_id}")
            return last["state"] in states

        self.wait(reached, limit_s, f"instance {instance_id} in {states} (now {last.get('state')})", 0.2)
        return last

    def limit(self, instance_id: int, size: int | str, **fields: Any) -> dict[str, Any]:
        start = time.monotonic()
        answer = self.call("POST", f"/instances/{instance_id}/limit", json={"size": size} | fields)
        return dict(answer) | {"call_s": round(time.monotonic() - start, 3)}


class Device:
    """What the GPUs tell: used bytes, and who holds them. NVML's version 2 leaves the driver's reserve out."""

    def __init__(self) -> None:
        import pynvml

        self.nvml = pynvml
        pynvml.nvmlInit()
        self.handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]

    def used(self, index: int) -> int:
        return int(self.nvml.nvmlDeviceGetMemoryInfo(self.handles[index], version=self.nvml.nvmlMemory_v2).used)

    def pids(self, index: int) -> set[int]:
        return {row.pid for row in self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handles[index])}


class SimulatedDevice(Device):
    """The same of simulated cards, from their ledger."""

    def __init__(self, product: Product) -> None:
        self.ledger = Ledger(product.home / "simgpu")
        self.uuids = [gpu["uuid"] for gpu in product.gpus]

    def used(self, index: int) -> int:
        return self.ledger.used_bytes(self.uuids[index])

    def pids(self, index: int) -> set[int]:
        return {row.pid for row in self.ledger.read().get(self.uuids[index], ())}


class Meter(threading.Thread):
    """Used bytes of the first GPU, 50 times a second (20 on simulated ones)."""

    def __init__(self, product: Product) -> None:
        super().__init__(daemon=True)
        self.device = SimulatedDevice(product) if product.simulated else Device()
        self.every_s = 0.05 if product.simulated else 0.02
        self.points: list[tuple[float, int]] = []
        self.ended = threading.Event()

    def used(self, index: int = 0) -> int:
        return self.device.used(index)

    def pids(self, index: int) -> set[int]:
        """Processes that hold memory of the GPU."""
        return self.device.pids(index)

    def run(self) -> None:
        while not self.ended.wait(self.every_s):
            self.points.append((time.monotonic(), self.used()))

    def first_below(self, level: int, since: float) -> float | None:
        """Seconds from ``since`` until the device used at most ``level`` bytes; None when it never did."""
        return next((round(t - since, 3) for t, used in self.points if t >= since and used <= level), None)

    def series(self, since: float, marks: tuple[float, ...] = (0.5, 1, 2, 5, 10, 20)) -> dict[str, int]:
        """Used bytes at some seconds after ``since``."""
        result = {}
        for mark in marks:
            later = [used for t, used in self.points if t >= since + mark]
            if later:
                result[f"{mark:g}s"] = later[0]
        return result
