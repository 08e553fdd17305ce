"""The add-on inside a real vLLM (CPU build, without kvcached): it loads, answers, preempts without a trace, sleeps
and wakes.

Preempting is asked for by number here (through ``addon_door``), since there is no KV limit without kvcached; what is
under test is the real scheduler's part of it. CPU workers ignore sleep, so what a wake does is seen by its order, not
by bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from models_app.engines.base import Command
from tests.contract.conftest import VENV
from tests.contract.kit import Kit, Started, wait_for

pytestmark = [
    pytest.mark.xdist_group("contract"),
    pytest.mark.parametrize("kit", [pytest.param("vllm", marks=[pytest.mark.engine, pytest.mark.slow])], indirect=True),
]

HERE = Path(__file__).parent
TOKENS = 160
#: More layers than the tiny model has: a step must take longer than it takes to read what the last one gave.
LAYERS = 10


def with_door(command: Command) -> Command:
    """The product's own command, the tests' door outermost, and the self-test's operations allowed."""
    env = command.env | {
        "PYTHONPATH": os.pathsep.join([command.env["PYTHONPATH"], str(HERE)]),
        "SARDEENZ_ADDON_SELFTEST": "1",
    }
    return dataclasses.replace(command, argv=(*command.argv, "--middleware", "addon_door.Door"), env=env)


