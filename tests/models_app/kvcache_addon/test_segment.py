"""Reading and writing kvcached's 24 bytes without standing in the engine's way."""

from __future__ import annotations

import fcntl
import stat
import struct
import time
from pathlib import Path

import pytest

from models_app.kvcache_addon import segment
from models_app.kvcache_addon.segment import Numbers, Segment, SegmentBusy, segment_name


def make(path: Path, *numbers: int) -> Segment:
    (path / "sz-a").write_bytes(struct.pack("<qqq", *numbers))
    return Segment("sz-a")


def test_three_numbers_are_read(shm: Path) -> None:
    assert make(shm, 7, 5, 3).read() == Numbers(7, 5, 3)


@pytest.mark.parametrize("content", [b"", b"x" * 23])
def test_missing_or_short_file_is_none(shm: Path, content: bytes) -> None:
    assert Segment("sz-none").read() is None
    (shm / "sz-short").write_bytes(content)
    assert Segment("sz-short").read() is None


def test_longer_file_of_the_pull_request_is_read_all_the_same(shm: Path) -> None:
    (shm / "sz-b").write_bytes(struct.pack("<qqqq", 7, 5, 3, 1))
    assert Segment("sz-b").read() == Numbers(7, 5, 3)
    Segment("sz-b").write_limit(9, used_bytes=0, prealloc_bytes=0)
    assert struct.unpack("<qqqq", (shm / "sz-b").read_bytes()) == (9, 5, 3, 1)


def test_writing_changes_the_limit_and_nothing_else(shm: Path) -> None:
    mine = make(shm, 7, 5, 3)
    assert mine.write_limit(9, used_bytes=100, prealloc_bytes=100) is False
    assert mine.read() == Numbers(9, 5, 3)


def test_lost_file_is_made_again_whole(shm: Path) -> None:
    mine = Segment("sz-lost")
    assert mine.write_limit(9, used_bytes=5, prealloc_bytes=3) is True
    assert mine.read() == Numbers(9, 5, 3)
    assert stat.S_IMODE((shm / "sz-lost").stat().st_mode) == 0o644


def test_kept_lock_delays_neither_reader_nor_writer_for_long(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C9: nobody may stall the engine's thread."""
    monkeypatch.setattr(segment, "LOCK_PATIENCE_S", 0.02)
    mine = make(shm, 7, 5, 3)
    with (shm / "sz-a").open("rb") as keeper:
        fcntl.flock(keeper, fcntl.LOCK_EX)
        start = time.monotonic()
        assert mine.read() == Numbers(7, 5, 3)
        with pytest.raises(SegmentBusy):
            mine.write_limit(9, used_bytes=0, prealloc_bytes=0)
        assert time.monotonic() - start < 5
    mine.write_limit(9, used_bytes=0, prealloc_bytes=0)
    assert mine.read() == Numbers(9, 5, 3)


def test_no_file_stays_open_or_locked(shm: Path) -> None:
    mine = make(shm, 7, 5, 3)
    before = len(list(Path("/proc/self/fd").iterdir()))
    mine.read()
    mine.write_limit(9, used_bytes=0, prealloc_bytes=0)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    with (shm / "sz-a").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("name", "written"),
    [("sz-0badcafe-i1-a2", "sz-0badcafe-i1-a2"), ("a b/c.d", "a-b-c-d"), ("x" * 80, "x" * 64), ("größe", "größe")],
)
def test_names_are_written_as_kvcached_writes_them(name: str, written: str) -> None:
    """C10."""
    assert segment_name(name) == written
