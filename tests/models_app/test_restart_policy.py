from __future__ import annotations

from typing import Any

import pytest

from models_app.services.lifecycle.restart_policy import NO_MEMORY, Decision, decide


def _decide(**changes: Any) -> Decision:
    given: dict[str, Any] = {
        "policy": "on_failure",
        "desired": "running",
        "asked_to_stop": False,
        "clean_exit": False,
        "was_ready": True,
        "cause_code": "",
        "permanent": False,
        "restarts": 0,
        "limit": 5,
        "backoff_s": 10.0,
        "backoff_max_s": 300.0,
        "jitter": 0.0,
    }
    return decide(**(given | changes))


def test_back_off_doubles_up_to_its_maximum() -> None:
    delays = [_decide(restarts=count, limit=20).delay_s for count in range(8)]
    assert delays == [10, 20, 40, 80, 160, 300, 300, 300]


def test_jitter_spreads_by_up_to_a_quarter() -> None:
    assert _decide(jitter=0.999).delay_s == pytest.approx(12.5, abs=0.01)


def test_exit_code_zero_that_nobody_asked_for_is_a_failure() -> None:
    assert _decide(clean_exit=True).delay_s == 10


def test_end_that_was_asked_for_is_no_failure() -> None:
    assert _decide(asked_to_stop=True, clean_exit=True).delay_s is None


def test_what_shall_be_stopped_is_not_restarted() -> None:
    assert _decide(desired="stopped").delay_s is None


def test_policy_never_leaves_it() -> None:
    assert _decide(policy="never") == Decision(None, "Its restart policy is never: start it again by hand.")


def test_crash_loop_ends_with_a_sentence() -> None:
    decision = _decide(restarts=5)
    assert decision.delay_s is None
    assert "6 times in a row" in decision.sentence


def test_cause_that_would_come_again_is_not_retried_at_load() -> None:
    assert _decide(was_ready=False, permanent=True).delay_s is None


@pytest.mark.parametrize("code", sorted(NO_MEMORY))
def test_lack_of_memory_at_load_is_not_retried_blindly(code: str) -> None:
    assert _decide(was_ready=False, cause_code=code).delay_s is None


def test_out_of_memory_after_a_good_run_is_restarted() -> None:
    assert _decide(was_ready=True, cause_code="gpu_out_of_memory").delay_s == 10


@pytest.mark.parametrize("policy", ["always", "on_failure", "never"])
def test_restart_of_the_host_brings_everything_back_at_once(policy: str) -> None:
    assert _decide(policy=policy, cause_code="host_restarted", restarts=99).delay_s == 0
    assert _decide(policy=policy, cause_code="host_restarted", desired="stopped").delay_s is None


def test_nothing_is_restarted_on_a_host_in_maintenance() -> None:
    assert _decide(host_in_maintenance=True).delay_s is None


def test_sleeper_whose_process_is_gone_comes_back_like_any_other() -> None:
    assert _decide(desired="sleeping", was_ready=True).delay_s is not None
    assert _decide(desired="sleeping", policy="never").delay_s is None
