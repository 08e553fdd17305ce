"""Starting an engine of either kind the way a host worker does, and looking at it."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from models_app.engines.base import ENGINES, Command, EngineSpec, LaunchContext
from models_app.engines.causes import Cause, explain
from models_app.engines.client import EngineClient
from models_app.engines.identity import ipc_name, tmp_dir
from models_app.engines.memory_log import MemoryLog, read_memory
from models_app.engines.process import LaunchRecord, Status, free_port, launch, members, read_status
from models_app.engines.progress import LogFollower, head, tail
from models_app.states import Stage

T = TypeVar("T")
#: A start takes 20 to 40 s on two cores, 90 s without compiled bytecode: this limit means *hangs*.
LIMIT_S = 240.0


def wait_for(what: Callable[[], T], limit_s: float = LIMIT_S) -> T:
    deadline = time.monotonic() + limit_s
    while not (answer := what()):
        assert time.monotonic() < deadline, f"still {answer!r} after {limit_s:g} s"
        time.sleep(0.05)
    return answer


@dataclass
class Started:
    """One start: its run directory, port and token."""

    record: LaunchRecord
    port: int
    token: str
    installation: str
    attempt_id: int
    stages: list[Stage] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.record.run_dir

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def client(self) -> EngineClient:
        return EngineClient(self.url, self.token, timeout=60)

    @property
    def tmp(self) -> Path:
        return tmp_dir(self.installation, self.attempt_id)

    def http(self, **more: Any) -> httpx.Client:
        """As the router would speak to it."""
        return httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {self.token}"}, timeout=60, trust_env=False, **more
        )

    def log(self) -> str:
        return "\n".join(tail(self.run_dir, 5000))

    def memory(self) -> MemoryLog:
        return read_memory(head(self.run_dir))

    def status(self) -> Status:
        status = read_status(self.run_dir)
        assert status is not None
        return status

    def wait_ready(self) -> None:
        """Until ``/health`` says 200, noting the stages on the way."""
        follower = LogFollower(self.run_dir)

        def ready() -> bool:
            follower.poll()
            if not self.stages or follower.now.stage is not self.stages[-1]:
                self.stages.append(follower.now.stage)
            assert not self.status().ended, f"ended instead of serving:\n{self.log()[-3000:]}"
            return self.client.health()

        wait_for(ready)
        wait_for(lambda: follower.poll() is None or follower.now.stage is Stage.READY, 20)
        self.stages.append(Stage.READY)

    def wait_line(self, text: str) -> None:
        wait_for(lambda: text in self.log() or self.status().ended)
        assert text in self.log()

    def wait_end(self, limit_s: float = LIMIT_S) -> Status:
        """Until the guardian has recorded the end, and that nothing is left."""
        return wait_for(lambda: (s := self.status()).cleaned_at is not None and s, limit_s)

    def cause(self) -> Cause:
        return explain(self.log(), self.status())

    def nothing_left(self) -> None:
        """No process, no temporary folder, none of the shared memory that was seen."""
        assert members(self.run_dir) == []
        assert not self.tmp.exists()
        assert not Path(f"/dev/shm/{ipc_name(self.installation, 1, self.attempt_id)}").exists()
        assert [name for name in self.status().shared_memory or {} if Path(name).exists()] == []


@dataclass
class Kit:
    """One kind of engine, ready to be started."""

    kind: str
    installation: str
    runs: Path
    models: Path
    vllm_command: str
    sim_dir: Path
    gpu: str | None
    attempts: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def spec(self, **changes: Any) -> EngineSpec:
        spec = EngineSpec(
            model=str(self.models / "tiny"),
            served_model_names=("tiny", "tiny-alias"),
            source="local",
            max_model_len=512,
            dtype="float32",  # bfloat16 needs AMX, which some virtual machines announce and do not have
            enforce_eager=True,
            kvcached=False,
            load_format="dummy",
            extra_args="--max-num-seqs 8",
        )
        return dataclasses.replace(spec, **changes)

    def start(
        self, *, change: Callable[[Command], Command] | None = None, port: int | None = None, **changes: Any
    ) -> Started:
        """Start an engine; ``changes`` go to the spec, ``change`` to the finished command."""
        attempt_id, port, token = next(self.attempts), port or free_port("127.0.0.1"), secrets.token_urlsafe(32)
        spec = self.spec(**changes)
        ctx = LaunchContext(
            installation=self.installation,
            instance_id=1,
            attempt_id=attempt_id,
            run_dir=self.runs / str(attempt_id),
            bind_host="127.0.0.1",
            port=port,
            gpu_uuids=(self.gpu,) if self.gpu else (),
            ipc_name=ipc_name(self.installation, 1, attempt_id),
            vllm_command=self.vllm_command,
            versions={"vllm": "0.30.0"},
            sim={"sim_dir": self.sim_dir, "speed": 20},
        )
        command = ENGINES[self.kind].command(spec, ctx)
        record = launch(
            change(command) if change else command,
            ctx.run_dir,
            {
                "installation": self.installation,
                "attempt_id": attempt_id,
                "instance_id": 1,
                "served_model_name": "tiny",
                "ipc_name": ctx.ipc_name,
                "port": port,
            },
            token=token,
        )
        return Started(record, port, token, self.installation, attempt_id)
