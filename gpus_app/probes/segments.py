"""kvcached's segments in /dev/shm: 24 bytes, read without kvcached (which would import torch).

Three little-endian int64: limit, used, prealloc; bytes of one GPU. There is no magic number, so a segment is known by
its name alone, and every other 24-byte file is a stranger. The engine writes under ``flock(LOCK_EX)`` while it holds
its allocator's mutex: whoever keeps the lock stalls allocation. So the file is opened read-only, the lock is asked for
without waiting, and it is held for one read.
"""

from __future__ import annotations

import fcntl
import os
import stat as stat_module
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpus_app.errors import SegmentInvalid, SegmentMissing, SegmentUnreadable
from gpus_app.probes import procfs

SHM = Path("/dev/shm")  # noqa: S108 - where kvcached has them
_LAYOUT = struct.Struct("<qqq")
SIZE = _LAYOUT.size
#: Engines with the management endpoints of kvcached's pull request 324 append one int64 (their safety floor).
SIZE_PR324 = SIZE + 8
#: Seconds to try for the shared lock; the engine holds the exclusive one for microseconds.
LOCK_LIMIT_S = 0.001
LOCK_PAUSE_S = 0.0001


@dataclass(frozen=True, slots=True)
class Segment:
    """One reading. ``locked`` is False when a writer held the lock for too long and the bytes were read without it."""

    name: str
    limit_bytes: int
    used_bytes: int
    prealloc_bytes: int
    inode: int
    mtime: float
    locked: bool = True

    @property
    def valid(self) -> bool:
        """A limit of 0 or less is none: kvcached writes 0 when it finds its file deleted, and strangers write anything.

        The engine ignores such a value, so it must not be shown as a limit, nor divided by.
        """
        return self.limit_bytes > 0 and self.used_bytes >= 0 and self.prealloc_bytes >= 0

    @property
    def footprint_bytes(self) -> int:
        return max(self.used_bytes, 0) + max(self.prealloc_bytes, 0)


def read_segment(name: str, *, folder: Path = SHM) -> Segment:
    """Read one segment by its exact name, in microseconds, never waiting for longer than ``LOCK_LIMIT_S``.

    Raises SegmentMissing, SegmentUnreadable (permission) or SegmentInvalid (not a regular file of 24 bytes).
    """
    path = f"{folder}/{name}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise SegmentMissing(f"There is no segment {name}.") from None
    except PermissionError:
        raise SegmentUnreadable(f"The segment {name} belongs to another user and may not be read.") from None
    except OSError as exc:
        raise SegmentInvalid(f"{name} is not a segment: {exc.strerror}.") from None
    try:
        found = os.fstat(descriptor)
        if not stat_module.S_ISREG(found.st_mode) or found.st_size not in (SIZE, SIZE_PR324):
            raise SegmentInvalid(f"{name} has {found.st_size} bytes and a segment has {SIZE}.")
        locked = _lock(descriptor)
        content = os.pread(descriptor, SIZE, 0)
    finally:
        os.close(descriptor)  # gives the lock back
    if len(content) != SIZE:
        raise SegmentInvalid(f"{name} was cut to {len(content)} bytes while it was read.")
    limit, used, prealloc = _LAYOUT.unpack(content)
    return Segment(name, limit, used, prealloc, found.st_ino, found.st_mtime, locked)


def _lock(descriptor: int) -> bool:
    """Try for the shared lock for a moment; whether it was had."""
    deadline = time.monotonic() + LOCK_LIMIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOCK_PAUSE_S)
        else:
            return True


def list_ours(prefix: str, *, folder: Path = SHM) -> list[str]:
    """Names of files with our prefix and a segment's size, sorted. Content and owner are not looked at."""
    names = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith(prefix):
                    continue
                try:
                    found = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                if stat_module.S_ISREG(found.st_mode) and found.st_size in (SIZE, SIZE_PR324):
                    names.append(entry.name)
    except OSError:
        return []
    return sorted(names)


def owner_alive(name: str, pids: Iterable[int], *, folder: Path = SHM) -> bool:
    """Whether one of these processes has this very file open: kvcached 0.1.6 keeps it open as long as it lives."""
    path = f"{folder}/{name}"
    return any(procfs.opens_file(pid, path) for pid in pids)
