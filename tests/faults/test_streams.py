"""A stream that is in flight through the router ends whole, whatever is restarted, moved or changed meanwhile."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from tests.sardeenz_site.stack import Stack, wait_for
from tests.sardeenz_site.traffic import Api

pytestmark = [pytest.mark.slow, pytest.mark.faults]
MODEL = "long"
#: Some 430 tokens a second are made at this speed.
SPEED = "2"
#: A stream with fewer tokens to come might end before what is done to it has happened.
LEFT = 1500
LIMIT_S = 90.0


class Stream(threading.Thread):
    """One streamed answer of so many tokens. ``tokens`` came so far; ``fault`` says why it is not whole."""

    def __init__(self, stack: Stack, key: str, tokens: int) -> None:
        super().__init__(daemon=True)
        self._url = f"{stack.router_url}/v1/chat/completions"
        self._headers = {"Authorization": f"Bearer {key}"}
        self._asked = tokens
        self.tokens = 0
        self.fault = "It did not end."
        self.ended: datetime | None = None
        self.start()
        wait_for(lambda: self.tokens > 0 or not self.is_alive(), LIMIT_S, "the first token")

    def run(self) -> None:
        body = {
            "model": MODEL, "stream": True, "max_tokens": self._asked, "ignore_eos": True,
            "messages": [{"role": "user", "content": "Tell me about rivers."}],
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        last = ""
        try:
            with (
                httpx.Client(timeout=LIMIT_S) as client,
                client.stream("POST", self._url, headers=self._headers, json=body) as answer,
            ):
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        last = line[6:]
                        self._take(last)
            whole = answer.status_code == 200 and last == "[DONE]" and self.tokens == self._asked
            self.fault = "" if whole else f"{answer.status_code} after {self.tokens} of {self._asked}: {last[:300]}"
        except (httpx.HTTPError, AssertionError) as exc:
            self.fault = f"after {self.tokens} tokens: {exc!r}"
        self.ended = datetime.now(UTC)

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            return
        event: dict[str, Any] = json.loads(data)
        assert event.get("model") == MODEL, data
        self.tokens = event["usage"]["completion_tokens"]

    @property
    def left(self) -> int:
        return self._asked - self.tokens if self.is_alive() else 0

    def more(self) -> None:
        """Wait until further tokens have come."""
        before = self.tokens
        wait_for(lambda: self.tokens > before or not self.is_alive(), LIMIT_S, "more tokens")

    def end(self) -> str:
        self.join(LIMIT_S)
        return self.fault


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(SARDEENZ_SIM_SPEED=SPEED, SARDEENZ_DRAIN_LIMIT_S="120") as running:
        yield running


@pytest.fixture(scope="module")
def api(stack: Stack) -> Iterator[Api]:
    with Api(stack) as session:
        session.wait_state(session.launch(MODEL), "ready")
        yield session


def living(api: Api) -> list[dict[str, Any]]:
    try:
        rows: list[dict[str, Any]] = api.get(f"/instances?model={MODEL}&live=true")
    except httpx.HTTPError:  # the pages are coming back
        return []
    return rows


def back(stack: Stack, name: str, old: int) -> bool:
    child = stack.children().get(name)
    return child is not None and child.pid != old


@pytest.mark.parametrize("name", ["web", "control", "host", "sampler"])
def test_stream_survives_the_restart_of_a_process(stack: Stack, api: Api, name: str) -> None:
    """Ended in order, then killed; each time in the middle of a stream."""
    streams = [Stream(stack, api.key, 6000)]
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if streams[-1].left < LEFT:
            streams.append(Stream(stack, api.key, 6000))
        old = stack.children()[name]
        old.send_signal(signum)
        old.wait(LIMIT_S)
        assert streams[-1].is_alive()
        streams[-1].more()
        wait_for(lambda: back(stack, name, old.pid), LIMIT_S, f"{name} is there again")  # noqa: B023 - ends in here
        wait_for(lambda: [row["state"] for row in living(api)] == ["ready"], LIMIT_S, "ready")
    assert [stream.end() for stream in streams] == [""] * len(streams)


def operation_end(api: Api, operation: dict[str, Any]) -> dict[str, Any]:
    """The operation as it ended."""
    found: list[dict[str, Any]] = []

    def ended() -> bool:
        found[:] = [row for row in api.get("/operations?limit=20") if row["id"] == operation["id"]]
        return found[0]["ended_at"] is not None

    wait_for(ended, LIMIT_S, f"the end of {operation['title']}")
    return found[0]


def replaced_under_a_stream(stack: Stack, api: Api, begin: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The instance before and after what ``begin`` starts, while one stream goes on from before to after."""
    (old,) = living(api)
    stream = Stream(stack, api.key, 12_000)
    operation = operation_end(api, begin(old))
    assert operation["state"] == "succeeded", operation
    assert stream.end() == ""
    wait_for(lambda: len(living(api)) == 1, LIMIT_S, "the old one is gone")
    (new,) = living(api)
    at = {event["to_state"]: event["at"] for event in api.get(f"/instances/{old['id']}/events")}
    assert stream.ended is not None
    drained, stopped = (datetime.fromisoformat(at[state]) for state in ("draining", "stopped"))
    assert drained < stream.ended < stopped
    assert new["id"] != old["id"]
    return old, new


def test_stream_survives_a_move_of_its_model(stack: Stack, api: Api) -> None:
    gpus = [gpu["uuid"] for gpu in api.get("/gpus")]

    def move(old: dict[str, Any]) -> Any:
        free = [uuid for uuid in gpus if uuid not in old["gpu_uuids"]]
        return api.post(f"/instances/{old['id']}/move", gpu_uuids=free)

    old, new = replaced_under_a_stream(stack, api, move)
    assert {*old["gpu_uuids"]} | {*new["gpu_uuids"]} == {*gpus}


def test_stream_survives_an_edit_of_its_model(stack: Stack, api: Api) -> None:
    def edit(old: dict[str, Any]) -> Any:
        assert api.client.patch(f"/models/{MODEL}", json={"max_model_len": 16_384}).status_code == 200
        return api.post(f"/models/{MODEL}/roll")

    old, new = replaced_under_a_stream(stack, api, edit)
    assert new["spec_revision"] > old["spec_revision"]
