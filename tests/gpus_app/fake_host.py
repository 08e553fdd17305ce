"""A host without engines: run directories, segments, simulated cards and HTTP answers as real ones would leave them.

For tests of the sampler and for measuring it; every file goes into folders that the caller gives.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gpus_app.probes import procfs
from gpus_app.probes.sim_ledger import Ledger, ensure_gpus

GIB = 1024**3
MIB = 1024**2
INSTALLATION = "0a1b2c3d"


def write_segment(folder: Path, name: str, limit: int, used: int, prealloc: int = 0) -> Path:
    path = folder / name
    path.write_bytes(struct.pack("<qqq", limit, used, prealloc))
    return path


def metrics_text(*, running: int = 0, waiting: int = 0, tokens: int = 0, preemptions: int = 0, filler: int = 0) -> str:
    """As vLLM 0.24 writes it, among ``filler`` lines of histograms."""
    label = '{engine="0",model_name="m"}'
    lines = [
        "# HELP vllm:num_requests_running Number of requests in model execution batches.",
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{label} {float(running)}",
        "# TYPE vllm:num_requests_waiting gauge",
        f"vllm:num_requests_waiting{label} {float(waiting)}",
        f'vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="capacity"}} {float(waiting)}',
        'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="awake"} 1.0',
        'vllm:engine_sleep_state{engine="0",model_name="m",sleep_state="weights_offloaded"} 0.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.997',
        f"vllm:num_preemptions_total{label} {float(preemptions)}",
        f"vllm:num_preemptions_created{label} 1.7e+09",
        f"vllm:generation_tokens_total{label} {float(tokens)}",
    ]
    lines += [
        f'vllm:inter_token_latency_seconds_bucket{{engine="0",le="{n / 100}",model_name="m"}} {float(n)}'
        for n in range(filler)
    ]
    return "\n".join(lines) + "\n"


@dataclass
class FakeEngine:
    """An HTTP server that answers as told; ``requests`` counts per path, ``delay_s`` makes it slow."""

    metrics: str = field(default_factory=metrics_text)
    status: dict[str, Any] | None = None
    token: str = "secret"
    delay_s: float = 0.0
    requests: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                engine.requests[self.path] = engine.requests.get(self.path, 0) + 1
                if engine.delay_s:
                    time.sleep(engine.delay_s)
                if self.headers.get("Authorization") != f"Bearer {engine.token}":
                    self._answer(401, b"{}")
                elif self.path == "/metrics":
                    self._chunked(engine.metrics.encode())
                elif self.path == "/kvcache/status" and engine.status is not None:
                    self._answer(200, json.dumps(engine.status).encode())
                else:
                    self._answer(404, b'{"detail":"Not Found"}')

            def _answer(self, code: int, body: bytes) -> None:
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def _chunked(self, body: bytes) -> None:
                # prometheus_client's ASGI app gives no length, so uvicorn sends chunks.
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class FakeHost:
    """Folders of one host: ``runs``, ``shm``, ``sim``. Processes are children of the test; ``close`` ends them."""

    def __init__(self, root: Path, *, gpus: int = 1, gpu_bytes: int = 80 * GIB, name: str = "host-a") -> None:
        self.name = name
        self.runs, self.shm, self.sim = root / "runs", root / "shm", root / "sim"
        for folder in (self.runs, self.shm, self.sim):
            folder.mkdir(parents=True, exist_ok=True)
        self.cards = ensure_gpus(self.sim, gpus, gpu_bytes, name)
        self.uuids = [card.uuid for card in self.cards]
        self._processes: list[subprocess.Popen[bytes]] = []

    def process(self, attempt_id: int | None, instance_id: int = 1) -> subprocess.Popen[bytes]:
        """A process that does nothing, with the marker of an attempt or without."""
        environment = {"PATH": os.environ["PATH"]}
        if attempt_id is not None:
            environment["SARDEENZ_INSTANCE"] = f"{INSTALLATION}:{instance_id}:{attempt_id}"
        process = subprocess.Popen(["/bin/sleep", "600"], env=environment)
        self._processes.append(process)
        # Until exec the child shows the test's own environment.
        for _ in range(200):
            if b"sleep" in (procfs.read_bytes(f"/proc/{process.pid}/cmdline") or b""):
                break
            time.sleep(0.005)
        return process

    def hold(self, pid: int, held: dict[str, int], *, utilization: float = 0.0) -> Ledger:
        """Give a process memory on the simulated cards."""
        ledger = Ledger(self.sim, pid=pid)
        ledger.set(bytes_held=held, utilization=dict.fromkeys(held, utilization))
        return ledger

    def attempt(
        self,
        attempt_id: int,
        *,
        instance_id: int | None = None,
        pid: int | None = None,
        port: int = 1,
        uuids: list[str] | None = None,
        name: str = "",
        replica: int = 0,
        ipc: str | None = None,
        token: str = "secret",
    ) -> Path:
        """A run directory as a launch and its guardian leave it."""
        instance_id = attempt_id if instance_id is None else instance_id
        folder = self.runs / str(attempt_id)
        folder.mkdir(mode=0o700)
        (folder / "token").write_text(token)
        record = {
            "schema": 1,
            "installation": INSTALLATION,
            "attempt_id": attempt_id,
            "instance_id": instance_id,
            "served_model_name": name or f"model-{attempt_id}",
            "replica_index": replica,
            "engine": "simulated",
            "address": "127.0.0.1",
            "port": port,
            "gpu_uuids": self.uuids[:1] if uuids is None else uuids,
            "ipc_name": self.ipc(attempt_id, instance_id) if ipc is None else ipc,
        }
        (folder / "attempt.json").write_text(json.dumps(record))
        self.status(attempt_id, pid=os.getpid() if pid is None else pid)
        return folder

    @staticmethod
    def ipc(attempt_id: int, instance_id: int | None = None) -> str:
        return f"sz-{INSTALLATION}-i{attempt_id if instance_id is None else instance_id}-a{attempt_id}"

    def status(self, attempt_id: int, *, pid: int, ended_at: float | None = None) -> None:
        found = procfs.stat(pid)
        record = {
            "guardian_pid": None,
            "engine_pid": pid,
            "engine_start_ticks": found.start_ticks if found else 1,
            "started_at": time.time(),
            "ended_at": ended_at,
            "exit_code": None if ended_at is None else 0,
        }
        draft = self.runs / str(attempt_id) / ".status"
        draft.write_text(json.dumps(record))
        draft.replace(self.runs / str(attempt_id) / "status.json")

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
