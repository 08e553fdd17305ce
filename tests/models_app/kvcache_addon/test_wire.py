"""What is a size, a percentage, a flag, and what is not; and how answers look to clients of the pull request."""

from __future__ import annotations

from typing import Any

import pytest

from models_app.kvcache_addon import answers, wire
from models_app.kvcache_addon.wire import Refused

INFINITE = float("inf")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1),
        (4096, 4096),
        (4096.9, 4096),
        ("512m", 512 * 2**20),
        ("3G", 3 * 2**30),
        ("1.5gb", 3 * 2**29),
        (" 7 KB ", 7 * 2**10),
        ("1,000k", 1000 * 2**10),
        ("1_000b", 1000),
    ],
)
def test_plain_sizes_are_bytes(text: Any, size: int) -> None:
    assert wire.parse_size(text) == size


NO_SIZES: list[Any] = ["5GiB", "10TB", "-1G", "G", "", "nan", "inf", "1e3", "0", "0.4", "1 2", "٣G", "9" * 40]
NO_SIZES += [0, -1, float("nan"), INFINITE, 1e30, True, None, [1], {"a": 1}, "99999999999g"]


@pytest.mark.parametrize("value", NO_SIZES)
def test_everything_else_is_refused_with_a_reason(value: Any) -> None:
    with pytest.raises(Refused) as refused:
        wire.parse_size(value)
    assert refused.value.status == 400
    assert refused.value.message


@pytest.mark.parametrize("value", [0, -1, 100.1, True, "50", None, INFINITE, float("nan")])
def test_percentages_outside_0_to_100_are_refused(value: Any) -> None:
    with pytest.raises(Refused):
        wire.parse_percent(value)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"size": "1g", "force": "false"},
        {"size": "1g", "force": 0},
        {"size": "1g", "force": None},
        {"size": "1g", "revision": -1},
        {"size": "1g", "revision": True},
        {"size": "1g", "revision": 1.0},
        {"size": "1g", "revision": 2**60},
        {"size": "1g", "reclaim": "now"},
        {"size": "1g", "by": 7},
        {"size_bytes": "1g"},
        {"size_bytes": 1.5, "size": "1g"},
    ],
)
def test_order_with_one_odd_field_is_refused_whole(body: dict[str, Any]) -> None:
    with pytest.raises(Refused) as refused:
        wire.limit_order(body)
    assert refused.value.status == 400


def test_size_bytes_wins_over_size() -> None:
    assert wire.limit_order({"size": "1g", "size_bytes": 5}).size_bytes == 5


def test_order_carries_all_its_fields() -> None:
    order = wire.limit_order({"size": "2g", "revision": 3, "force": True, "reclaim": "preempt", "by": "ann" * 100})
    assert (order.size_bytes, order.revision, order.force, order.reclaim) == (2 * 2**30, 3, True, "preempt")
    assert len(order.by) == 200
    assert wire.LimitOrder(**order.to_json()) == order


def test_percent_is_of_the_given_total() -> None:
    assert wire.percent_order({"percent": 25}, 1000).size_bytes == 250


@pytest.mark.parametrize("raw", [b"", b"  ", b"[1]", b"{", b"\xff", b'"x"', b"[" * 100_000])
def test_body_that_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(Refused):
        wire.parse_body(raw, required=True)


def test_empty_body_is_fine_where_nothing_is_required() -> None:
    assert wire.parse_body(b"\n", required=False) == {}


def test_trim_with_a_target_also_orders_a_limit() -> None:
    target = wire.trim_order({"target": "1g", "force": True}).target
    assert target is not None
    assert (target.size_bytes, target.force) == (2**30, True)
    assert wire.trim_order({}).target is None


def test_another_engines_segment_is_refused() -> None:
    """F5, C13: the pull request let any engine's port rule over every pool of the host."""
    wire.own_segment({}, "mine")
    wire.own_segment({"ipc_name": "mine"}, "mine")
    for asked in ("other", "", 7, ["mine"]):
        with pytest.raises(Refused) as refused:
            wire.own_segment({"ipc_name": asked}, "mine")
        assert refused.value.status == 404
        assert refused.value.facts["available_segments"] == ["mine"]


