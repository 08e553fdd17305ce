"""Small fake engines: real processes with vLLM's habits, started under the real guardian."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from models_app.engines.identity import MARKER, ipc_name, tmp_dir
from models_app.engines.process import LaunchRecord, launch
from models_app.engines.spec import Command

T = TypeVar("T")
INSTALLATION = f"{os.getpid() % 0xFFFFFFFF:08x}"

#: A child that, like EngineCore, lives in its parent's session and does not notice its parent's death.
CHILD = """
import subprocess, sys
def child(code="import time; time.sleep(120)", env=None):
    return subprocess.Popen([sys.executable, "-S", "-E", "-c", code], env=env)
"""


def command(code: str, *, attempt_id: int = 1, env: dict[str, str] | None = None, tmp: bool = False) -> Command:
    """A command that runs Python ``code`` as the engine."""
    argv = (sys.executable, "-S", "-E", "-u", "-c", textwrap.dedent(CHILD) + textwrap.dedent(code))
    environment = {"PATH": os.environ["PATH"], MARKER: f"{INSTALLATION}:7:{attempt_id}", **(env or {})}
    if tmp:
        environment["TMPDIR"] = str(tmp_dir(INSTALLATION, attempt_id))
    return Command(argv=argv, env=environment, masked_argv=argv[:1])


def attempt(attempt_id: int = 1) -> dict[str, object]:
    return {
        "installation": INSTALLATION,
        "attempt_id": attempt_id,
        "instance_id": 7,
        "ipc_name": ipc_name(INSTALLATION, 7, attempt_id),
    }


def start(root: Path, code: str, *, attempt_id: int = 1, token: str = "", **more: object) -> LaunchRecord:
    """Launch ``code`` as the engine of an attempt under ``root``."""
    return launch(
        command(code, attempt_id=attempt_id, **more),  # type: ignore[arg-type]
        root / str(attempt_id),
        attempt(attempt_id),
        token=token,
    )


def wait_for(what: Callable[[], T], limit_s: float = 20.0) -> T:
    """Poll until the answer is truthy. The limit means *hangs*, nothing finer."""
    deadline = time.monotonic() + limit_s
    while not (answer := what()):
        assert time.monotonic() < deadline, f"still {answer!r} after {limit_s} s"
        time.sleep(0.02)
    return answer
