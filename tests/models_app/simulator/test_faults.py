"""Switching faults on and off."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from models_app.simulator.faults import NAMES, Faults, UnknownFault, parse


@pytest.mark.parametrize(
    "given",
    ["slow_load:3, hang", ["slow_load:3", "hang"], {"slow_load": 3, "hang": None}, {"slow_load": "3", "hang": True}],
)
def test_faults_may_be_written_in_several_ways(given: object) -> None:
    assert parse(given) == {"slow_load": "3", "hang": ""}


def test_nothing_is_no_fault() -> None:
    assert parse("") == parse("none") == parse([]) == parse({}) == parse(None) == {}


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownFault, match="unknown fault hnag; known are crash_at, "):
        parse("hnag")


def write(folder: Path, content: str, number: int) -> None:
    path = folder / "faults.json"
    path.write_text(content)
    os.utime(path, ns=(number, number))


def test_file_adds_to_the_environment_and_takes_its_own_back(tmp_path: Path) -> None:
    faults = Faults("stock", tmp_path)
    assert faults.names() == ["stock"]
    write(tmp_path, json.dumps(["hang", "slow_load:2"]), 1)
    assert faults.refresh()
    assert faults.names() == ["hang", "slow_load", "stock"]
    assert faults.number("slow_load", 1.0) == 2.0
    assert not faults.refresh()
    write(tmp_path, "[]", 2)
    assert faults.refresh()
    assert faults.names() == ["stock"]
    write(tmp_path, '"hang"', 3)
    assert faults.refresh()
    (tmp_path / "faults.json").unlink()
    assert faults.refresh()
    assert faults.names() == ["stock"]


@pytest.mark.parametrize("content", ["{", '["hnag"]', "3.5e"])
def test_file_that_makes_no_sense_changes_nothing(tmp_path: Path, content: str) -> None:
    faults = Faults("hang", tmp_path)
    write(tmp_path, content, 5)
    assert not faults.refresh()
    assert faults.names() == ["hang"]


def test_argument_that_is_no_number_counts_as_the_default(tmp_path: Path) -> None:
    assert Faults("slow_load:much").number("slow_load", 1.0) == 1.0


def test_every_fault_is_described() -> None:
    from models_app.simulator import faults

    assert faults.__doc__
    for name in NAMES:
        assert f"``{name}" in faults.__doc__
