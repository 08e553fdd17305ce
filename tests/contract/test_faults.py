"""The invariants of the fault-injection suite over a real vLLM: whatever is killed, everything is right again soon.

A few kills, for time's sake; ``make test-faults CAST=vllm KILLS=20`` does as many as are asked for.
"""

from __future__ import annotations

import pytest

from tests.faults.test_random_faults import play

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.faults]


def test_invariants_hold_after_kills_of_everything_around_a_real_engine() -> None:
    play("--cast", "vllm", "--seed", "1", "--kills", "4", "--burst", "5")
