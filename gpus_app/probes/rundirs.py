"""Which engines run on this machine, from the run directories that their launches leave (``{root}/{attempt_id}/``).

``attempt.json`` never changes and is read once; ``status.json`` (the guardian's record) is read again when its file is
another. An attempt whose end is recorded is not looked at again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from gpus_app.probes import procfs


@dataclass(slots=True)
class Attempt:
    """One start of an instance, as far as the sampler needs it. ``alive``: its engine process was there at the scan."""

    attempt_id: int
    instance_id: int
    installation: str
    name: str
    replica: int
    engine: str
    address: str
    port: int
    gpu_uuids: tuple[str, ...]
    ipc_name: str
    folder: str = ""
    token: str = field(default="", repr=False)
    guardian_pid: int | None = None
    guardian_start_ticks: int | None = None
    engine_pid: int | None = None
    engine_start_ticks: int | None = None
    ended_at: float | None = None
    alive: bool = False


class RunDirs:
    """All attempts under one root, kept up to date by ``scan``."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._attempts: dict[int, Attempt] = {}
        self._stamps: dict[int, tuple[int, int]] = {}
        self._over: set[int] = set()

    def scan(self) -> list[Attempt]:
        """Attempts whose end is not recorded, and those that ended since the last scan; oldest first."""
        present = set(self._names())
        for gone in self._attempts.keys() - present:
            self._attempts.pop(gone)
            self._stamps.pop(gone, None)
        self._over &= present
        found = []
        for attempt_id in sorted(present - self._over):
            attempt = self._attempts.get(attempt_id) or self._read_attempt(attempt_id)
            if attempt is None:
                continue
            self._attempts[attempt_id] = attempt
            self._refresh(attempt)
            found.append(attempt)
            if attempt.ended_at is not None:
                self._over.add(attempt_id)
        return found

    def get(self, attempt_id: int) -> Attempt | None:
        """An attempt that was seen and whose directory is still there, whether or not it has ended."""
        return self._attempts.get(attempt_id)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._attempts.values())

    def _names(self) -> Iterator[int]:
        try:
            with os.scandir(self._root) as entries:
                for entry in entries:
                    if entry.name.isdecimal():
                        yield int(entry.name)
        except OSError:
            return

    def _read_attempt(self, attempt_id: int) -> Attempt | None:
        """None while the file is not (wholly) there, or is not one of ours."""
        folder = f"{self._root}/{attempt_id}"
        row = _json(f"{folder}/attempt.json")
        if row is None:
            return None
        try:
            return Attempt(
                attempt_id=attempt_id,
                instance_id=int(row["instance_id"]),
                installation=str(row["installation"]),
                name=str(row["served_model_name"]),
                replica=int(row.get("replica_index") or 0),
                engine=str(row.get("engine") or "vllm"),
                address=str(row.get("address") or "127.0.0.1"),
                port=int(row["port"]),
                gpu_uuids=tuple(str(uuid) for uuid in row.get("gpu_uuids") or ()),
                ipc_name=str(row.get("ipc_name") or ""),
                folder=folder,
                token=(procfs.read_bytes(f"{folder}/token") or b"").decode(errors="replace").strip(),
            )
        except (KeyError, TypeError, ValueError):
            return None

    def _refresh(self, attempt: Attempt) -> None:
        path = f"{self._root}/{attempt.attempt_id}/status.json"
        try:
            found = os.stat(path)  # noqa: PTH116
        except OSError:
            attempt.alive = False
            return
        stamp = (found.st_mtime_ns, found.st_ino)
        if self._stamps.get(attempt.attempt_id) != stamp:
            row = _json(path)
            if row is None:
                return
            self._stamps[attempt.attempt_id] = stamp
            attempt.guardian_pid = row.get("guardian_pid")
            attempt.guardian_start_ticks = row.get("guardian_start_ticks")
            attempt.engine_pid = row.get("engine_pid")
            attempt.engine_start_ticks = row.get("engine_start_ticks")
            attempt.ended_at = row.get("ended_at")
        attempt.alive = attempt.ended_at is None and procfs.is_alive(attempt.engine_pid, attempt.engine_start_ticks)


def _json(path: str) -> dict[str, Any] | None:
    content = procfs.read_bytes(path)
    if not content:
        return None
    try:
        row = orjson.loads(content)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
