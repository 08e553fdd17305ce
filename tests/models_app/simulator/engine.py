"""A simulated engine as a real process, for tests: started on a free port, watched, and never left behind."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from gpus_app.probes.sim_ledger import GIB, Ledger, ensure_gpus, start_ticks
from models_app.simulator.elastic import sockets_folder

ROOT = Path(__file__).parents[3]
TOKEN = "test-token"
#: Generous: means *hangs*, on a machine that does a hundred other things.
PATIENCE_S = 40.0
MODEL = "Qwen/Qwen3-0.6B"
FACTS = {
    "architecture": "Qwen3ForCausalLM",
    "num_layers": 28,
    "num_kv_heads": 8,
    "head_dim": 128,
    "hidden_size": 1024,
    "vocab_size": 151_936,
    "max_position_embeddings": 40960,
    "weights_bytes": 1_200_000_000,
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
    """The first true value of ``condition``; fails when there is none in time."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"still {value!r} after {patience_s:g} s")
        time.sleep(0.02)
    return value


class Engine:
    """One ``python -m models_app.simulator serve``."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        model: str = MODEL,
        name: str = "tiny",
        speed: float = 100.0,
        gpus: int = 1,
        gpu_bytes: int = 80 * GIB,
        sim_dir: Path | None = None,
        port: int | None = None,
        ipc_name: str | None = None,
        kvcached: bool = True,
        faults: str = "",
        facts: dict[str, Any] | None = FACTS,
        vllm: str = "0.30.0",
        token: bool = True,
        env: dict[str, str] | None = None,
    ) -> None:
        self.run_dir = folder / f"run-{uuid.uuid4().hex[:8]}"
        self.run_dir.mkdir(parents=True)
        self.sim_dir = sim_dir or folder / "gpus"
        self.cards = ensure_gpus(self.sim_dir, gpus, gpu_bytes, "test-host")
        self.port = port or free_port()
        self.ipc_name = ipc_name or f"sztest-{uuid.uuid4().hex[:12]}"
        self.segment = Path("/dev/shm") / self.ipc_name
        (self.run_dir / "token").write_text(TOKEN)
        self.log_path = self.run_dir / "engine.log"
        self.argv = [sys.executable, "-m", "models_app.simulator", "serve", model]
        self.argv += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(self.port), *arguments]
        self.env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "error",
            "SARDEENZ_SIM_DIR": str(self.sim_dir),
            "SARDEENZ_SIM_SPEED": str(speed),
            "SARDEENZ_SIM_FAULTS": faults,
            "SARDEENZ_SIM_VLLM_VERSION": vllm,
            "SARDEENZ_SIM_ORPHAN_S": "60",
            "SARDEENZ_ATTEMPT_DIR": str(self.run_dir),
            "CUDA_VISIBLE_DEVICES": ",".join(card.uuid for card in self.cards),
            **({"SARDEENZ_ENGINE_TOKEN_FILE": str(self.run_dir / "token")} if token else {}),
            **({"SARDEENZ_SIM_FACTS": json.dumps(facts)} if facts else {}),
            **({"ENABLE_KVCACHED": "true", "KVCACHED_IPC_NAME": self.ipc_name} if kvcached else {}),
            **({"VLLM_USE_V2_MODEL_RUNNER": "0"} if vllm < "0.28" else {}),
            **(env or {}),
        }
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=PATIENCE_S,
            verify=certificates(),
            trust_env=False,
        )
        self.process: subprocess.Popen[bytes] | None = None
        self._known: set[int] = set()

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self) -> Engine:
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv, cwd="/", env=self.env, stdout=log, stderr=log, start_new_session=True
            )
        return self

    def ready(self) -> Engine:
        """Start and wait for ``/health`` 200."""
        self.start()
        eventually(lambda: self.health() == 200 or self.returncode is not None)
        assert self.returncode is None, self.log()
        self._known.update(self.pids())
        return self

    @property
    def pid(self) -> int:
        assert self.process
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        assert self.process
        return self.process.poll()

    def ended(self) -> int:
        """The exit code, once there is one."""
        eventually(lambda: self.returncode is not None)
        return self.returncode  # type: ignore[return-value]

    def pids(self) -> list[int]:
        """The living processes of the engine's session."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split() if entry.name.isdigit() else []
                if fields and int(fields[3]) == self.pid and fields[0] != "Z":
                    found.append(int(entry.name))
        return sorted(found)

    @property
    def core_pid(self) -> int:
        return next(pid for pid in self.pids() if pid != self.pid)

    def stop(self) -> None:
        """End whatever is left, by pid, and remove what a killed engine leaves."""
        if self.process:
            left = set(self.pids()) | {pid for pid in self._known if self._is_ours(pid)}
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait(PATIENCE_S)
            eventually(lambda: not self.pids())
        self.http.close()
        self.segment.unlink(missing_ok=True)
        shutil.rmtree(sockets_folder(self.ipc_name), ignore_errors=True)

    def _is_ours(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return str(self.run_dir).encode() in Path(f"/proc/{pid}/environ").read_bytes()
        return False

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    # -- looking -------------------------------------------------------------------------------------------------

    def health(self) -> int | None:
        """The status of ``/health``; None when nothing listens."""
        try:
            return self.http.get("/health").status_code
        except httpx.TransportError:
            return None

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def wait_log(self, pattern: str) -> re.Match[str]:
        return eventually(lambda: re.search(pattern, self.log()))  # type: ignore[no-any-return]

    def numbers(self) -> tuple[int, int, int]:
        return struct.unpack("<qqq", self.segment.read_bytes()[:24])

    def write_limit(self, size: int) -> None:
        """A stranger's limit: the first eight bytes."""
        with self.segment.open("r+b") as file:
            file.write(struct.pack("<q", size))

    @property
    def footprint(self) -> int:
        _, used, prealloc = self.numbers()
        return used + prealloc

    def resident(self) -> int:
        """Bytes on the first card, of the engine's processes, as NVML would say."""
        holders = Ledger(self.sim_dir).read()[self.cards[0].uuid]
        mine = {self.pid, *self.pids(), *self._known}
        return sum(row.bytes for row in holders if row.pid in mine)

    def metric(self, name: str, **labels: str) -> float:
        for line in self.http.get("/metrics").text.splitlines():
            shown = all(f'{key}="{value}"' in line for key, value in labels.items())
            if line.startswith(f"vllm:{name}{{") and shown:
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no metric {name}")

    # -- using ---------------------------------------------------------------------------------------------------

    def kv(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """A ``/kvcache`` call that must succeed."""
        answer = self.http.get(f"/kvcache/{path}") if body is None else self.http.post(f"/kvcache/{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def complete(self, prompt: str = "hello", **body: Any) -> dict[str, Any]:
        answer = self.http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()  # type: ignore[no-any-return]

    def stream(self, prompt: str | list[int] = "hello", **body: Any) -> Stream:
        """Begin a streamed completion in a thread of its own."""
        return Stream(self, {"model": "tiny", "prompt": prompt, "stream": True, **body})

    def set_faults(self, faults: Any) -> None:
        temporary = self.run_dir / "faults.tmp"
        temporary.write_text(json.dumps(faults))
        temporary.replace(self.run_dir / "faults.json")


@functools.cache
def certificates() -> ssl.SSLContext:
    """One for all clients: each would spend 30 ms on reading its own."""
    return httpx.create_ssl_context()


class Stream(threading.Thread):
    """A client that reads a stream to its end, or until ``hang_up``."""

    def __init__(self, engine: Engine, body: dict[str, Any], path: str = "/v1/completions") -> None:
        super().__init__(daemon=True)
        self.text = ""
        self.reasons: list[str] = []
        self.events = 0
        self.done = False
        self.error: Exception | None = None
        self._url = f"http://127.0.0.1:{engine.port}{path}"
        self._body = body
        self._leave = threading.Event()
        self.start()

    def run(self) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        try:
            with httpx.Client(timeout=PATIENCE_S, verify=certificates(), trust_env=False, headers=headers) as client:
                self._read(client)
        except httpx.HTTPError as error:
            self.error = error

    def _read(self, client: httpx.Client) -> None:
        with client.stream("POST", self._url, json=self._body) as answer:
            for line in answer.iter_lines():
                if self._leave.is_set():
                    return
                if line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    self.events += 1
                    for choice in json.loads(line[6:]).get("choices", ()):
                        self.text += choice.get("text") or ""
                        if choice.get("finish_reason"):
                            self.reasons.append(choice["finish_reason"])

    def hang_up(self) -> None:
        """Leave at the next piece; the connection is closed."""
        self._leave.set()

    def finished(self) -> Stream:
        self.join(PATIENCE_S)
        assert not self.is_alive(), "the stream hangs"
        assert self.error is None, self.error
        return self


@contextlib.contextmanager
def running(folder: Path, *arguments: str, **options: Any) -> Iterator[Engine]:
    """An engine that is ready, ended afterwards."""
    with Engine(folder, *arguments, **options) as engine:
        yield engine.ready()


def alive(pid: int) -> bool:
    return start_ticks(pid) is not None
