"""Starts the product as an operator would and talks to it over REST, /v1 and NVML."""

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
import pynvml

ROOT = Path(__file__).resolve().parents[2]


class Product:
    """One running product: ``with Product(home) as p``. Everything it started is ended, the engines too."""

    def __init__(self, home: Path, *, port: int = 8000, router_port: int = 8001, **env: str) -> None:
        self.home, self.port, self.router_port = home, port, router_port
        self.env = (
            os.environ
            | {
                "SARDEENZ_HOME": str(home),
                "PORT": str(port),
                "ROUTER_PORT": str(router_port),
                "SARDEENZ_ENGINE": "vllm",
                "SARDEENZ_ADMIN_PASSWORD": "measure-me-once",
            }
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
        return self

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
        return state | {"launch_s": round(time.monotonic() - start, 2)}

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


class Meter(threading.Thread):
    """The device's used bytes, 50 times a second (NVML version 2: without the driver's reserve)."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(daemon=True)
        pynvml.nvmlInit()
        self.handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self.points: list[tuple[float, int]] = []
        self.ended = threading.Event()

    def used(self) -> int:
        return int(pynvml.nvmlDeviceGetMemoryInfo(self.handle, version=pynvml.nvmlMemory_v2).used)

    def run(self) -> None:
        while not self.ended.wait(0.02):
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
