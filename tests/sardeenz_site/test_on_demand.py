"""Requests at the router's own port bring up, wake and make room for models: the whole stack, as a client sees it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.sardeenz_site.stack import Stack, wait_for

pytestmark = pytest.mark.slow
#: A load, a victim's last seconds and the looks in between, on a slow machine.
LIMIT_S = 150.0


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """One card that holds one of two models."""
    with Stack(
        SARDEENZ_SIM_GPUS="1",
        SARDEENZ_SIM_GPU_BYTES="6GiB",
        SARDEENZ_SIM_SPEED="20",
        SARDEENZ_RESIDENCE_S="1",
        SARDEENZ_RESTART_BACKOFF_S="1",
    ) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[httpx.Client]:
    key = stack.manage("create_api_key", "client", "--role", "operator").split()[-1]
    with httpx.Client(headers={"Authorization": f"Bearer {key}"}, timeout=LIMIT_S, trust_env=False) as client:
        for name in ("first", "second"):
            body = {
                "served_model_name": name,
                "source": "catalogue",
                "model": "Qwen/Qwen3-0.6B",
                "max_model_len": 4096,
                "on_demand": True,
                "enable_sleep_mode": True,
            }
            client.post(f"{stack.url}/api/v1/models", json=body).raise_for_status()
        yield client


def _ask(client: httpx.Client, stack: Stack, name: str, **fields: object) -> httpx.Response:
    body = {"model": name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **fields}
    return client.post(f"{stack.router_url}/v1/chat/completions", json=body)


def _states(client: httpx.Client, stack: Stack) -> dict[str, str]:
    rows = client.get(f"{stack.url}/api/v1/instances").json()
    return {row["model"]: row["state"] for row in rows}


def test_requests_start_a_model_and_all_of_them_are_answered(client: httpx.Client, stack: Stack) -> None:
    wait_for(lambda: _listed(client, stack) == {"first": "stopped", "second": "stopped"}, 30, "both are listed")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: _ask(client, stack, "first").status_code, range(4)))
    assert answers == [200] * 4
    operations = client.get(f"{stack.url}/api/v1/operations").json()
    assert operations == []  # there was room


def _listed(client: httpx.Client, stack: Stack) -> dict[str, str]:
    answer = client.get(f"{stack.router_url}/v1/models")
    return {one["id"]: one["status"] for one in answer.json()["data"]} if answer.status_code == 200 else {}


def test_other_model_takes_the_room_of_the_idle_one(client: httpx.Client, stack: Stack) -> None:
    answer = _ask(client, stack, "second")
    assert answer.status_code == 200, answer.text
    assert _states(client, stack)["first"] == "sleeping"


def test_waiting_stream_is_kept_open_and_then_answered_by_the_one_that_woke(client: httpx.Client, stack: Stack) -> None:
    answer = _ask(client, stack, "first", stream=True)
    assert answer.status_code == 200
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert all("error" not in json.loads(event) for event in events[:-1])
    assert _states(client, stack)["second"] in ("sleeping", "stopped")


def test_engine_that_was_killed_is_found_by_the_request_that_failed(client: httpx.Client, stack: Stack) -> None:
    (row,) = [one for one in client.get(f"{stack.url}/api/v1/instances").json() if one["model"] == "first"]
    runs = stack.home / "runs"
    attempts = {path: json.loads((path / "attempt.json").read_text()) for path in runs.iterdir() if path.is_dir()}
    (folder,) = [path for path, attempt in attempts.items() if attempt["instance_id"] == row["id"]]
    os.kill(json.loads((folder / "status.json").read_text())["engine_pid"], signal.SIGKILL)
    _ask(client, stack, "first")  # finds it dead, or waits for its successor
    wait_for(lambda: _ask(client, stack, "first").status_code == 200, LIMIT_S, "it is started again")
    events = client.get(f"{stack.url}/api/v1/instances/{row['id']}/events").json()
    assert any(event["to_state"] == "failed" for event in events)
