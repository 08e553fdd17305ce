"""Processes as ``/proc`` shows them: identity by pid and start ticks, sessions, markers, shared memory, ports.

Standard library only, since the guardian uses it. Every function copes with processes that end while it looks, and with
processes of other users, whose environment and files it cannot read: those are never ours.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_SHARED_MEMORY = re.compile(rb"(/dev/shm/(?:psm_|sem\.mp-|torch_|nccl-|cuda\.shm|vllm_)[^\s/]+)")
_LISTEN = "0A"


class ProcessStat(NamedTuple):
    """The fields of ``/proc/<pid>/stat`` that matter here. ``start_ticks`` since boot: with the pid, an identity."""

    pid: int
    name: str
    state: str
    parent: int
    group: int
    session: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        """A zombie holds no memory and answers nothing: dead for every purpose here."""
        return self.state not in "ZXx"


def read_stat(pid: int) -> ProcessStat | None:
    """None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode("utf-8", "replace")
    except (OSError, ValueError):
        return None
    head, _, tail = text.rpartition(")")  # the name may hold spaces and parentheses itself
    fields = tail.split()
    if len(fields) < 20:
        return None
    return ProcessStat(
        pid=pid,
        name=head.partition("(")[2],
        state=fields[0],
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        start_ticks=int(fields[19]),
    )


def start_ticks(pid: int) -> int | None:
    """Start time in clock ticks since boot; None when the process is gone or a zombie."""
    stat = read_stat(pid)
    return stat.start_ticks if stat and stat.alive else None


def is_alive(pid: int | None, ticks: int | None) -> bool:
    """Whether this very process still runs. A pid alone proves nothing, the kernel gives numbers out again."""
    if not pid or ticks is None:
        return False
    return start_ticks(pid) == ticks


def processes() -> Iterator[ProcessStat]:
    """All processes that are not zombies, except this one."""
    me = os.getpid()
    for name in os.listdir("/proc"):  # noqa: PTH208 - thousands of names, of which most are no processes
        if name.isdecimal() and int(name) != me:
            stat = read_stat(int(name))
            if stat and stat.alive:
                yield stat


def session_members(session: int, since_ticks: int) -> list[ProcessStat]:
    """Living processes of a session (or of the group with that number) that began with, or after, its leader."""
    return [p for p in processes() if session in (p.session, p.group) and p.start_ticks >= since_ticks]


def environment_value(pid: int, name: str) -> str | None:
    """One variable of a process, as it was at exec.

    vLLM's children set their title, and setproctitle may wipe the memory that ``/proc/<pid>/environ`` shows (seen on
    vLLM 0.30 with setproctitle 1.3.8: EngineCore and Worker read as nothing but zeros). So absence proves nothing.
    """
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    wanted = name.encode() + b"="
    for item in data.split(b"\0"):
        if item.startswith(wanted):
            return item[len(wanted) :].decode("utf-8", "replace")
    return None


def working_directory(pid: int) -> str | None:
    try:
        return str(Path(f"/proc/{pid}/cwd").readlink()).removesuffix(" (deleted)")
    except OSError:
        return None


def command_line(pid: int) -> str:
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return data.replace(b"\0", b" ").decode("utf-8", "replace").strip()


def is_resource_tracker(pid: int) -> bool:
    """Python's helper that unlinks shared memory when its clients are gone. Killing it last leaves less behind."""
    return "multiprocessing.resource_tracker" in command_line(pid)


def shared_memory(pids: list[int]) -> dict[str, int]:
    """Files of multiprocessing, torch and NCCL in ``/dev/shm`` that these processes have mapped: path → inode."""
    found: dict[str, int] = {}
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_bytes()
        except OSError:
            continue
        for line in maps.splitlines():
            match = _SHARED_MEMORY.search(line)
            if match and not line.endswith(b"(deleted)"):
                found[match[1].decode("utf-8", "replace")] = int(line.split(None, 5)[4])
    return found


def holders(path: Path) -> list[int]:
    """Processes that have this very file (by device and inode) open or mapped, as far as we may see."""
    try:
        want = path.stat()
    except OSError:
        return []
    device = f"{os.major(want.st_dev):02x}:{os.minor(want.st_dev):02x}".encode()
    mapped = b" ".join((device, str(want.st_ino).encode(), b""))
    found = []
    for process in processes():
        try:
            if mapped in Path(f"/proc/{process.pid}/maps").read_bytes():
                found.append(process.pid)
                continue
            for fd in Path(f"/proc/{process.pid}/fd").iterdir():
                seen = fd.stat()
                if (seen.st_dev, seen.st_ino) == (want.st_dev, want.st_ino):
                    found.append(process.pid)
                    break
        except OSError:
            continue
    return found


def send(pid: int, ticks: int, number: signal.Signals) -> bool:
    """Signal this very process. With a pidfd the number cannot be given to another between check and kill."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    except OSError:  # an old kernel or a sandbox without the call
        if not is_alive(pid, ticks):
            return False
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        return True
    try:
        if not is_alive(pid, ticks):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def listening_inodes(port: int) -> set[int]:
    """Socket inodes that listen on a TCP port of this network namespace, any address."""
    inodes: set[int] = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(int(fields[9]))
    return inodes


def socket_inodes(pid: int) -> set[int]:
    """Inodes of the sockets that a process has open."""
    inodes: set[int] = set()
    try:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = str(fd.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(int(target[8:-1]))
    except OSError:
        return inodes
    return inodes
