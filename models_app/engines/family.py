"""Which processes belong to a start of ours, and which only look like it.

Three signs, because each can fail: the marker in the environment (wiped by setproctitle in vLLM's own children), the
engine's session (its number may be given out again after the end), and the working directory (an operator may stand
in it with a shell). A process is ours by the marker, or by the session together with one more sign. ``tail -f
engine.log``, an editor and a shell in the run directory are never ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from models_app.engines import procfs
from models_app.engines.identity import MARKER, Marker, parse_marker
from models_app.engines.rundir import Status, marker_of, read_status


@dataclass(frozen=True)
class MarkedProcess:
    """A living process of one of our starts. ``name`` is what the kernel calls it (``VLLM::EngineCor``)."""

    pid: int
    start_ticks: int
    marker: Marker
    name: str
    command: str
    session: int
    run_dir: Path | None = None

    @property
    def alive(self) -> bool:
        return procfs.is_alive(self.pid, self.start_ticks)


def members(run_dir: Path, status: Status | None = None, marker: Marker | None = None) -> list[procfs.ProcessStat]:
    """The living processes of one start, children that lost their parent included."""
    status = status or read_status(run_dir)
    marker = marker or marker_of(run_dir)
    session = status.engine_pid if status and status.cleaned_at is None else None
    since = (status.engine_start_ticks or 0) if status else 0
    leader_lives = bool(session) and procfs.is_alive(session, since)
    folder = str(run_dir.resolve())

    def ours(process: procfs.ProcessStat) -> bool:
        if session and session in (process.session, process.group) and process.start_ticks >= since:
            return leader_lives or procfs.working_directory(process.pid) == folder
        return marker is not None and procfs.environment_value(process.pid, MARKER) == str(marker)

    return [process for process in procfs.processes() if ours(process)]


def find_marked(installation: str) -> list[MarkedProcess]:
    """Every living process of this installation's engines on this machine: to adopt, or to end. Guardians excepted.

    Another installation's processes are never returned, nor is anything of other users.
    """
    found = []
    known: dict[str, tuple[Marker, int] | None] = {}
    for process in procfs.processes():
        value = procfs.environment_value(process.pid, MARKER)
        marker = parse_marker(value) if value else None
        folder = procfs.working_directory(process.pid)
        if marker is None and folder:
            if folder not in known:
                known[folder] = _start_in(Path(folder))
            start = known[folder]
            if start and start[1] in (process.session, process.group):
                marker = start[0]
        if marker and marker.installation == installation:
            in_run_dir = folder is not None and marker_of(Path(folder)) == marker
            found.append(
                MarkedProcess(
                    pid=process.pid,
                    start_ticks=process.start_ticks,
                    marker=marker,
                    name=process.name,
                    command=procfs.command_line(process.pid),
                    session=process.session,
                    run_dir=Path(folder) if folder and in_run_dir else None,
                )
            )
    return found


def _start_in(folder: Path) -> tuple[Marker, int] | None:
    """Whose engine, in which session, runs in a directory, when that is a run directory."""
    marker, status = marker_of(folder), read_status(folder)
    return (marker, status.engine_pid) if marker and status and status.engine_pid else None
