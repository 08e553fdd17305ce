"""kvcached's 24-byte segment in /dev/shm, by hand: three little-endian int64 (limit, used, reserve), bytes per GPU.

The engine takes the file's exclusive lock while it holds its allocator's own lock, so a lock kept here stalls
allocation: it is held for microseconds, never across anything that can wait, and asked for without blocking.
Importing kvcached for this would need torch.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

DIRECTORY = Path("/dev/shm")  # noqa: S108 - kvcached's own, fixed place
SIZE = 24
NUMBERS = struct.Struct("<qqq")
LIMIT = struct.Struct("<q")
#: How long to ask for the lock before giving up; far above what any honest holder needs.
LOCK_PATIENCE_S = 0.1
READ_PATIENCE_S = 0.001
RETRY_S = 0.0002


class Numbers(NamedTuple):
    """The segment's content."""

    limit_bytes: int
    used_bytes: int
    prealloc_bytes: int


class SegmentBusy(OSError):
    """Somebody keeps the segment's lock."""


def segment_name(name: str) -> str:
    """A name as kvcached writes it: letters, digits, ``_`` and ``-``, anything else ``-``, at most 64 characters."""
    return "".join(char if char.isalnum() or char in "_-" else "-" for char in name)[:64]


class Segment:
    """The segment of one pool."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = DIRECTORY / name

    def read(self) -> Numbers | None:
        """The three numbers; None when the file is missing or too short.

        A lock that somebody keeps does not stop a reader: eight aligned bytes are read whole in any case.
        """
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            locked = take_lock(fd, fcntl.LOCK_SH, READ_PATIENCE_S)
            raw = os.pread(fd, SIZE, 0)
            if locked:
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)
        return Numbers(*NUMBERS.unpack(raw)) if len(raw) == SIZE else None

    def write_limit(self, limit_bytes: int, *, used_bytes: int, prealloc_bytes: int) -> bool:
        """Write the limit, and the other two as well where the file was gone; True if it had to be made again.

        Raises ``SegmentBusy``, or ``OSError`` when the file can be neither opened nor made.
        """
        made = False
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            made = True
        try:
            if not take_lock(fd, fcntl.LOCK_EX, LOCK_PATIENCE_S):
                raise SegmentBusy(f"{self.path} is locked by another process")
            if os.fstat(fd).st_size < SIZE:
                os.ftruncate(fd, SIZE)
                made = True
            if made:
                os.pwrite(fd, NUMBERS.pack(limit_bytes, used_bytes, prealloc_bytes), 0)
            else:
                os.pwrite(fd, LIMIT.pack(limit_bytes), 0)
            fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)
        return made


def take_lock(fd: int, kind: int, patience_s: float) -> bool:
    """``flock`` without blocking, asked for again until ``patience_s`` is over."""
    end = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(RETRY_S)
        else:
            return True
