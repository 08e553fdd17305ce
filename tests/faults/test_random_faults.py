"""Runs of the fault-injection suite as CI plays them; ``make test-faults`` plays others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.faults.cast import CASTS, STEADY, Cast
from tests.faults.plan import plan
from tests.sardeenz_site.stack import ROOT

#: Longer than this hangs, also on a machine that does other work; then it has a minute to end what it started.
LIMIT_S, END_S = 1500, 90
CUTTING = ("stop", "force_stop", "restart", "sleep", "kill_engine")


@pytest.fixture(params=sorted(CASTS))
def cast(request: pytest.FixtureRequest) -> Cast:
    return CASTS[request.param]


def test_plan_of_a_seed_is_the_same_every_time_and_begins_every_longer_one(cast: Cast) -> None:
    assert plan(cast, 7, 300) == plan(cast, 7, 300)
    assert plan(cast, 7, 60) == plan(cast, 7, 300)[:60]
    assert plan(cast, 7, 60) != plan(cast, 8, 60)


def test_no_step_ever_stops_the_model_whose_clients_must_notice_nothing(cast: Cast) -> None:
    assert not [step for step in plan(cast, 7, 3000) if step.target == STEADY and step.kind in CUTTING]


def play(*arguments: str) -> None:
    """One run; the output of a failure says how to play it again. SEED and STEPS may choose another."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faults", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        try:
            said, _ = run.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            run.terminate()
            said, _ = run.communicate(timeout=END_S)
    assert run.returncode == 0, said[-12000:]


@pytest.mark.slow
@pytest.mark.faults
def test_invariants_hold_after_300_random_acts_and_kills_on_postgresql() -> None:
    play("--seed", os.environ.get("SEED", "1"), "--steps", os.environ.get("STEPS", "300"))


@pytest.mark.slow
@pytest.mark.faults
def test_invariants_hold_after_random_acts_and_kills_on_sqlite() -> None:
    play("--seed", "7", "--steps", "60", "--database", "sqlite")
