"""Means over 10 and 60 seconds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from gpus_app.sampler.rollups import RollUps
from tests.gpus_app.sampler.records import GIB, gpu_part, instance_part, record

START = 1_800_000_000  # a whole minute


def test_a_span_is_given_out_when_it_is_over() -> None:
    rollups = RollUps()
    for second in range(10):
        assert rollups.add(record(START + second, gpu_part(used=second * GIB, util=float(second)))) == []
    (row,) = rollups.add(record(START + 10))
    assert (row.uuid, row.resolution_s, row.at) == ("GPU-a", 10, datetime.fromtimestamp(START, UTC))
    assert row.used_bytes == round(4.5 * GIB) and row.utilization_percent == 4.5


def test_a_minute_has_six_tens_and_one_sixty() -> None:
    rollups = RollUps()
    rows = [row for second in range(61) for row in rollups.add(record(START + second))]
    assert sorted(row.resolution_s for row in rows) == [10] * 6 + [60]


def test_an_instance_has_its_means_and_its_last_limit() -> None:
    rollups = RollUps()
    rollups.add(record(START, gpu_part(instances=[instance_part(used=2 * GIB, limit=8 * GIB)])))
    rollups.add(record(START + 1, gpu_part(instances=[instance_part(used=4 * GIB, limit=6 * GIB)])))
    (row,) = rollups.add(record(START + 10))
    assert row.instances == [
        {
            "id": 1,
            "name": "qwen",
            "replica": 0,
            "limit": 6 * GIB,
            "busy": True,
            "baseline": 3 * GIB,
            "used": 3 * GIB,
            "prealloc": GIB,
        }
    ]


@pytest.mark.parametrize(
    ("seconds", "busy"),
    [
        ([{}, {}], False),
        ([{"waiting": 1}, {}], True),
        ([{"running": None, "waiting": None}, {}], True),
        ([{"gen_tokens": 10}, {"gen_tokens": 12}], True),
        ([{"gen_tokens": 10}, {"gen_tokens": 10}], False),
    ],
)
def test_a_span_is_idle_when_nothing_was_asked_in_all_of_it(seconds: list[dict[str, Any]], busy: bool) -> None:
    """What came and went between two readings shows in its tokens; who does not tell is not taken for idle."""
    rollups = RollUps()
    for second, values in enumerate(seconds):
        part = instance_part(**({"running": 0} | values))
        rollups.add(record(START + second, gpu_part(instances=[part])))
    (row,) = rollups.add(record(START + 10))
    assert row.instances[0]["busy"] is busy


def test_what_is_not_known_is_left_out_of_the_mean() -> None:
    rollups = RollUps()
    rollups.add(record(START, gpu_part(util=None, instances=[instance_part(used=None, baseline=None)])))
    rollups.add(record(START + 1, gpu_part(util=30.0, instances=[instance_part(used=GIB, baseline=None)])))
    (row,) = rollups.add(record(START + 10))
    assert row.utilization_percent == 30.0
    assert (row.instances[0]["used"], row.instances[0]["baseline"]) == (GIB, None)


def test_seconds_in_error_do_not_count_as_an_empty_card() -> None:
    rollups = RollUps()
    rollups.add(record(START, gpu_part(used=4 * GIB)))
    rollups.add(record(START + 1, gpu_part(used=0, error="NVML: Unknown Error.")))
    (row,) = rollups.add(record(START + 10))
    assert row.used_bytes == 4 * GIB


def test_a_card_in_error_throughout_has_no_row() -> None:
    rollups = RollUps()
    rollups.add(record(START, gpu_part(error="lost")))
    assert rollups.add(record(START + 10)) == []


def test_a_new_start_of_an_instance_is_another_share() -> None:
    rollups = RollUps()
    rollups.add(record(START, gpu_part(instances=[instance_part(ipc="a1")])))
    rollups.add(record(START + 1, gpu_part(instances=[instance_part(ipc="a2")])))
    (row,) = rollups.add(record(START + 10))
    assert len(row.instances) == 2


def test_a_gap_ends_the_span_before_it() -> None:
    rollups = RollUps()
    rollups.add(record(START))
    rows = rollups.add(record(START + 3600))
    assert {row.at for row in rows} == {datetime.fromtimestamp(START, UTC)}


def test_the_end_gives_out_what_there_is() -> None:
    rollups = RollUps()
    rollups.add(record(START))
    assert sorted(row.resolution_s for row in rollups.flush()) == [10, 60]
    assert rollups.flush() == []
