"""Requests that bring models up by turns while everything around them is killed; a file of its own, to run beside."""

from __future__ import annotations

import pytest

from tests.faults.test_random_faults import play

pytestmark = [pytest.mark.slow, pytest.mark.faults]


def test_models_come_when_they_are_asked_for_whatever_was_killed() -> None:
    play("--cast", "on-demand", "--seed", "1", "--steps", "60", "--burst", "15")
