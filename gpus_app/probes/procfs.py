"""Facts of processes from /proc: when they started, whose child they are, which instance they belong to."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

#: Every engine process carries it: ``{installation}:{instance_id}:{attempt_id}``.
MARKER = b"SARDEENZ_INSTANCE="
_MARKER_VALUE = re.compile(rb"([0-9a-f]{8}):(\d+):(\d+)")


class Stat(NamedTuple):
    """The parts of ``/proc/<pid>/stat`` that tell one process from another."""

    state: str
    parent: int
    session: int
    start_ticks: int


class Marker(NamedTuple):
    """Which start of which instance a process belongs to."""

    installation: str
    instance_id: int
    attempt_id: int


def read_bytes(path: str) -> bytes | None:
    """A whole small file of /proc; None when it cannot be read. Cheaper than pathlib, and called often."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        chunks = []
        while chunk := os.read(descriptor, 65536):
            chunks.append(chunk)
        return b"".join(chunks)
    except OSError:  # the process went while we read
        return None
    finally:
        os.close(descriptor)


def stat(pid: int) -> Stat | None:
    """None when the process is gone; zombies count as gone, since they hold no memory."""
    text = read_bytes(f"/proc/{pid}/stat")
    if not text:
        return None
    fields = text[text.rindex(b")") + 2 :].split(None, 20)
    state = fields[0].decode()
    if state in "ZX":
        return None
    return Stat(state, int(fields[1]), int(fields[3]), int(fields[19]))


def is_alive(pid: int | None, start_ticks: int | None) -> bool:
    """Whether this very process lives: pids are used again, start ticks are not."""
    if pid is None:
        return False
    found = stat(pid)
    return found is not None and (start_ticks is None or found.start_ticks == start_ticks)


def marker(pid: int) -> Marker | None:
    """The instance that the process was started for, from its environment. None when it has none or is not ours."""
    environment = read_bytes(f"/proc/{pid}/environ")
    if not environment:
        return None
    for entry in environment.split(b"\0"):
        if entry.startswith(MARKER):
            match = _MARKER_VALUE.fullmatch(entry[len(MARKER) :])
            return Marker(match[1].decode(), int(match[2]), int(match[3])) if match else None
    return None


def working_folder(pid: int) -> str:
    """Where the process stands; empty when that cannot be told."""
    try:
        return os.readlink(f"/proc/{pid}/cwd")  # noqa: PTH115
    except OSError:
        return ""


def command_name(pid: int) -> str:
    """The process's title or command, for people; empty when it is gone or belongs to someone else."""
    title = (read_bytes(f"/proc/{pid}/cmdline") or b"").split(b"\0", 1)[0].strip()
    name = title.rsplit(b"/", 1)[-1] if title.startswith(b"/") else title
    return (name or (read_bytes(f"/proc/{pid}/comm") or b"").strip()).decode(errors="replace")[:80]


def opens_file(pid: int, path: str) -> bool:
    """Whether the process has the file at ``path`` open: this inode, not a deleted one of the same name."""
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - names alone, no Path objects
            try:
                if os.readlink(f"/proc/{pid}/fd/{name}") == path:  # noqa: PTH115
                    return True
            except OSError:
                continue
    except OSError:
        return False
    return False


def memory_info() -> tuple[int, int]:
    """Total and available bytes of the machine's RAM; zeros where /proc does not say."""
    values = {}
    for line in (read_bytes("/proc/meminfo") or b"").splitlines():
        name, _, rest = line.partition(b":")
        if name in (b"MemTotal", b"MemAvailable"):
            values[name] = int(rest.split()[0]) * 1024
    return values.get(b"MemTotal", 0), values.get(b"MemAvailable", 0)


def shared_memory_room(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Total and free bytes of ``/dev/shm``, where kvcached's segments and vLLM's queues lie; zeros without it."""
    try:
        room = os.statvfs(path)
    except OSError:
        return 0, 0
    return room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize


def boot_id() -> str:
    """Changes with every boot of the machine."""
    return (read_bytes("/proc/sys/kernel/random/boot_id") or b"").decode().strip()
