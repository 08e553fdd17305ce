"""Starts that fail: exit code, and the cause in plain words from the engine's own log."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import pytest

from models_app.engines.process import Command, cleanup, free_port
from tests.contract.kit import Kit, Started

pytestmark = pytest.mark.xdist_group("contract")


def fails(started: Started, exit_code: int, code: str) -> str:
    status = started.wait_end()
    assert (status.exit_code, status.failed) == (exit_code, True)
    cause = started.cause()
    assert cause.code == code, f"{cause}\n{started.log()[-3000:]}"
    assert cause.permanent is (code != "port_in_use")
    cleanup(started.run_dir)
    started.nothing_left()
    return cause.sentence


def test_a_folder_that_is_not_there(kit: Kit) -> None:
    sentence = fails(kit.start(model="/models/does-not-exist"), 1, "model_not_found")
    assert "/models/does-not-exist" in sentence


def test_a_flag_that_vllm_does_not_know(kit: Kit) -> None:
    def add(command: Command) -> Command:
        return dataclasses.replace(command, argv=(*command.argv, "--no-such-flag", "3"))

    assert "--no-such-flag 3" in fails(kit.start(change=add), 2, "unknown_flag")


def test_an_architecture_that_vllm_does_not_know(kit: Kit) -> None:
    sentence = fails(kit.start(model=str(kit.models / "strange")), 1, "unsupported_architecture")
    assert "MadeUpForCausalLM" in sentence


@pytest.mark.parametrize(
    ("change", "code", "word"),
    [({"load_format": ""}, "no_weights", "tiny"), ({"max_model_len": 4096}, "context_too_long", "4096")],
)
def test_a_model_that_cannot_be_served_so(kit: Kit, change: dict[str, Any], code: str, word: str) -> None:
    assert word in fails(kit.start(**change), 1, code)


def test_a_port_that_somebody_took(kit: Kit) -> None:
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", free_port("127.0.0.1")))
        thief.listen()
        fails(kit.start(port=thief.getsockname()[1]), 1, "port_in_use")
