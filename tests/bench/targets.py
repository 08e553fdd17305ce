"""What is measured, each as processes of its own: the engine asked directly, our router, the Rust router from PyPI."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
KEY = "sz-bench"
RUST_PACKAGE = "vllm-router"


@dataclass
class Target:
    """Something that takes chat completions on a port, and the process whose cost is counted (with its children)."""

    name: str
    port: int
    pid: int | None

    def _processes(self) -> list[psutil.Process]:
        if self.pid is None:
            return []
        parent = psutil.Process(self.pid)
        return [parent, *parent.children(recursive=True)]

    def cpu_s(self) -> float:
        total = 0.0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def rss_bytes(self) -> int:
        total = 0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def process(argv: list[str], log: Path, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Runs while the block does; then it and its children are ended by their ids."""
    with log.open("wb") as out:
        running = subprocess.Popen(
            argv,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
        try:
            yield running
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGTERM)
            try:
                running.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait(10)


def wait_until_up(port: int, path: str, running: subprocess.Popen[bytes], log: Path, limit_s: float = 30.0) -> None:
    give_up_at = time.monotonic() + limit_s
    while time.monotonic() < give_up_at:
        if running.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2):
                return
        except urllib.error.HTTPError:
            pass
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"nothing answers on port {port}:\n{log.read_text(errors='replace')[-2000:]}")


@contextlib.contextmanager
def fake_engine(folder: Path) -> Iterator[Target]:
    port, log = free_port(), folder / "engine.log"
    with process([sys.executable, "-m", "tests.bench.fake_engine", str(port)], log) as running:
        wait_until_up(port, "/health", running, log)
        yield Target("direct", port, None)


def write_routes(home: Path, engine_ports: list[int]) -> None:
    instances = [
        {"id": port, "url": f"http://127.0.0.1:{port}", "token": "engine-token", "weight": 1} for port in engine_ports
    ]
    snapshot = {
        "version": time.time_ns() // 1000,
        "at": time.time(),
        "models": [{"name": "bench", "status": "ready", "max_model_len": 4096, "instances": instances}],
        "keys": [{"id": 1, "name": "bench", "digest": sha256(KEY.encode()).hexdigest()}],
    }
    draft = home / "routes.json.new"
    draft.write_text(json.dumps(snapshot))
    draft.replace(home / "routes.json")


@contextlib.contextmanager
def our_router(folder: Path, engine_ports: list[int], *, workers: int) -> Iterator[Target]:
    """The very program that runs in production, with its routes from the file and no broker."""
    port = free_port()
    home = folder / f"home-{workers}-{port}"
    home.mkdir()
    write_routes(home, engine_ports)
    log = folder / f"router-{workers}.log"
    argv = [sys.executable, "-m", "sardeenz_site.router_asgi", "--port", str(port), "--workers", str(workers)]
    env = {"SARDEENZ_HOME": str(home), "REDIS_URL": "redis://127.0.0.1:1/0", "SARDEENZ_ENV_FILE": os.devnull}
    with process(argv, log, env) as running:
        wait_until_up(port, "/readyz", running, log)
        yield Target(f"Sardeenz, {workers} worker{'s' if workers > 1 else ''}", port, running.pid)


def rust_router_command(folder: Path) -> list[str] | None:
    """The Rust router's command, from an environment of its own made once; None where it cannot be installed."""
    found = os.environ.get("BENCH_VLLM_ROUTER") or shutil.which("vllm-router")
    if found:
        return [found]
    home = folder / "rust"
    command = home / "bin" / "vllm-router"
    if not command.exists():
        venv.create(home, with_pip=True)
        pip = [str(home / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", RUST_PACKAGE]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            print(f"{RUST_PACKAGE} cannot be installed here, it is left out:\n{done.stderr[-500:]}", file=sys.stderr)
            return None
    return [str(command)]


@contextlib.contextmanager
def rust_router(folder: Path, command: list[str], engine_port: int) -> Iterator[Target]:
    port, log = free_port(), folder / "rust.log"
    argv = [
        *command,
        *("--host", "127.0.0.1", "--port", str(port), "--worker-urls", f"http://127.0.0.1:{engine_port}"),
        *("--policy", "round_robin", "--prometheus-port", str(free_port()), "--log-level", "error"),
    ]
    with process(argv, log, {"RUST_LOG": "error"}) as running:
        wait_until_up(port, "/health", running, log, 60.0)
        yield Target("vllm-router (Rust)", port, running.pid)
