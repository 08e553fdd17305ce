"""kvcached's shared segment: ``/dev/shm/<name>``, 24 bytes, three little-endian int64: limit, used, prealloc.

The engine reads and changes it as kvcached 0.1.6 does: opened by name each time, ``flock`` for the microseconds of a
read or write, never truncated, created again (with a limit of 0) when someone deleted it. Its inode is pinned at
creation so that at the end only the file of this engine is removed, never one that a successor made under the same
name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
from pathlib import Path
from typing import NamedTuple

SHM_FOLDER = Path("/dev/shm")  # noqa: S108 - where kvcached, kvctl and the sampler look
FORMAT = struct.Struct("<qqq")
SIZE = FORMAT.size
#: The pull request's fourth number, ``min_safe_limit``, makes the file 32 bytes; stock ``kvctl list`` then passes it
#: over.
PR324_FORMAT = struct.Struct("<qqqq")
_FORBIDDEN = re.compile(r"[^A-Za-z0-9_-]")
MAX_NAME = 64


class Values(NamedTuple):
    """The three numbers, bytes of one GPU."""

    limit_bytes: int
    used_bytes: int
    prealloc_bytes: int


def sanitized(name: str) -> str:
    """The file name that kvcached makes of ``KVCACHED_IPC_NAME``."""
    return _FORBIDDEN.sub("-", name)[:MAX_NAME]


def default_name(folder: Path = SHM_FOLDER) -> str:
    """kvcached's own choice when nobody named the segment: by process group, counted up while files exist."""
    base = f"kvcached_vLLM_{os.getpgrp()}"
    for suffix in ("", *(f"_{number}" for number in range(1, 100))):
        if not (folder / (base + suffix)).exists():
            return base + suffix
    return base


class Segment:
    """One engine's segment. ``min_safe_limit`` not None: the 32-byte file of pull request 324."""

    def __init__(self, name: str, limit_bytes: int, *, min_safe_limit: int | None = None) -> None:
        self.name = name
        self.path = SHM_FOLDER / name
        self._format = FORMAT if min_safe_limit is None else PR324_FORMAT
        self._extra = () if min_safe_limit is None else (min_safe_limit,)
        descriptor = self._open()
        try:
            # An existing file is overwritten in place: the limit that someone put there before the start is lost.
            os.pwrite(descriptor, self._format.pack(limit_bytes, 0, 0, *self._extra), 0)
        finally:
            self._pinned = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 0)
            # The lock belongs to the open file, which the pinned descriptor keeps: closing alone would not end it.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _open(self) -> int:
        """Open for writing under the exclusive lock, made anew where it is gone. Closing it gives the lock back."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if os.fstat(descriptor).st_size < self._format.size:
            os.ftruncate(descriptor, self._format.size)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor

    def read(self) -> Values | None:
        """The three numbers under the shared lock; None when the file is gone."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            raw = os.pread(descriptor, SIZE, 0)
        finally:
            os.close(descriptor)
        return Values(*FORMAT.unpack(raw)) if len(raw) == SIZE else None

    def write_usage(self, used_bytes: int, prealloc_bytes: int) -> None:
        """What the engine writes at every page event: the last two numbers, the limit untouched."""
        descriptor = self._open()
        try:
            os.pwrite(descriptor, struct.pack("<qq", used_bytes, prealloc_bytes), 8)
        finally:
            os.close(descriptor)

    def write_limit(self, limit_bytes: int) -> None:
        """What every writer of a limit does: the first number only, under the exclusive lock."""
        descriptor = self._open()
        try:
            os.pwrite(descriptor, struct.pack("<q", limit_bytes), 0)
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        """Remove the file when it is still the one that this engine made."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(self._pinned), self.path.stat()):
                self.path.unlink()


class Witness:
    """The API server's hold on the segment: open for reading, to remove the file of an engine that was killed."""

    def __init__(self, name: str) -> None:
        self.path = SHM_FOLDER / name
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._descriptor = -1

    def unlink(self) -> None:
        """Remove the file unless a successor has taken the name."""
        with contextlib.suppress(OSError):
            if self._descriptor >= 0 and os.path.samestat(os.fstat(self._descriptor), self.path.stat()):
                self.path.unlink()
