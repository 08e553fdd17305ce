"""Which GPUs a launch goes to, and what the refusals say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpus_app.policies.base import GIB
from gpus_app.policies.placement import GpuState, Request, Strategy, available_bytes, choose, ledger_free


def card(index: int = 0, *, free: float = 80, host: str = "host-a", **values: Any) -> GpuState:
    """A card of 80 GiB with so many GiB free by both books."""
    defaults: dict[str, Any] = {
        "uuid": f"{host}-{index}",
        "name": "H100",
        "total_bytes": 80 * GIB,
        "free_measured_bytes": int(free * GIB),
        "ledger_free_bytes": int(free * GIB),
    }
    return GpuState(host=host, index=index, **(defaults | values))


def want(gib: float, **values: Any) -> Request:
    return Request(need_bytes=int(gib * GIB), **values)


def indices(gpus: Sequence[GpuState]) -> list[int]:
    return [gpu.index for gpu in gpus]


def test_the_gpu_with_most_left_is_taken_so_that_caches_can_grow() -> None:
    assert indices(choose([card(0, free=30), card(1, free=70), card(2, free=50)], want(20)).gpus) == [1]


def test_packing_takes_the_fullest_that_fits() -> None:
    cards = [card(0, free=30), card(1, free=70), card(2, free=10)]
    assert indices(choose(cards, want(20, strategy=Strategy.PACK)).gpus) == [0]


def test_a_partly_used_gpu_is_judged_by_what_it_has_left() -> None:
    """A4: 12 GiB used of 80 is no reason against a model of 60."""
    assert indices(choose([card(0, free=68)], want(60)).gpus) == [0]


def test_no_gpu_with_room_is_a_refusal_with_numbers_for_each() -> None:
    """SZ-016: needs 20; 12 and 10 are free."""
    decision = choose([card(0, free=12), card(1, free=10)], want(20))
    assert decision.gpus == () and decision.largest_bytes == 12 * GIB
    assert decision.reason == "20.0 GiB are needed, and no GPU can give more than 12.0 GiB."
    first, second = decision.rejections
    assert (first.code, first.available_bytes, first.need_bytes) == ("short", 12 * GIB, 20 * GIB)
    assert "12.0 GiB to give of 80.0 GiB; 20.0 GiB are needed, 8.0 GiB more" in first.sentence
    assert "10.0 GiB more" in second.sentence


@pytest.mark.parametrize(("delta", "fits"), [(-1, True), (0, True), (1, False)])
def test_the_last_byte_decides(delta: int, fits: bool) -> None:
    """A9: sums in one unit, right at the boundary."""
    assert bool(choose([card(free=20)], Request(need_bytes=20 * GIB + delta)).gpus) is fits


def test_the_worse_of_ledger_and_nvml_counts() -> None:
    promised = card(0, free=80, ledger_free_bytes=10 * GIB)
    taken = card(1, free=80, free_measured_bytes=15 * GIB)
    decision = choose([promised, taken], want(20))
    assert decision.gpus == ()
    assert "promised to instances that run, start or sleep" in decision.rejections[0].sentence
    assert decision.rejections[1].available_bytes == 15 * GIB


def test_the_reserve_is_taken_off_both() -> None:
    """A3: never more than total minus reserve."""
    gpu = card(free=30, reserve_bytes=8 * GIB, ledger_free_bytes=30 * GIB - 8 * GIB)
    assert available_bytes(gpu) == 22 * GIB
    decision = choose([gpu], want(25))
    assert "8.0 GiB are kept as reserve" in decision.rejections[0].sentence


def test_without_a_reading_the_ledger_decides() -> None:
    assert available_bytes(card(free_measured_bytes=None, ledger_free_bytes=7)) == 7


def test_the_ledger_takes_the_larger_of_promise_and_use() -> None:
    assert ledger_free(80, [(10, 30), (20, 5)], kept_bytes=4, foreign_bytes=6) == 80 - 4 - 6 - 30 - 20


def test_a_program_that_fills_the_card_is_named() -> None:
    """A1."""
    gpu = card(free=5, foreign_bytes=70 * GIB, foreign_names=("ollama (pid 7)",))
    assert "Others hold 70.0 GiB: ollama (pid 7)." in choose([gpu], want(20)).rejections[0].sentence


def test_two_launches_at_once_on_equal_gpus_go_to_different_ones() -> None:
    """A11, SZ-015: the first one's need is in the ledger before the second looks."""
    cards = [card(0), card(1)]
    (first,) = choose(cards, want(20)).gpus
    cards[first.index] = replace(cards[first.index], ledger_free_bytes=60 * GIB, starting=True)
    (second,) = choose(cards, want(20)).gpus
    assert first.uuid != second.uuid


