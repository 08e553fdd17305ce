"""Impossible guarantees and reserves are refused with the numbers."""

from __future__ import annotations

import pytest

from gpus_app.errors import ImpossiblePolicy
from gpus_app.policies.base import GIB
from gpus_app.policies.claims import Claim, check_card, check_claim


def test_guarantees_and_weights_that_fit_exactly_are_accepted() -> None:
    check_card(
        80 * GIB, reserve_bytes=10 * GIB, claims=[Claim(name="a", baseline_bytes=30 * GIB, guarantee_bytes=40 * GIB)]
    )


def test_one_byte_too_much_is_refused() -> None:
    claim = Claim(name="a", baseline_bytes=30 * GIB, guarantee_bytes=40 * GIB + 1)
    with pytest.raises(ImpossiblePolicy, match=r"a 30\.0 GiB \+ 40\.0 GiB"):
        check_card(80 * GIB, reserve_bytes=10 * GIB, claims=[claim])


def test_the_floor_counts_where_nothing_is_guaranteed() -> None:
    with pytest.raises(ImpossiblePolicy):
        check_card(10 * GIB, claims=[Claim(name="a", baseline_bytes=9 * GIB, floor_bytes=2 * GIB)])


def test_a_guarantee_below_the_floor_is_refused() -> None:
    with pytest.raises(ImpossiblePolicy, match="below its safety floor"):
        check_claim(Claim(name="a", baseline_bytes=0, guarantee_bytes=GIB, floor_bytes=2 * GIB))
    check_claim(Claim(name="a", baseline_bytes=0, guarantee_bytes=0, floor_bytes=2 * GIB))


@pytest.mark.parametrize(("guarantee", "floor", "word"), [(3, 1, "guarantee"), (0, 3, "safety floor")])
def test_a_maximum_below_what_is_owed_is_refused(guarantee: int, floor: int, word: str) -> None:
    claim = Claim(
        name="a", baseline_bytes=0, guarantee_bytes=guarantee * GIB, floor_bytes=floor * GIB, maximum_bytes=2 * GIB
    )
    with pytest.raises(ImpossiblePolicy, match=f"below its {word}"):
        check_claim(claim)


@pytest.mark.parametrize("reserve", [-1, 80 * GIB, 90 * GIB])
def test_a_reserve_leaves_something_of_the_card(reserve: int) -> None:
    with pytest.raises(ImpossiblePolicy):
        check_card(80 * GIB, reserve_bytes=reserve)