@pytest.mark.parametrize("body", [{"level": 3}, {"level": True}, {"level": "1"}, {"level": 0}])
def test_sleep_levels_are_1_and_2(body: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        wire.sleep_level(body)


@pytest.mark.parametrize("tags", [[], ["weights", 1], ["kv"], "weights", {"weights": 1}])
def test_wake_tags_are_a_list_of_known_ones(tags: Any) -> None:
    with pytest.raises(Refused):
        wire.wake_tags({"tags": tags})


def test_wake_tags_may_be_left_out() -> None:
    assert wire.wake_tags({}) is None
    assert wire.wake_tags({"tags": ["kv_cache", "weights", "weights"]}) == ("kv_cache", "weights")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0.00 B"),
        (1023, "1023.00 B"),
        (3 * 2**29, "1.50 GB"),
        (2**42, "4.00 TB"),
        (-2048, "-2.00 KB"),
        (None, "N/A"),
    ],
)
def test_human_sizes_are_those_of_the_pull_request(size: int | None, text: str) -> None:
    assert answers.human(size) == text


def limit_facts(**changed: Any) -> dict[str, Any]:
    facts = {
        "status": "applied",
        "requested_bytes": 100,
        "limit_bytes": 100,
        "effective_limit_bytes": 100,
        "previous_limit_bytes": 300,
        "used_bytes": 40,
        "prealloc_bytes": 10,
        "freed_bytes": 5,
        "overage_bytes": 0,
        "capacity_bytes": 300,
        "bundle_bytes": 10,
        "hard_minimum_bytes": 20,
        "safety_floor_bytes": 30,
        "full_context_floor_bytes": 50,
        "clamped": False,
        "warnings": [],
        "revision": 1,
        "preempted": None,
        "ipc_name": "x",
    }
    return facts | changed


def test_limit_answer_also_speaks_the_pull_requests_names() -> None:
    answer = answers.limit_answer(limit_facts())
    assert (answer["previous_total_size"], answer["new_total_size"], answer["current_used_size"]) == (300, 100, 40)
    assert answer["immediate_reclaim"] is True
    assert answer["new_total_size_human"] == "100.00 B"
    assert "requested_size" not in answer


def test_deferred_limit_is_not_an_immediate_reclaim() -> None:
    answer = answers.limit_answer(limit_facts(status="deferred", overage_bytes=7, clamped=True, requested_bytes=900))
    assert answer["immediate_reclaim"] is False
    assert "7.00 B more" in answer["message"]
    assert answer["requested_size"] == 900


@pytest.mark.parametrize("status", ["applied", "deferred", "starved", "pending"])
def test_each_state_has_its_sentence(status: str) -> None:
    assert answers.limit_message(limit_facts(status=status))


def test_trim_answer_counts_what_was_measured() -> None:
    one = {"status": "applied", "before_bytes": 900, "after_bytes": 100, "limit_bytes": 500, "used_bytes": 100}
    two = one | {"before_bytes": 350, "after_bytes": 120}
    rest = {"prealloc_bytes": 0, "ipc_name": "x"}
    answer = answers.trim_answer(one | rest, two | rest, None)
    assert (answer["freed_bytes"], answer["refilled_bytes"]) == (780, 250)
    assert answer["freed_estimate"] == 780


def test_segment_with_no_limit_has_no_percentage() -> None:
    """E7: total 0 or negative must not divide."""
    facts = {"ipc_name": "x", "limit_bytes": 0, "used_bytes": 5, "prealloc_bytes": 5, "engine": {"tp": 2}}
    answer = answers.status_answer(facts, [])
    assert answer["segments"][0]["usage_percent"] is None
    assert answer["segments"][0]["tp_multiplier"] == 2


def test_status_without_a_pool_has_no_segment() -> None:
    answer = answers.status_answer({"kvcached_active": False, "provider": "none"}, [{"total": 5, "free": 3}])
    assert answer["segments"] == []
    assert (answer["gpu_total_memory"], answer["gpu_free_memory"]) == (5, 3)
