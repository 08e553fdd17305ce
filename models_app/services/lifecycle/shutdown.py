"""Ending the engines of this machine at once, without workers and without the broker: the end of a demo.

What is wanted stays wanted: instances that ran are started again when Sardeenz is.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings
from django.db import DatabaseError

from models_app import transitions
from models_app.engines import process, rundir
from models_app.models import Instance
from models_app.services.lifecycle.ending import attempt_close
from models_app.services.lifecycle.leftovers import marked_starts, named_starts
from models_app.states import HAS_PROCESS, InstanceState

log = logging.getLogger(__name__)
S = InstanceState

_REASON = "Ended with Sardeenz on this machine; it starts again when Sardeenz does."
_STEP_S = 0.1


@dataclass(frozen=True)
class Ended:
    stopped: int
    left: tuple[int, ...]  # pids that did not end


def engines_stop(*, kind: str | None = None, limit_s: float = 5.0) -> Ended:
    """SIGTERM, SIGKILL after ``limit_s``, to every engine of this installation here; rows are brought in line.

    ``kind``: only engines of that kind (``simulated``). Leaves no process, segment or temporary folder behind.
    """
    folders = [path for path in rundir.run_dirs(Path(settings.SARDEENZ_RUN_DIR)) if _runs(path, kind)]
    left = list(folders)
    alive: set[int] = set()
    deadline = time.monotonic() + limit_s + 15.0
    while left and time.monotonic() < deadline:
        alive = set()
        waiting = []
        for folder in left:
            progress = process.stop_step(folder, limit_s=limit_s)
            if not progress.done:
                waiting.append(folder)
                alive.update(progress.alive)
        left = waiting
        if left:
            time.sleep(_STEP_S)
    for folder in folders:
        if folder not in left:
            process.terminate(folder, limit_s=0.0, patience_s=1.0)  # waits for the guardian's own last write
            process.cleanup(folder)
    _tidy(kind)
    alive.update(_homeless(kind))
    try:
        _rows_end({int(folder.name) for folder in folders if folder not in left})
    except DatabaseError as exc:
        log.warning("engines are ended, but the database could not be told: %s", exc)
    return Ended(len(folders) - len(left), tuple(sorted(alive)))


def _runs(folder: Path, kind: str | None) -> bool:
    attempt, status = process.read_attempt(folder), process.read_status(folder)
    if attempt is None or (kind is not None and attempt.get("engine") != kind):
        return False
    return status is None or not status.ended or bool(process.members(folder, status))


def _tidy(kind: str | None) -> None:
    """What starts left that had ended before, killed a moment ago perhaps: no worker will come by to remove it."""
    for attempt_id in named_starts():
        folder = Path(settings.SARDEENZ_RUN_DIR) / str(attempt_id)
        attempt = process.read_attempt(folder)
        if attempt is not None and kind in (None, attempt.get("engine")):
            process.cleanup(folder)


def _homeless(kind: str | None) -> set[int]:
    """End processes with our marker whose run directory is gone; their kind cannot be told, so only when all go."""
    if kind is not None:
        return set()
    rows = [one for starts in marked_starts().values() for one in starts]
    return {one.pid for one in process.end_processes(rows)}


def _rows_end(attempt_ids: set[int]) -> None:
    """Instances whose start has ended: stopping, then stopped, as after any stop. ``desired_state`` stays."""
    rows = Instance.objects.filter(host__name=settings.SARDEENZ_HOST_NAME, state__in=HAS_PROCESS)
    for row in rows.select_related("attempt"):
        if row.attempt_id not in attempt_ids:
            continue
        state = S(row.state)
        if state is S.STOPPING or transitions.move(row.pk, S.STOPPING, expected=state, reason=_REASON):
            status = process.read_status(Path(row.attempt.run_dir)) if row.attempt else None
            attempt_close(row.attempt, status)
            transitions.move(
                row.pk, S.STOPPED, expected=S.STOPPING, reason=_REASON, port=None, reserved_bytes=0, stop_force=False
            )