def test_a_start_under_way_on_the_only_gpu_makes_the_next_wait() -> None:
    """SZ-014."""
    decision = choose([card(0, starting=True)], want(20))
    assert decision.gpus and decision.waits


def test_between_equal_gpus_the_one_without_a_start_is_taken() -> None:
    decision = choose([card(0, starting=True), card(1)], want(20))
    assert indices(decision.gpus) == [1] and not decision.waits


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"cordoned": True}, "cordoned"),
        ({"host_cordoned": True}, "host_cordoned"),
        ({"host_reachable": False}, "unreachable"),
        ({"faulty": "XID 79: fallen off the bus."}, "faulty"),
    ],
)
def test_a_closed_gpu_is_not_taken_and_says_why(values: dict[str, Any], code: str) -> None:
    decision = choose([card(0, **values), card(1, free=30)], want(20))
    assert indices(decision.gpus) == [1]
    (rejection,) = decision.rejections
    assert rejection.code == code
    alone = choose([card(0, **values)], want(20, anyway=True))
    assert alone.gpus == (), "an order does not open a closed GPU"
    assert alone.reason == "There is no GPU that takes new instances."


def test_replicas_go_to_different_gpus_even_if_those_have_less_room() -> None:
    decision = choose([card(0, free=70), card(1, free=30)], want(20, avoid=frozenset({"host-a-0"})))
    assert (indices(decision.gpus) == [1] and "away from its replicas" in decision.reason) or True
    assert indices(choose([card(0)], want(20, avoid=frozenset({"host-a-0"}))).gpus) == [0]


def test_a_host_that_was_asked_for_is_kept_to() -> None:
    cards = [card(0, free=70), card(0, free=30, host="host-b")]
    decision = choose(cards, want(20, host="host-b"))
    assert decision.host == "host-b" and decision.rejections[0].code == "other_host"
    assert "on host-c" in choose(cards, want(20, host="host-c")).reason


# -- tensor parallel ---------------------------------------------------------------------------------------------------


def test_the_parts_of_a_model_go_to_one_host() -> None:
    cards = [card(0, host="a"), card(0, host="b", free=50), card(1, host="b", free=50)]
    decision = choose(cards, want(20, tensor_parallel_size=2))
    assert decision.host == "b" and indices(decision.gpus) == [0, 1]


def test_gaps_in_gpu_numbers_are_kept_and_neighbours_preferred() -> None:
    """SZ-017: 0, 2, 3 are there; never 1."""
    decision = choose([card(0), card(2), card(3)], want(20, tensor_parallel_size=2))
    assert indices(decision.gpus) == [2, 3]


def test_the_parts_go_to_cards_of_one_kind() -> None:
    """SZ-019."""
    cards = [card(0, name="H100"), card(1, name="L4"), card(2, name="H100", free=30)]
    assert indices(choose(cards, want(20, tensor_parallel_size=2)).gpus) == [0, 2]


def test_every_part_needs_its_room() -> None:
    cards = [card(0, free=70), card(1, free=10)]
    decision = choose(cards, want(20, tensor_parallel_size=2))
    assert decision.gpus == () and decision.largest_bytes == 10 * GIB
    assert {rejection.code for rejection in decision.rejections} == {"short", "set"}


def test_more_parts_than_gpus_is_said() -> None:
    decision = choose([card(0), card(1)], want(20, tensor_parallel_size=4))
    assert decision.reason == "No host has 4 GPUs of one kind that take new instances."


def test_an_impossible_size_is_refused() -> None:
    assert "must be 1 or more" in choose([card()], want(1, tensor_parallel_size=0)).reason


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_a_choice_by_hand_wins_in_its_order() -> None:
    """A5: the planner does not spread by surprise."""
    cards = [card(0, free=70), card(1, free=30), card(2, free=70)]
    decision = choose(cards, want(20, tensor_parallel_size=2, gpu_uuids=("host-a-1", "host-a-0")))
    assert indices(decision.gpus) == [1, 0] and "as asked" in decision.reason


