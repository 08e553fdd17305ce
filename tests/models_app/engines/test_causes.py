"""The first real error of a log, in plain words."""

from __future__ import annotations

import signal

import pytest

from models_app.engines.causes import Cause, explain
from models_app.engines.rundir import Status
from tests.models_app.engines import samples


def ended(exit_code: int | None = 1, number: int | None = None, *, asked: bool = False) -> Status:
    return Status(10, 1, 11, 2, 100.0, 130.0, exit_code=exit_code, signal=number, stop_requested=asked)


@pytest.mark.parametrize("name", samples.FAILURES)
def test_each_known_failure_has_its_sentence_and_advice(name: str) -> None:
    log, code, words = samples.FAILURES[name]
    cause = explain(log, ended())
    assert cause.code == code
    assert cause.sentence and cause.advice
    for word in words:
        assert word in f"{cause.sentence} {cause.advice}"
    assert "{" not in cause.sentence + cause.advice
    assert cause.evidence_line and "Engine core initialization failed" not in cause.evidence_line


def test_cause_on_stdout_wins_over_the_generic_last_error() -> None:
    log, *_ = samples.FAILURES["gpu full at load"]
    assert explain(log, ended()).evidence_line.startswith("Failed to load model - not enough GPU memory")


def test_pid_of_a_prefixed_line_is_kept() -> None:
    log, *_ = samples.FAILURES["no weights"]
    assert explain(log, ended()).pid == 28239


def test_a_harmless_line_that_names_context_or_open_files_is_no_cause() -> None:
    log = samples.core("ZeroDivisionError: division by zero")
    cause = explain(log, ended())
    assert cause.code == "error"
    assert "division by zero" in cause.sentence


def test_source_lines_of_a_traceback_are_no_cause() -> None:
    log = samples.server("    raise ValueError('No space left on device')", "KeyError: 'x'")
    assert explain(log, ended()).evidence_line == "KeyError: 'x'"


def test_an_unknown_validation_error_is_told_in_its_own_words() -> None:
    cause = explain(samples.validation("invalid literal for int() with base 10: '0.1'"), ended())
    assert cause.sentence == "vLLM says: invalid literal for int() with base 10: '0.1'"


def test_a_dead_engine_core_is_named_although_the_server_exits_with_0() -> None:
    cause = explain(samples.ENGINE_CORE_KILLED, ended(0))
    assert cause.code == "engine_core_died"


def test_a_clients_mistake_is_not_why_the_server_died() -> None:
    assert "validation" not in explain(samples.ENGINE_CORE_KILLED, ended(0)).sentence


def test_the_engine_core_s_own_last_words_are_told() -> None:
    cause = explain(samples.ENGINE_CORE_OOM_WHILE_SERVING, ended(0))
    assert cause.sentence == "vLLM says: list index out of range"


def test_exit_0_that_nobody_asked_for_is_said_so() -> None:
    assert explain(samples.CPU_EAGER_START, ended(0)).code == "ended_unasked"


def test_sigkill_from_outside_points_to_memory() -> None:
    cause = explain(samples.CPU_EAGER_START, ended(None, signal.SIGKILL))
    assert cause.code == "killed"
    assert "memory" in cause.sentence


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGSEGV, "crashed"),
        (signal.SIGILL, "illegal_instruction"),
        (signal.SIGTERM, "signalled"),
        (64, "crashed"),
    ],
)
def test_other_signals_are_told_apart(number: int, code: str) -> None:
    assert explain("", ended(None, number)).code == code


def test_an_end_that_was_asked_for_is_no_failure() -> None:
    log, *_ = samples.FAILURES["gpu full at load"]
    assert explain(log, ended(None, signal.SIGTERM, asked=True)).code == "stopped"


def test_sigterm_by_a_stranger_with_exit_0_is_noticed() -> None:
    log = (
        samples.CPU_EAGER_START
        + "(APIServer pid=1) INFO 11-30 15:54:17 [launcher.py:129] [shutdown] API server: shutdown triggered\n"
    )
    assert explain(log, ended(0)).code == "signalled"


def test_a_program_that_is_not_there_is_named() -> None:
    cause = explain("sardeenz: cannot start /opt/vllm/bin/vllm: No such file or directory\n", ended(127))
    assert cause.code == "program_missing"
    assert "/opt/vllm/bin/vllm could not be started: No such file or directory." in cause.sentence


def test_silence_is_told_with_the_exit_code() -> None:
    assert "exit code 3" in explain("", ended(3)).sentence
    assert explain("", None).code == "unknown"


def test_what_cannot_change_by_itself_is_marked_permanent() -> None:
    assert explain(samples.FAILURES["unknown flag"][0], ended(2)).permanent
    assert not explain(samples.FAILURES["port in use"][0], ended()).permanent
    assert not explain(samples.FAILURES["gpu full at load"][0], ended()).permanent


def test_a_huge_line_is_cut_for_people() -> None:
    cause: Cause = explain(
        samples.validation("Model architectures ['X'] are not supported for now. " + "y" * 9000), ended()
    )
    assert len(cause.evidence_line) <= 400
