"""Start an engine under its guardian, look at it, end it, and leave nothing behind. The door of this room to processes.

What bites, all measured on real vLLM: SIGTERM is ignored while the engine core starts; an open stream keeps the API
server alive after its engine is gone, deaf to SIGTERM and SIGINT; SIGKILL of the API server leaves EngineCore with
all its memory; a dead EngineCore makes the server exit with 0. So an end is: SIGTERM, again every few seconds,
SIGKILL to whoever is left after the limit, and only then is it over.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models_app.engines import procfs, rundir
from models_app.engines.family import MarkedProcess, find_marked, members
from models_app.engines.guardian import EXIT_TAKEN, LOG_NAME, write_json
from models_app.engines.identity import GUARDIAN_MARKER, MARKER, Marker, is_tmp_dir
from models_app.engines.ports import NoFreePort, free_port, is_free, strangers
from models_app.engines.procfs import is_alive
from models_app.engines.rundir import Status, read_attempt, read_status, read_token, stop_asked
from models_app.engines.spec import Command
from models_app.errors import SardeenzError

__all__ = [
    "AlreadyLaunched",
    "LaunchFailed",
    "LaunchRecord",
    "MarkedProcess",
    "NoFreePort",
    "Status",
    "StopProgress",
    "cleanup",
    "end_processes",
    "find_marked",
    "free_port",
    "is_alive",
    "is_free",
    "launch",
    "members",
    "port_is_ours",
    "read_attempt",
    "read_status",
    "read_token",
    "stop_asked",
    "stop_step",
    "terminate",
]

_ROOT = Path(__file__).resolve().parent.parent.parent
_SHM = Path("/dev/shm")  # noqa: S108
#: SIGTERM is repeated: the first one is lost when it meets the start of the engine core.
_AGAIN_S = 3.0
#: uvicorn says this when only clients' open connections keep it; its engine is dead by then, nothing more will be sent.
_ONLY_CONNECTIONS = b"Waiting for connections to close"
#: How long Python's resource tracker may take to unlink shared memory after its clients' death.
_TRACKER_S = 1.5
#: How long after ``attempt.json`` a guardian may be on its way without having written its record.
_COMING_UP_S = 5.0
_LEFTOVERS = "leftovers.json"


class LaunchFailed(SardeenzError):
    """The guardian did not come up, or could not start the engine's program at all."""

    code = "launch_failed"
    status = 500


class AlreadyLaunched(LaunchFailed):
    """This attempt was started before: another worker was first. Nothing was started now."""

    code = "already_launched"
    status = 409


@dataclass(frozen=True)
class LaunchRecord:
    """What runs after a launch. ``engine_pid`` is also the engine's session and process group."""

    run_dir: Path
    guardian_pid: int
    guardian_start_ticks: int | None
    engine_pid: int | None
    engine_start_ticks: int | None
    started_at: float


@dataclass(frozen=True)
class StopProgress:
    """How far an end has got. ``done``: no process of the start lives; ``sent``: the signal sent in this step."""

    done: bool
    asked_s: float
    sent: str = ""
    alive: tuple[int, ...] = ()


def launch(
    command: Command, run_dir: Path, attempt: Mapping[str, Any], *, token: str = "", limit_s: float = 5.0
) -> LaunchRecord:
    """Write the run directory, start guardian and engine, and wait (``limit_s``) until the engine's pid is known.

    An engine that ends at once is no error here: its record says so. Raises AlreadyLaunched when the attempt ran before
    or runs, LaunchFailed when there is no guardian after the limit.
    """
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    run_dir.chmod(0o700)
    if (run_dir / rundir.STATUS).exists():
        raise AlreadyLaunched(f"Attempt {run_dir.name} was started before.")
    if token:
        rundir.write_private(run_dir / rundir.TOKEN, token)
    rundir.write_private(
        run_dir / rundir.ATTEMPT,
        json.dumps({"schema": rundir.SCHEMA, "created_at": time.time(), **attempt, "argv": list(command.masked_argv)}),
    )
    _furnish(command, run_dir)
    env = dict(command.env)
    if MARKER in env:
        env[GUARDIAN_MARKER] = env.pop(MARKER)
    # -S -E: the guardian needs the standard library only, and the engine's PYTHON* variables are not meant for it.
    answer = subprocess.run(
        [sys.executable, "-S", "-E", "-m", "models_app.engines.guardian", str(run_dir), "--", *command.argv],
        env=env,
        cwd=_ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        timeout=max(limit_s, 5.0),
        check=False,
    )
    if answer.returncode == EXIT_TAKEN:
        raise AlreadyLaunched(f"Attempt {run_dir.name} has a guardian already.")
    if answer.returncode != 0:
        detail = answer.stderr.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no output"]
        raise LaunchFailed(f"The guardian ended with {answer.returncode}: {detail[0]}")
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        status = read_status(run_dir)
        if status and (status.engine_pid or status.ended):
            return LaunchRecord(
                run_dir=run_dir,
                guardian_pid=status.guardian_pid,
                guardian_start_ticks=status.guardian_start_ticks,
                engine_pid=status.engine_pid,
                engine_start_ticks=status.engine_start_ticks,
                started_at=status.started_at,
            )
        time.sleep(0.01)
    error = run_dir / "guardian.error"
    raise LaunchFailed(
        f"No engine after {limit_s:g} s: {error.read_text().strip()}"
        if error.exists()
        else f"The guardian of attempt {run_dir.name} started no engine within {limit_s:g} s."
    )