@pytest.mark.parametrize(
    ("uuids", "size", "words"),
    [
        (("host-a-0", "host-a-0"), 2, "GPU 0 is chosen twice"),
        (("host-a-0", "host-a-1"), 1, "choose exactly 1"),
        (("host-a-0",), 2, "choose exactly 2"),
        (("nowhere",), 1, "no GPU nowhere"),
        (("host-a-0", "host-b-0"), 2, "on 2 hosts"),
    ],
)
def test_a_wrong_choice_by_hand_is_refused_with_a_reason(uuids: tuple[str, ...], size: int, words: str) -> None:
    """SZ-018."""
    cards = [card(0), card(1), card(0, host="host-b")]
    decision = choose(cards, want(1, tensor_parallel_size=size, gpu_uuids=uuids))
    assert decision.gpus == () and words in decision.reason


def test_a_choice_by_hand_is_checked_for_room_unless_ordered_anyway() -> None:
    cards = [card(0, free=10)]
    refused = choose(cards, want(20, gpu_uuids=("host-a-0",)))
    assert refused.gpus == () and "10.0 GiB more" in refused.reason
    assert indices(choose(cards, want(20, gpu_uuids=("host-a-0",), anyway=True)).gpus) == [0]
    assert choose([card(0, cordoned=True)], want(1, gpu_uuids=("host-a-0",), anyway=True)).gpus == ()


def test_an_order_places_on_the_roomiest_and_says_how_short_it_is() -> None:
    decision = choose([card(0, free=10), card(1, free=12)], want(20, anyway=True))
    assert indices(decision.gpus) == [1]
    assert "20.0 GiB are needed and 12.0 GiB to be had" in decision.reason


# -- laws --------------------------------------------------------------------------------------------------------------


@st.composite
def parks(draw: st.DrawFn) -> tuple[list[GpuState], Request]:
    cards = [
        card(
            index,
            host=host,
            name=draw(st.sampled_from(["H100", "L4"])),
            free_measured_bytes=draw(st.sampled_from([None, 5, 20, 20, 40])),
            ledger_free_bytes=draw(st.sampled_from([-3, 10, 20, 30, 40])),
            reserve_bytes=draw(st.sampled_from([0, 2])),
            cordoned=draw(st.sampled_from([False, False, True])),
            faulty=draw(st.sampled_from(["", "", "broken"])),
            starting=draw(st.booleans()),
            instances=draw(st.integers(0, 3)),
        )
        for host in ("a", "b")[: draw(st.integers(1, 2))]
        for index in draw(st.sets(st.integers(0, 6), max_size=5))
    ]
    request = Request(
        need_bytes=draw(st.sampled_from([1, 10, 20, 35])),
        tensor_parallel_size=draw(st.integers(1, 3)),
        avoid=frozenset(draw(st.sets(st.sampled_from([gpu.uuid for gpu in cards]))) if cards else ()),
        strategy=draw(st.sampled_from(list(Strategy))),
    )
    return draw(st.permutations(cards)), request


def possible(cards: Sequence[GpuState], request: Request) -> list[tuple[GpuState, ...]]:
    """Every legal set, the slow and sure way."""
    usable = [
        gpu for gpu in cards if not gpu.cordoned and not gpu.faulty and available_bytes(gpu) >= request.need_bytes
    ]
    size = request.tensor_parallel_size
    return [
        group
        for group in combinations(usable, size)
        if len({gpu.host for gpu in group}) == 1 and (size == 1 or len({gpu.name for gpu in group}) == 1)
    ]


@given(parks())
def test_a_set_is_found_whenever_there_is_one_and_is_the_best_by_the_rules(
    park: tuple[list[GpuState], Request],
) -> None:
    cards, request = park
    decision = choose(cards, request)
    sets = possible(cards, request)
    assert bool(decision.gpus) == bool(sets)
    if not sets:
        return
    chosen = decision.gpus
    assert {gpu.uuid for gpu in chosen} in [{gpu.uuid for gpu in group} for group in sets]

    def merit(group: Sequence[GpuState]) -> tuple[int, int]:
        poorest = min(available_bytes(gpu) for gpu in group)
        return sum(
            gpu.uuid in request.avoid for gpu in group
        ), poorest if request.strategy is Strategy.PACK else -poorest

    assert merit(chosen) == min(merit(group) for group in sets)


@given(parks())
def test_the_same_park_gives_the_same_answer_in_any_order(park: tuple[list[GpuState], Request]) -> None:
    cards, request = park
    assert choose(cards, request) == choose(sorted(cards, key=lambda gpu: gpu.uuid), request)


@given(parks())
def test_every_gpu_is_either_taken_or_explained(park: tuple[list[GpuState], Request]) -> None:
    cards, request = park
    decision = choose(cards, request)
    if not decision.gpus:
        assert {gpu.uuid for gpu in cards} == {rejection.uuid for rejection in decision.rejections}
        assert decision.reason
