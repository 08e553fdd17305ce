"""Adds up the counters of several router processes of one machine, through small files.

Each process rewrites its own file every few seconds; whoever is scraped reads the others'. What a process had counted
stays when it ends (a counter must never fall while the router runs), its gauges do not. The files of an earlier router
are removed by the next one.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import orjson

from models_app.router.metrics import Metrics


class MetricsFiles:
    """``folder/<group>/<pid>.json``; the group is the pid of the parent that all workers of one router share."""

    def __init__(self, folder: Path, *, group: int | None = None, pid: int | None = None) -> None:
        self.group = os.getppid() if group is None else group
        self.pid = os.getpid() if pid is None else pid
        self.folder = folder / str(self.group)
        self._tidy(folder)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def _tidy(self, parent: Path) -> None:
        if not parent.is_dir():
            return
        for entry in parent.iterdir():
            if entry.name.isdigit() and int(entry.name) != self.group and not _alive(int(entry.name)):
                shutil.rmtree(entry, ignore_errors=True)

    def write(self, metrics: Metrics) -> None:
        """Raises OSError when the disk is full or away; counting goes on all the same."""
        path = self.folder / f"{self.pid}.json"
        draft = path.with_suffix(".tmp")
        draft.write_bytes(orjson.dumps(metrics.snapshot()))
        draft.replace(path)

    def others(self, metrics: Metrics) -> list[dict[str, Any]]:
        """Snapshots of the other processes, without the gauges of those that have ended."""
        gauges = {one.name for one in metrics.all() if one.kind == "gauge"}
        found: list[dict[str, Any]] = []
        for path in sorted(self.folder.glob("*.json")):
            if path.stem == str(self.pid) or not path.stem.isdigit():
                continue
            try:
                snapshot = orjson.loads(path.read_bytes())
            except (OSError, orjson.JSONDecodeError):
                continue
            if not isinstance(snapshot, dict):
                continue
            if not _alive(int(path.stem)):
                snapshot = {name: value for name, value in snapshot.items() if name not in gauges}
            found.append(snapshot)
        return found


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