def _furnish(command: Command, run_dir: Path) -> None:
    """The files that the command expects in its run directory, and its own temporary folder."""
    for name, text in command.files.items():
        path = run_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, target in command.links.items():
        path = run_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(target)
    folder = command.env.get("TMPDIR", "")
    if is_tmp_dir(folder):
        _private_folder(Path(folder))


def _private_folder(path: Path) -> None:
    """Make a folder of mode 0700 under /tmp. Its name can be guessed, so one that is not truly ours is refused."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        stat = path.lstat()
        if path.is_symlink() or not path.is_dir() or stat.st_uid != os.getuid():
            raise LaunchFailed(f"{path} exists and belongs to somebody else.") from None
        path.chmod(0o700)


def port_is_ours(run_dir: Path, port: int) -> bool | None:
    """Whether this engine, and nobody else, listens on its port. None: nobody listens (yet)."""
    foreign = strangers(port, [p.pid for p in members(run_dir)])
    return None if foreign is None else not foreign


def stop_step(run_dir: Path, *, limit_s: float, marker: Marker | None = None) -> StopProgress:
    """One short step towards the end; call again until ``done``. Survives the death of whoever called before.

    The first call writes ``stop``, then SIGTERM goes to the engine, again every 3 s; from ``limit_s`` after the first
    call on (0: at once), SIGKILL goes to everything that is left, Python's resource tracker last.

    Without its folder a start has not begun: whoever claimed it was killed before, and there is nothing to end.
    """
    if marker is None and not run_dir.is_dir():
        return StopProgress(done=True, asked_s=0.0)
    asked = _stop_record(run_dir)
    status = read_status(run_dir)
    family = members(run_dir, status, marker)
    now = time.time()
    elapsed = max(0.0, now - float(asked["at"]))
    alive = tuple(p.pid for p in family)
    if not family:
        return StopProgress(done=not _guardian_at_work(run_dir, status, now), asked_s=elapsed)
    leader = next((p for p in family if status and p.pid == status.engine_pid), None)
    # (the leader's identity needs no second look: ``send`` checks the start ticks again)
    if elapsed >= limit_s or (leader and elapsed >= min(_AGAIN_S, limit_s) and _only_connections_left(run_dir, family)):
        return StopProgress(done=False, asked_s=elapsed, sent=_kill(run_dir, family, asked, now), alive=alive)
    told = "term_at" if leader else "orphans_term_at"
    if now - float(asked.get(told, 0.0)) < _AGAIN_S:
        return StopProgress(done=False, asked_s=elapsed, alive=alive)
    targets = [leader] if leader else [p for p in family if not procfs.is_resource_tracker(p.pid)]
    for process in targets:
        procfs.send(process.pid, process.start_ticks, signal.SIGTERM)
    asked[told] = now
    write_json(run_dir / rundir.STOP, asked)
    return StopProgress(done=False, asked_s=elapsed, sent="SIGTERM", alive=alive)


def _guardian_at_work(run_dir: Path, status: Status | None, now: float) -> bool:
    """Whether a guardian may still start something, or is tidying up. The engine is not over before its guardian."""
    if status is not None:
        return status.cleaned_at is None and status.guardian_alive
    attempt = read_attempt(run_dir)
    return attempt is not None and now - float(attempt.get("created_at") or 0.0) < _COMING_UP_S


def _stop_record(run_dir: Path) -> dict[str, Any]:
    """The contents of ``stop``, made when it is not there: when the end was asked for, and what was sent since."""
    path = run_dir / rundir.STOP
    asked = rundir.read_json(path)
    if asked is None or not isinstance(asked.get("at"), int | float):
        asked = {"at": path.stat().st_mtime if path.exists() else time.time()}
        write_json(path, asked)
    return asked


def _only_connections_left(run_dir: Path, family: list[procfs.ProcessStat]) -> bool:
    if len([p for p in family if not procfs.is_resource_tracker(p.pid)]) > 1:
        return False
    try:
        with (run_dir / LOG_NAME).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            return _ONLY_CONNECTIONS in log.read()
    except OSError:
        return False


def _kill(run_dir: Path, family: list[procfs.ProcessStat], asked: dict[str, Any], now: float) -> str:
    """SIGKILL, the resource tracker spared for a moment. What they had in /dev/shm is noted for ``cleanup``."""
    shared = procfs.shared_memory([p.pid for p in family])
    if shared:
        known = rundir.read_json(run_dir / _LEFTOVERS) or {}
        write_json(run_dir / _LEFTOVERS, {**known, **shared})
    trackers = [p for p in family if procfs.is_resource_tracker(p.pid)]
    others = [p for p in family if p not in trackers]
    if others:
        asked["kill_at"] = now
        write_json(run_dir / rundir.STOP, asked)
    elif now - float(asked.get("kill_at", 0.0)) < _TRACKER_S:
        return ""
    for process in others or trackers:
        procfs.send(process.pid, process.start_ticks, signal.SIGKILL)
    return "SIGKILL"


def terminate(run_dir: Path, *, limit_s: float, marker: Marker | None = None, patience_s: float = 10.0) -> StopProgress:
    """End a start and wait for it: at most ``limit_s`` for a graceful end and ``patience_s`` after SIGKILL.

    The answer says ``done=False`` when something lives on even then (a process in uninterruptible sleep in a driver).
    Idempotent; also ends what is left of a start whose guardian or engine died.
    """
    while True:
        progress = stop_step(run_dir, limit_s=limit_s, marker=marker)
        if progress.done or progress.asked_s > limit_s + patience_s:
            break
        time.sleep(0.05 if progress.asked_s < 2 else 0.2)
    deadline = time.monotonic() + 3.0
    while progress.done and time.monotonic() < deadline:
        status = read_status(run_dir)
        if status is None or status.cleaned_at is not None or not status.guardian_alive:
            break
        time.sleep(0.02)
    return progress


def end_processes(processes: Iterable[MarkedProcess], *, limit_s: float = 5.0) -> list[MarkedProcess]:
    """SIGTERM, then SIGKILL after the limit, to what ``find_marked`` found. Returns those that would not go."""
    left = [p for p in processes if p.alive]
    for process in left:
        if not procfs.is_resource_tracker(process.pid):
            procfs.send(process.pid, process.start_ticks, signal.SIGTERM)
    for limit, then_kill in ((limit_s, True), (5.0, False)):
        deadline = time.monotonic() + limit
        while left and time.monotonic() < deadline:
            left = [p for p in left if p.alive]
            time.sleep(0.05)
        if then_kill:
            for process in left:
                procfs.send(process.pid, process.start_ticks, signal.SIGKILL)
    return left


def cleanup(run_dir: Path, *, shm: Path = _SHM, tmp: Path = Path("/tmp")) -> list[str]:  # noqa: S108
    """Remove what a finished start left on the machine: segment, sockets, shared memory, temporary folder.

    Nothing is touched while a process of the start lives, or while any process has a file open: a name may have been
    taken again by somebody else. The run directory itself stays, with log and record. Returns the paths removed.
    """
    attempt, status = read_attempt(run_dir), read_status(run_dir)
    if attempt is None or members(run_dir, status):
        return []
    removed: list[str] = []
    ipc = str(attempt.get("ipc_name") or "")
    if ipc:
        removed += _remove_free(shm / ipc)
        for folder in sorted(tmp.glob(f"kvcached-tp-{ipc}-*")):
            removed += _remove_folder(folder)
    recorded = {**((status.shared_memory if status else None) or {}), **(rundir.read_json(run_dir / _LEFTOVERS) or {})}
    for name, inode in recorded.items():
        removed += _remove_free(Path(name), inode=inode)
    folder = tmp / f"sz-{attempt.get('installation')}-{attempt.get('attempt_id')}"
    if is_tmp_dir(folder) or tmp != Path("/tmp"):  # noqa: S108
        removed += _remove_folder(folder)
    return removed


def _remove_free(path: Path, *, inode: int | None = None) -> list[str]:
    """Unlink a file that nobody has open and that is still the same file."""
    try:
        if (inode is not None and path.lstat().st_ino != inode) or procfs.holders(path):
            return []
        path.unlink()
    except OSError:
        return []
    return [str(path)]


def _remove_folder(path: Path) -> list[str]:
    if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
        return []
    shutil.rmtree(path, ignore_errors=True)
    return [str(path)]
