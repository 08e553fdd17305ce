"""Three models serve while every process of ours is killed in turn: no client notices, states are right again soon."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.sardeenz_site.stack import Stack, wait_for
from tests.sardeenz_site.traffic import Api, Chat

pytestmark = [pytest.mark.slow, pytest.mark.faults]
MODELS = ("a", "b", "c")
#: Seconds within which everything must be right again after a process was killed (the machine may be shared).
RIGHT_AGAIN_S = 30.0


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(SARDEENZ_SIM_SPEED="4") as running:
        yield running


@pytest.fixture(scope="module")
def api(stack: Stack) -> Iterator[Api]:
    with Api(stack) as session:
        yield session


@pytest.fixture(scope="module")
def instances(api: Api) -> dict[str, int]:
    made = {name: api.launch(name) for name in MODELS}
    for instance in made.values():
        api.wait_state(instance, "ready")
    return made


@pytest.fixture
def chats(stack: Stack, api: Api, instances: dict[str, int]) -> Iterator[list[Chat]]:
    with contextlib.ExitStack() as block:
        running = [block.enter_context(Chat(stack, api.key, name)) for name in MODELS]
        for chat in running:
            chat.more()
        yield running


def engines(stack: Stack) -> set[int]:
    mark = f"{stack.home}/runs/"
    return {p.pid for p in psutil.process_iter(["cmdline"]) if mark in " ".join(p.info["cmdline"] or ())}


def all_ready(api: Api, instances: dict[str, int]) -> bool:
    try:
        return all(api.state(instance) == "ready" for instance in instances.values())
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("name", ["web", "control", "beat", "host", "sampler", "valkey"])
def test_engines_serve_on_while_a_process_of_ours_is_killed(
    stack: Stack, api: Api, instances: dict[str, int], chats: list[Chat], name: str
) -> None:
    before = engines(stack)
    old = stack.children()[name]
    old.kill()
    for chat in chats:
        chat.more()
    wait_for(lambda: stack.children().get(name, old).pid != old.pid, RIGHT_AGAIN_S, f"{name} is there again")
    wait_for(lambda: all_ready(api, instances), RIGHT_AGAIN_S, "all ready")
    for chat in chats:
        chat.more()
    assert [chat.faults for chat in chats] == [[], [], []]
    assert engines(stack) == before


def test_engine_that_is_killed_is_explained_and_started_again(
    stack: Stack, api: Api, instances: dict[str, int]
) -> None:
    victim = next(
        p for p in psutil.process_iter(["cmdline"])
        if "models_app.simulator" in (words := " ".join(p.info["cmdline"] or ()))
        and "guardian" not in words
        and f"--served-model-name {MODELS[0]}" in words
        and str(stack.home) in " ".join(p.environ().values())
    )  # fmt: skip
    victim.kill()
    instance = instances[MODELS[0]]
    wait_for(lambda: api.state(instance) != "ready", RIGHT_AGAIN_S, "it is noticed")
    api.wait_state(instance, "ready")
    events = api.get(f"/instances/{instance}/events")
    assert any("SIGKILL" in str(event) or "killed" in str(event) for event in events), events


def test_launcher_that_is_killed_leaves_engines_to_the_next_one(
    stack: Stack, api: Api, instances: dict[str, int]
) -> None:
    before = engines(stack)
    assert stack.process is not None
    stack.process.kill()
    stack.process.wait(10)
    time.sleep(1)
    assert engines(stack) == before
    stack.start()
    wait_for(lambda: all_ready(api, instances), RIGHT_AGAIN_S, "all ready")
    assert engines(stack) == before
    with Chat(stack, api.key, MODELS[0]) as chat:
        chat.more()
    assert chat.faults == []


def test_end_of_the_demo_ends_its_engines(stack: Stack, instances: dict[str, int]) -> None:
    assert engines(stack)
    assert stack.end(signal.SIGINT) == 0
    assert engines(stack) == set()
    assert "3 simulated engines stopped." in stack.text
