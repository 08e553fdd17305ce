"""The run directory of one launch attempt: its files, and who may write them.

``{SARDEENZ_RUN_DIR}/{attempt_id}/``, mode 0700, kept after the end so that log and record can still be read:

==============  ==========================================  ===========================================================
file            written by                                  holds
==============  ==========================================  ===========================================================
attempt.json    ``process.launch``, before exec             what is started: names, GPUs, port, segment, masked argv
token           ``process.launch``, 0600                    the secret between the engine and us
lock            guardian, held (flock) for its life         nothing
status.json     guardian, replaced at once                  pids with start ticks, how it ended
stop            ``process.terminate``, before any signal    when an end was asked for, and what was sent since
engine.log      guardian; ``.1`` is the older half          stdout and stderr of the engine
addon/          ``process.launch``                          what the engine finds on PYTHONPATH
==============  ==========================================  ===========================================================
"""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from models_app.engines import procfs
from models_app.engines.identity import Marker

SCHEMA = 1
ATTEMPT, TOKEN, LOCK, STATUS, STOP, LOG = "attempt.json", "token", "lock", "status.json", "stop", "engine.log"
ADDON = "addon"


@dataclass(frozen=True)
class Status:
    """The guardian's record. Times are seconds since the epoch; ``cleaned_at``: nothing of the engine lives now."""

    guardian_pid: int
    guardian_start_ticks: int | None
    engine_pid: int | None
    engine_start_ticks: int | None
    started_at: float
    ended_at: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    stop_requested: bool = False
    cleaned_at: float | None = None
    shared_memory: dict[str, int] | None = None

    @property
    def ended(self) -> bool:
        return self.ended_at is not None

    @property
    def engine_alive(self) -> bool:
        """The first process of the engine (the API server) runs."""
        return not self.ended and procfs.is_alive(self.engine_pid, self.engine_start_ticks)

    @property
    def guardian_alive(self) -> bool:
        return procfs.is_alive(self.guardian_pid, self.guardian_start_ticks)

    @property
    def failed(self) -> bool:
        """Ended without having been asked to. vLLM exits with 0 when its engine core dies, so 0 is no excuse."""
        return self.ended and not self.stop_requested


_STATUS_FIELDS = frozenset(f.name for f in fields(Status))


def read_json(path: Path) -> dict[str, Any] | None:
    """None when the file is missing or not (yet) an object."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_private(path: Path, text: str) -> None:
    """Create or replace a file of mode 0600, at once."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
    draft.replace(path)


def read_status(run_dir: Path) -> Status | None:
    """None while the guardian has not written; then the record, also when the engine has ended."""
    value = read_json(run_dir / STATUS)
    if value is None:
        return None
    try:
        return Status(**{key: item for key, item in value.items() if key in _STATUS_FIELDS})
    except TypeError:
        return None


def read_attempt(run_dir: Path) -> dict[str, Any] | None:
    return read_json(run_dir / ATTEMPT)


def read_token(run_dir: Path) -> str:
    """The engine's token; empty when the start had none."""
    try:
        return (run_dir / TOKEN).read_text().strip()
    except OSError:
        return ""


def marker_of(run_dir: Path) -> Marker | None:
    """Whose start this directory holds, by its own ``attempt.json``."""
    attempt = read_attempt(run_dir)
    try:
        return Marker(attempt["installation"], attempt["instance_id"], attempt["attempt_id"]) if attempt else None
    except KeyError:
        return None


def stop_asked(run_dir: Path) -> bool:
    return (run_dir / STOP).exists()


def run_dirs(root: Path) -> list[Path]:
    """All run directories under ``SARDEENZ_RUN_DIR``, oldest attempt first."""
    try:
        found = [path for path in root.iterdir() if path.name.isdecimal() and path.is_dir()]
    except OSError:
        return []
    return sorted(found, key=lambda path: int(path.name))
