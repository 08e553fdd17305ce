"""Names of one installation."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from models_app.engines.identity import (
    Marker,
    installation_id,
    ipc_name,
    is_tmp_dir,
    parse_ipc_name,
    parse_marker,
    tmp_dir,
)


def test_installation_gets_one_id_for_good_whoever_asks_first(tmp_path: Path) -> None:
    home = tmp_path / "new" / "home"
    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(lambda _: installation_id(home), range(16)))
    assert len(ids) == 1
    assert re.fullmatch("[0-9a-f]{8}", ids.pop())
    assert [path.name for path in home.iterdir()] == ["installation_id"]


def test_a_spoilt_id_is_refused_since_a_new_one_would_orphan_every_engine(tmp_path: Path) -> None:
    (tmp_path / "installation_id").write_text("???")
    with pytest.raises(ValueError, match="should hold 8 hex characters"):
        installation_id(tmp_path)


def test_segment_name_is_the_same_after_kvcached_s_sanitising() -> None:
    name = ipc_name("0a1b2c3d", 123456, 987654321)
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name)
    assert parse_ipc_name(name) == Marker("0a1b2c3d", 123456, 987654321)
    assert parse_ipc_name("kvcached_vLLM_17") is None


@pytest.mark.parametrize("text", ["", "0a1b2c3d:1", "0a1b2c3d:1:x", "0A1B2C3D:1:2", "0a1b2c3d:1:2:3"])
def test_only_whole_markers_are_read(text: str) -> None:
    assert parse_marker(text) is None
    assert parse_marker(str(Marker("0a1b2c3d", 1, 2))) == Marker("0a1b2c3d", 1, 2)


def test_nothing_but_our_own_form_counts_as_a_temporary_folder() -> None:
    assert is_tmp_dir(tmp_dir("0a1b2c3d", 7))
    for other in ("/tmp", "/", "/tmp/sz-0a1b2c3d-7/x", "/tmp/sz-0a1b2c3d-7/..", "/home/sz-0a1b2c3d-7", ""):
        assert not is_tmp_dir(other)
