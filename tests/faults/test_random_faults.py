"""A short run of the fault-injection suite; ``make test-faults`` does the long one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.faults.plan import STEADY, plan
from tests.sardeenz_site.stack import ROOT

#: Longer than this hangs, also on a machine that does other work.
LIMIT_S = 600
CUTTING = ("stop", "force_stop", "restart", "sleep", "kill_engine")


def test_plan_of_a_seed_is_the_same_every_time_and_begins_every_longer_one() -> None:
    assert plan(7, 300) == plan(7, 300)
    assert plan(7, 60) == plan(7, 300)[:60]
    assert plan(7, 60) != plan(8, 60)


def test_no_step_ever_stops_the_model_whose_clients_must_notice_nothing() -> None:
    assert not [step for step in plan(7, 3000) if step.target == STEADY and step.kind in CUTTING]


@pytest.mark.slow
@pytest.mark.faults
def test_invariants_hold_after_random_acts_and_kills() -> None:
    """Seed and length by SEED and STEPS; the output of a failure says how to play it again."""
    seed, steps = os.environ.get("SEED", "4"), os.environ.get("STEPS", "60")
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", "--seed", seed, "--steps", steps],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
