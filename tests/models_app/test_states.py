from __future__ import annotations

import itertools

import pytest

from models_app.states import HAS_PROCESS, LIVE, OCCUPIES_GPU, ROUTABLE, TERMINAL, TRANSITIONS, InstanceState, can_move

S = InstanceState

#: Written out apart from the table in ``states``, so that a slip there shows.
LEGAL = {
    "pending": "scheduled stopped failed",
    "scheduled": "starting pending stopped failed",
    "starting": "ready stopping sleeping failed",
    "ready": "unreachable draining stopping failed",
    "unreachable": "ready sleeping draining stopping failed",
    "draining": "stopping sleeping ready unreachable failed",
    "sleeping": "starting stopping unreachable failed",
    "stopping": "stopped failed",
    "stopped": "pending",
    "failed": "pending stopped",
}


@pytest.mark.parametrize(("source", "target"), list(itertools.product(S, S)))
def test_every_pair_of_states(source: InstanceState, target: InstanceState) -> None:
    assert can_move(source, target) == (target.value in LEGAL[source.value].split())


def test_every_state_can_be_left_and_reached() -> None:
    reached = set().union(*TRANSITIONS.values())
    assert set(TRANSITIONS) == set(S)
    assert reached == set(S)
    assert all(TRANSITIONS.values())


def test_every_live_state_can_end_in_failed() -> None:
    assert all(S.FAILED in TRANSITIONS[state] for state in LIVE)


def test_only_ready_instances_are_routed_to() -> None:
    assert frozenset({S.READY}) == ROUTABLE


def test_sets_are_consistent() -> None:
    assert not LIVE & TERMINAL
    assert HAS_PROCESS < OCCUPIES_GPU < LIVE
