"""What is on a host although no row claims it: shown with owner and age, ended only when surely ours and unclaimed.

Three kinds of starts are met here. One that its instance claims: none of our business. One of an instance that has
ended or has started anew since: the stale one is ended. One that no row knows (the database was replaced): an orphan,
shown to the operator, ended only when asked, and looked at again at that moment.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from shutil import rmtree
from typing import Any

import orjson
import redis
from django.conf import settings
from django.utils import timezone

from models_app import broker
from models_app.engines import process, rundir
from models_app.engines.identity import Marker, is_tmp_dir, parse_ipc_name
from models_app.engines.process import MarkedProcess
from models_app.errors import Conflict, NotFound
from models_app.models import Instance, LaunchAttempt
from models_app.services.access import this_installation
from models_app.services.audit import audited
from models_app.states import HAS_PROCESS

log = logging.getLogger(__name__)

_SHM, _TMP = Path("/dev/shm"), Path("/tmp")  # noqa: S108
#: kvcached's sockets of one engine lie in a folder of this name, the segment's name and a hash.
_SOCKETS = "kvcached-tp-"
_SHOWN_S = 60


@dataclass(frozen=True)
class Orphan:
    """The living processes of one start that no row knows."""

    host: str
    instance_id: int
    attempt_id: int
    pids: list[int]
    name: str
    started_at: float | None
    served_model_name: str


def _key(host_name: str) -> str:
    return f"sardeenz:orphans:{host_name}"


def marked_starts() -> dict[Marker, list[MarkedProcess]]:
    """Living engine processes of this installation on this machine, by the start they belong to."""
    found: dict[Marker, list[MarkedProcess]] = defaultdict(list)
    for one in process.find_marked(this_installation()):
        found[one.marker].append(one)
    return found


def sweep(host_name: str) -> list[Orphan]:
    """End stale starts, name orphans, remove segments, sockets and folders without owner. Returns the orphans."""
    starts = marked_starts()
    attempts = LaunchAttempt.objects.filter(pk__in=[marker.attempt_id for marker in starts]).select_related("instance")
    known = {attempt.pk: attempt for attempt in attempts}
    orphans = []
    for marker, processes in starts.items():
        attempt = known.get(marker.attempt_id)
        if attempt is None or attempt.instance_id != marker.instance_id:
            orphans.append(_orphan(host_name, marker, processes))
        elif not _claimed(attempt):
            folder = Path(attempt.run_dir)
            log.info("ending what attempt %s left running: %s", attempt.pk, [one.pid for one in processes])
            process.stop_step(folder, limit_s=0.0, marker=marker)
    _sweep_files({marker.attempt_id for marker in starts})
    _show(host_name, orphans)
    return orphans


def _claimed(attempt: LaunchAttempt) -> bool:
    """Whether the start is the newest of an instance that may have a process now."""
    return attempt.instance.attempt_id == attempt.pk and attempt.instance.state in HAS_PROCESS


def _orphan(host_name: str, marker: Marker, processes: Iterable[MarkedProcess]) -> Orphan:
    rows = sorted(processes, key=lambda one: one.start_ticks)
    folder = next((one.run_dir for one in rows if one.run_dir), None)
    status = process.read_status(folder) if folder else None
    attempt = process.read_attempt(folder) if folder else None
    return Orphan(
        host=host_name,
        instance_id=marker.instance_id,
        attempt_id=marker.attempt_id,
        pids=[one.pid for one in rows],
        name=rows[0].name,
        started_at=status.started_at if status else None,
        served_model_name=str((attempt or {}).get("served_model_name", "")),
    )


def _sweep_files(living: set[int]) -> None:
    """Segments, sockets and temporary folders of our own ended starts; those of another installation or program are
    never touched, nor those of a start whose engine may just be coming up."""
    over = named_starts() - living
    if not over:
        return
    rows = LaunchAttempt.objects.filter(pk__in=over).select_related("instance")
    for pk in over - {attempt.pk for attempt in rows if _claimed(attempt)}:
        folder = Path(settings.SARDEENZ_RUN_DIR) / str(pk)
        if folder.is_dir() and process.cleanup(folder):
            log.info("removed what attempt %s left on the machine", pk)


def named_starts() -> set[int]:
    """The starts of this installation after which a file in shared memory or a folder of sockets is named."""
    mine = this_installation()
    names = [path.name for path in _SHM.glob(f"sz-{mine}-i*-a*")]
    names += [path.name.removeprefix(_SOCKETS).rpartition("-")[0] for path in _TMP.glob(f"{_SOCKETS}sz-{mine}-i*-a*-*")]
    found = {marker.attempt_id for name in names if (marker := parse_ipc_name(name))}
    folders = [path for path in _TMP.glob(f"sz-{mine}-*") if is_tmp_dir(path)]
    return found | {int(path.name.rpartition("-")[2]) for path in folders}


def _show(host_name: str, orphans: list[Orphan]) -> None:
    connection = broker.client()
    if connection is None:
        return
    try:
        connection.set(_key(host_name), orjson.dumps([asdict(one) for one in orphans]), ex=_SHOWN_S)
    except (redis.RedisError, OSError) as exc:
        log.warning("orphans of %s not shown: %s", host_name, exc)


def orphans_shown(host_names: Iterable[str]) -> list[Orphan]:
    """What the hosts' last sweeps found; empty when the broker is away."""
    connection = broker.client()
    if connection is None:
        return []
    try:
        values: list[Any] = connection.mget([_key(name) for name in host_names])
    except (redis.RedisError, OSError) as exc:
        log.warning("orphans not read: %s", exc)
        return []
    return [Orphan(**one) for value in values if value for one in orjson.loads(value)]


def orphan_reap(attempt_id: int, *, actor: str, limit_s: float = 5.0) -> list[int]:
    """End an orphan of this host: looked up again now, only of this installation, only if still no row knows it.

    Returns the pids that ended. Raises NotFound when nothing of it lives, Conflict when a row claims it.
    """
    with audited(actor, "orphan.reap", f"attempt {attempt_id}"):
        processes = [one for marker, rows in marked_starts().items() if marker.attempt_id == attempt_id for one in rows]
        if not processes:
            raise NotFound("No process of it lives any more.")
        if LaunchAttempt.objects.filter(pk=attempt_id).exists():
            raise Conflict("An instance claims it: stop that instance instead.")
        left = {one.pid for one in process.end_processes(processes, limit_s=limit_s)}
        folder = next((one.run_dir for one in processes if one.run_dir), None)
        if folder is not None:
            process.cleanup(folder)
        return [one.pid for one in processes if one.pid not in left]


def run_dirs_prune() -> int:
    """Remove run directories of starts that ended RUNS_KEEP_S ago, or that no row knows and nothing lives in."""
    before = timezone.now() - timedelta(seconds=settings.RUNS_KEEP_S)
    folders = {int(path.name): path for path in rundir.run_dirs(Path(settings.SARDEENZ_RUN_DIR))}
    ended = dict(LaunchAttempt.objects.filter(pk__in=folders).values_list("pk", "ended_at"))
    newest = set(Instance.objects.filter(attempt__in=folders).values_list("attempt_id", flat=True))
    removed = 0
    for pk, folder in folders.items():
        if pk in ended:
            at = ended[pk]
            old = at is not None and at < before and pk not in newest
        else:
            old = time.time() - folder.stat().st_mtime > settings.RUNS_KEEP_S
        if old and not process.members(folder):
            process.cleanup(folder)
            rmtree(folder, ignore_errors=True)
            removed += 1
    return removed