@pytest.fixture(scope="module")
def real(kit: Kit) -> Iterator[Started]:
    """One engine whose weights can be read again."""
    model = kit.models / "weighty"
    shutil.copytree(kit.models / "tiny", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": LAYERS}))
    subprocess.run([f"{VENV}/bin/python", HERE / "make_weights.py", model], check=True)
    started = kit.start(change=with_door, model=str(model), load_format="auto")
    started.wait_ready()
    yield started


def kvcache(real: Started, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
    with real.http() as http:
        answer = http.get(f"/kvcache/{path}") if body is None else http.post(f"/kvcache/{path}", json=body)
        return answer.status_code, answer.json()


class Stream:
    """One greedy answer, read as it comes."""

    def __init__(self, real: Started, number: int) -> None:
        self.text = ""
        self.chunks = 0
        self.finish: str | None = None
        self._real = real
        self._order = {
            "model": "tiny",
            "prompt": f"request {number}: " + "the engine answers when it is asked " * (1 + number % 3),
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }

    def read(self) -> Stream:
        with self._real.http() as http, http.stream("POST", "/v1/completions", json=self._order) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    self.text += choice["text"]
                    self.chunks += 1
                    self.finish = choice["finish_reason"] or self.finish
        return self


def answers(real: Started, count: int, meanwhile: Any = None) -> list[Stream]:
    """So many streams at once; ``meanwhile(streams)`` runs while they are read."""
    streams = [Stream(real, number) for number in range(count)]
    with ThreadPoolExecutor(count) as pool:
        done = [pool.submit(stream.read) for stream in streams]
        if meanwhile is not None:
            meanwhile(streams)
        return [each.result(timeout=120) for each in done]


@pytest.fixture(scope="module")
def undisturbed(real: Started) -> list[str]:
    """What six requests get when nobody interferes, twice the same."""
    first = [stream.text for stream in answers(real, 6)]
    assert [stream.text for stream in answers(real, 6)] == first
    assert len(set(first)) > 1
    return first


def test_plugin_takes_hold_in_the_engine_core_and_says_what_it_found(real: Started) -> None:
    lines = [line for line in real.log().splitlines() if "sardeenz: add-on in pid" in line]
    assert len(lines) == 1
    assert "(EngineCore" in lines[0]
    assert "vLLM 0.30.0" in lines[0]
    assert "no pool of kvcached" in lines[0]


def test_status_comes_from_the_engine_core(real: Started) -> None:
    status, body = kvcache(real, "status")
    assert status == 200
    assert (body["provider"], body["kvcached_active"], body["segments"]) == ("none", False, [])
    assert body["engine"]["pid"] in real.memory().engine_core_pids
    assert body["requests"]["running"] == 0


@pytest.mark.parametrize("path", ["limit", "trim", "abort_stuck"])
def test_without_kvcached_there_is_nothing_to_limit(real: Started, path: str) -> None:
    status, body = kvcache(real, path, {"size": "1g"})
    assert (status, body["code"]) == (409, "unavailable")


def test_preempted_requests_end_with_the_answers_they_would_have_had(real: Started, undisturbed: list[str]) -> None:
    """Round by round, until enough was taken: how much a round gets hold of depends on who is faster, test or
    engine."""
    taken: list[dict[str, Any]] = []

    def interfere(streams: list[Stream]) -> None:
        with real.http() as http:
            wait_for(lambda: http.get("/kvcache/status").json()["requests"]["waiting"] == 6, 60)
            http.post("/kvcache/resume")
            for count in itertools.cycle((2, 1, 3, 6)):
                if all(stream.finish for stream in streams):
                    return
                taken.append(http.post("/test/preempt", json={"requests": count}).json())
                time.sleep(0.02)

    for _ in range(10):
        assert kvcache(real, "pause", {})[0] == 200
        streams = answers(real, 6, interfere)
        assert [stream.finish for stream in streams] == ["length"] * 6
        assert [stream.text for stream in streams] == undisturbed
        if sum(each["requests"] for each in taken) >= 20:
            break
    hits = [each for each in taken if each["requests"]]
    assert sum(each["requests"] for each in hits) >= 20
    assert all(each["tokens"] > 0 and not each["warnings"] for each in hits)
    assert real.client.metrics().preemptions == sum(each["requests"] for each in hits)
    last = kvcache(real, "status")[1]["last_reclaim"]
    assert (last["requests"], last["open"]) == (hits[-1]["requests"], 0)
    assert last["pause_s"] > 0


def test_pause_holds_requests_and_resume_lets_them_go_on(real: Started, undisturbed: list[str]) -> None:
    held: list[list[int]] = []

    def hold(streams: list[Stream]) -> None:
        with real.http() as http:
            wait_for(lambda: http.get("/kvcache/status").json()["requests"]["waiting"] == 6, 60)
            http.post("/kvcache/resume")
            while len(held) < 3 and not all(stream.finish for stream in streams):
                assert http.post("/kvcache/pause").json()["status"] == "paused"
                assert http.get("/kvcache/status").json()["sleep"]["paused"] is True
                time.sleep(0.3)  # what had left the engine before the pause has arrived
                before = [stream.chunks for stream in streams]
                time.sleep(0.2)
                held.append([stream.chunks - count for stream, count in zip(streams, before, strict=True)])
                assert http.post("/kvcache/resume").json()["status"] == "running"
                time.sleep(0.1)

    assert kvcache(real, "pause", {})[0] == 200
    assert [stream.text for stream in answers(real, 6, hold)] == undisturbed
    assert held[0] == [0] * 6


def test_sleep_waits_for_requests_under_way_and_wake_serves_again(real: Started, undisturbed: list[str]) -> None:
    slept: list[tuple[int, dict[str, Any]]] = []

    def doze(streams: list[Stream]) -> None:
        with real.http() as http:  # all are inside before any begins: one that came to a sleeper would wait for ever
            wait_for(lambda: http.get("/kvcache/status").json()["requests"]["waiting"] == 6, 60)
        assert kvcache(real, "resume", {})[0] == 200
        wait_for(lambda: any(stream.chunks for stream in streams), 60)
        slept.append(kvcache(real, "sleep", {"level": 1}))

    assert kvcache(real, "pause", {})[0] == 200
    assert [stream.text for stream in answers(real, 6, doze)] == undisturbed
    assert (slept[0][0], slept[0][1]["status"]) == (200, "asleep")
    assert kvcache(real, "sleep", {"level": 1})[1]["already"] is True
    assert kvcache(real, "sleep", {"level": 2})[0] == 409
    assert kvcache(real, "resume", {})[0] == 409
    assert real.client.metrics().sleep_state == "weights_offloaded"
    assert kvcache(real, "wake", {})[1]["status"] == "awake"
    assert real.client.metrics().sleep_state == "awake"
    assert [stream.text for stream in answers(real, 2)] == undisturbed[:2]


def test_level_2_reads_the_weights_again_before_it_serves(real: Started, undisturbed: list[str]) -> None:
    assert kvcache(real, "sleep", {"level": 2})[1]["level"] == 2
    status, body = kvcache(real, "wake", {"tags": ["kv_cache"]})
    assert (status, body["status"], body["asleep_tags"]) == (200, "partly_awake", ["weights"])
    late = Stream(real, 0)
    reader = threading.Thread(target=late.read)
    reader.start()
    time.sleep(0.5)
    assert late.chunks == 0  # half awake: accepted, and served by nobody
    assert kvcache(real, "wake", {})[1]["status"] == "awake"
    reader.join(60)
    assert late.text == undisturbed[0]


def test_prefix_cache_can_be_forgotten(real: Started, undisturbed: list[str]) -> None:
    assert kvcache(real, "reset_prefix_cache", {})[1]["status"] == "reset"
    assert [stream.text for stream in answers(real, 1)] == undisturbed[:1]
