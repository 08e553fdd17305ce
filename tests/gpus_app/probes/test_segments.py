"""Segments: 24 bytes by name, read without disturbing the engine; strangers and damage are told apart."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpus_app.errors import SegmentInvalid, SegmentMissing, SegmentUnreadable
from gpus_app.probes import segments
from gpus_app.probes.segments import list_ours, owner_alive, read_segment
from tests.gpus_app.fake_host import write_segment


def test_three_numbers_are_limit_used_and_prealloc(tmp_path: Path) -> None:
    path = write_segment(tmp_path, "sz-x", 134_581_321_728, 117_440_512, 587_202_560)
    found = read_segment("sz-x", folder=tmp_path)
    assert (found.limit_bytes, found.used_bytes, found.prealloc_bytes) == (134_581_321_728, 117_440_512, 587_202_560)
    assert found.footprint_bytes == 117_440_512 + 587_202_560
    assert found.inode == path.stat().st_ino
    assert found.valid and found.locked


def test_a_segment_of_the_pull_request_has_eight_bytes_more(tmp_path: Path) -> None:
    path = write_segment(tmp_path, "sz-x", 10, 2, 3)
    path.write_bytes(path.read_bytes() + b"\0" * 8)
    assert read_segment("sz-x", folder=tmp_path).limit_bytes == 10


@pytest.mark.parametrize("size", [0, 1, 23, 25, 4096])
def test_another_size_is_no_segment(tmp_path: Path, size: int) -> None:
    (tmp_path / "sz-x").write_bytes(b"\1" * size)
    with pytest.raises(SegmentInvalid, match=f"{size} bytes"):
        read_segment("sz-x", folder=tmp_path)


def test_a_missing_segment_is_missing(tmp_path: Path) -> None:
    with pytest.raises(SegmentMissing):
        read_segment("sz-x", folder=tmp_path)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_regular_file_is_no_segment_and_blocks_nobody(tmp_path: Path, make) -> None:
    make(tmp_path / "sz-x")
    with pytest.raises(SegmentInvalid):
        read_segment("sz-x", folder=tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_segment_of_another_user_is_unreadable(tmp_path: Path) -> None:
    write_segment(tmp_path, "sz-x", 1, 1).chmod(0)
    with pytest.raises(SegmentUnreadable):
        read_segment("sz-x", folder=tmp_path)


def test_permission_denied_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(segments.os, "open", refuse)
    with pytest.raises(SegmentUnreadable, match="another user"):
        read_segment("sz-x", folder=tmp_path)


@pytest.mark.parametrize("limit", [0, -1, -(2**62)])
def test_a_limit_of_zero_or_less_is_no_limit(tmp_path: Path, limit: int) -> None:
    """E7: shown as invalid, never divided by."""
    write_segment(tmp_path, "sz-x", limit, 5)
    assert not read_segment("sz-x", folder=tmp_path).valid


def test_negative_use_does_not_make_a_negative_footprint(tmp_path: Path) -> None:
    """E2: a snapshot taken within a resize."""
    write_segment(tmp_path, "sz-x", 100, -5, 7)
    found = read_segment("sz-x", folder=tmp_path)
    assert found.footprint_bytes == 7 and not found.valid


def test_reading_does_not_need_the_lock_for_ever(tmp_path: Path) -> None:
    """C9: someone else keeps the exclusive lock; we read after a millisecond and say that we had no lock."""
    path = write_segment(tmp_path, "sz-x", 100, 5)
    with path.open("rb") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        began = time.monotonic()
        found = read_segment("sz-x", folder=tmp_path)
        assert time.monotonic() - began < 0.5
    assert found.limit_bytes == 100 and not found.locked


def test_a_writer_gets_the_lock_while_we_read_all_the_time(tmp_path: Path) -> None:
    """C9: the engine's exclusive lock is never held up by readers."""
    path = write_segment(tmp_path, "sz-x", 100, 5)
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            read_segment("sz-x", folder=tmp_path)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for _ in range(200):
            with path.open("r+b") as writer:
                fcntl.flock(writer, fcntl.LOCK_EX)
    finally:
        ended.set()
        reader.join()


def test_a_reader_that_is_killed_leaves_no_lock(tmp_path: Path) -> None:
    path = write_segment(tmp_path, "sz-x", 100, 5)
    code = f"""import fcntl, time
file = open({str(path)!r}, "rb")
fcntl.flock(file, fcntl.LOCK_SH)
print("x", flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    child.kill()
    child.wait()
    child.stdout.close()
    with path.open("r+b") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_file_is_never_opened_for_writing(tmp_path: Path) -> None:
    path = write_segment(tmp_path, "sz-x", 100, 5)
    path.chmod(0o444)
    before = path.stat().st_mtime_ns
    read_segment("sz-x", folder=tmp_path)
    assert path.stat().st_mtime_ns == before


def test_strangers_of_24_bytes_are_not_ours(tmp_path: Path) -> None:
    """C6, SZ-084."""
    (tmp_path / "someone-elses").write_bytes(b"x" * 24)
    (tmp_path / "sz-other-i1-a1").write_bytes(b"x" * 24)
    (tmp_path / "sz-ours-big").write_bytes(b"x" * 4096)
    write_segment(tmp_path, "sz-ours-i1-a1", 10, 1)
    assert list_ours("sz-ours-", folder=tmp_path) == ["sz-ours-i1-a1"]


def test_no_folder_means_no_segments(tmp_path: Path) -> None:
    assert list_ours("sz-", folder=tmp_path / "absent") == []


def test_an_owner_has_this_very_file_open(tmp_path: Path) -> None:
    """C12: another file of the same name, made after the owner's was deleted, is not the owner's."""
    path = write_segment(tmp_path, "sz-x", 10, 1)
    with path.open("rb"):
        assert owner_alive("sz-x", [os.getpid()], folder=tmp_path)
        path.unlink()
        write_segment(tmp_path, "sz-x", 10, 1)
        assert not owner_alive("sz-x", [os.getpid()], folder=tmp_path)
    assert not owner_alive("sz-x", [os.getpid(), 2**22 + 1], folder=tmp_path)


def test_reading_needs_neither_kvcached_nor_numpy() -> None:
    """SZ-085: nothing that may be missing from this interpreter."""
    code = """import sys, gpus_app.probes.segments
print([name for name in ("numpy", "torch", "kvcached", "django") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
