"""The 24-byte segment, as kvcached's own code handles it."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import uuid
from pathlib import Path

import pytest

from models_app.simulator.segment import SHM_FOLDER, Segment, Values, Witness, sanitized


@pytest.fixture
def name():
    name = f"sztest-{uuid.uuid4().hex[:12]}"
    yield name
    (SHM_FOLDER / name).unlink(missing_ok=True)


def numbers(name: str) -> tuple[int, ...]:
    return struct.unpack("<qqq", (SHM_FOLDER / name).read_bytes())


def test_segment_is_24_bytes_with_mode_0644(name: str) -> None:
    before = os.umask(0o022)
    try:
        Segment(name, 134_581_321_728).write_usage(117_440_512, 587_202_560)
    finally:
        os.umask(before)
    info = (SHM_FOLDER / name).stat()
    assert info.st_size == 24
    assert stat.S_IMODE(info.st_mode) == 0o644
    assert numbers(name) == (134_581_321_728, 117_440_512, 587_202_560)


def test_start_overwrites_a_limit_that_was_put_there_before(name: str) -> None:
    (SHM_FOLDER / name).write_bytes(struct.pack("<qqq", 5, 6, 7))
    Segment(name, 1000)
    assert numbers(name) == (1000, 0, 0)


def test_no_lock_is_kept_between_writes(name: str) -> None:
    segment = Segment(name, 1000)
    segment.write_usage(1, 2)
    with (SHM_FOLDER / name).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_usage_leaves_a_strangers_limit_alone(name: str) -> None:
    segment = Segment(name, 1000)
    with (SHM_FOLDER / name).open("r+b") as file:
        file.write(struct.pack("<q", 555))
    segment.write_usage(10, 20)
    assert segment.read() == Values(555, 10, 20)


def test_deleted_segment_comes_back_with_limit_0_at_the_next_page_event(name: str) -> None:
    segment = Segment(name, 1000)
    (SHM_FOLDER / name).unlink()
    assert segment.read() is None
    segment.write_usage(10, 20)
    assert numbers(name) == (0, 10, 20)


def test_owner_keeps_the_inode_open(name: str) -> None:
    segment = Segment(name, 1000)
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except OSError:
            continue
    assert links.count(f"/dev/shm/{name}") == 1
    segment.unlink()
    assert not (SHM_FOLDER / name).exists()


def test_file_of_a_successor_is_not_removed(name: str) -> None:
    segment = Segment(name, 1000)
    witness = Witness(name)
    (SHM_FOLDER / name).unlink()
    Segment(name, 2000)
    segment.unlink()
    witness.unlink()
    assert numbers(name)[0] == 2000


def test_witness_removes_the_file_of_a_killed_engine(name: str) -> None:
    Segment(name, 1000)
    Witness(name).unlink()
    assert not (SHM_FOLDER / name).exists()


def test_pull_request_324_has_a_fourth_number(name: str) -> None:
    segment = Segment(name, 1000, min_safe_limit=77)
    segment.write_usage(1, 2)
    assert struct.unpack("<qqqq", (SHM_FOLDER / name).read_bytes()) == (1000, 1, 2, 77)
    assert segment.read() == Values(1000, 1, 2)


def test_names_are_made_safe_as_kvcached_does() -> None:
    assert sanitized("a b/c.d_e-f") == "a-b-c-d_e-f"
    assert len(sanitized("x" * 80)) == 64
