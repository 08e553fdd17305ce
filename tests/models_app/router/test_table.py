"""Snapshots become tables as a whole, or not at all."""

from __future__ import annotations

import time
from typing import Any

import pytest

from models_app.router.table import BadSnapshot, RouteTable, TableSource
from tests.models_app.router.support import key, model, snapshot, table


def instance(**fields: Any) -> dict[str, Any]:
    return {"id": 1, "url": "http://127.0.0.1:8000", "token": "t", "weight": 1, **fields}


def test_lookups() -> None:
    made = table(model("m", aliases=["a", {"name": "b", "defaults": {"top_p": 1}}], instances=[instance()]))
    assert made.models["m"].targets[0].port == 8000
    assert {name: one.choices for name, one in made.names.items()} == dict.fromkeys(["m", "a", "b"], (("m", 1),))
    assert made.names["b"].defaults == {"top_p": 1}
    assert next(iter(made.keys.values())).name == "test"


def test_served_name_wins_over_an_alias_of_the_same_name() -> None:
    made = table(model("m"), model("other", aliases=["m"]))
    assert made.names["m"].choices == (("m", 1),)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"version": 1, "at": 1.0, "models": [{"name": "m"}], "keys": []},
        {"version": 1, "at": 1.0, "models": None, "keys": []},
        snapshot(model("m", status="odd")),
        snapshot(model("m", instances=[instance(url="ftp://127.0.0.1:1")])),
        snapshot(model("m", instances=[instance(url="http://127.0.0.1")])),
        snapshot(model("m", instances=[instance(url="http://127.0.0.1:port")])),
        snapshot(keys=[{"name": "k"}]),
        snapshot(model("m"), routes=[{"name": "r"}]),
    ],
)
def test_bad_snapshot_is_refused_as_a_whole(broken: dict[str, Any]) -> None:
    with pytest.raises(BadSnapshot):
        RouteTable.from_snapshot(broken)


def test_scope_covers_served_names_and_the_names_asked_for() -> None:
    made = next(iter(table(keys=[key(models=["m", "route"])]).keys.values()))
    assert made.may_use("alias", "m")
    assert made.may_use("route", "x")
    assert not made.may_use("x", "x")


def test_age_counts_from_when_the_snapshots_time_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    source = TableSource()
    assert source.age_s() == float("inf")
    source.swap(table(at=time.time() - 30))
    assert 29 < source.age_s() < 32
    now[0] += 10
    assert 39 < source.age_s() < 42
    source.heard(12345.0)  # a clock far behind ours: it moved, so someone is there
    assert source.age_s() == 0.0
    now[0] += 5
    source.heard(12345.0)
    assert source.age_s() == 5.0


def test_listeners_hear_of_a_swap() -> None:
    source, heard = TableSource(), []
    source.listen(heard.append)
    made = table(model("m"))
    source.swap(made)
    assert heard == [made]
