"""The whole chain of a GPU fault: XID, closed card, model moved under its clients; told on pages, REST and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.sardeenz_site.stack import Stack, wait_for
from tests.sardeenz_site.traffic import Api, Chat

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(SARDEENZ_SIM_SPEED="6", SARDEENZ_SIM_GPUS="2", SARDEENZ_SIM_GPU_BYTES="24GiB") as stack:
        yield stack


@pytest.fixture(scope="module")
def api(stack: Stack) -> Iterator[Api]:
    with Api(stack) as session:
        yield session


def _gpu(api: Api, index: int) -> dict[str, Any]:
    return next(one for one in api.get("/gpus") if one["index"] == index)


def _serving(api: Api) -> list[dict[str, Any]]:
    return [one for one in api.get("/instances?live=true&model=a") if one["state"] == "ready"]


def test_xid_closes_the_card_and_moves_the_model_under_its_clients(stack: Stack, api: Api) -> None:
    first = api.launch("a")
    api.wait_state(first, "ready")
    (uuid,) = api.get(f"/instances/{first}")["gpu_uuids"]
    bad = next(one["index"] for one in api.get("/gpus") if one["uuid"] == uuid)
    with Chat(stack, api.key, "a") as chat:
        chat.more()
        stack.manage("simulate_gpu_fault", str(bad), "xid:79")
        wait_for(lambda: bool(_gpu(api, bad)["cordoned"]), 30, "the card is closed")
        wait_for(lambda: api.state(first) == "stopped", 120, "the model has left the card")
        chat.more()
    assert chat.faults == []
    assert [one["gpu_uuids"] for one in _serving(api)] == [[_gpu(api, 1 - bad)["uuid"]]]
    shown = _gpu(api, bad)
    assert (shown["state"], shown["grade"]) == ("faulty", "fatal")
    assert shown["cordon_reason"].startswith("XID 79: the GPU has fallen off the bus.")
    assert any("is faulty" in one["title"] for one in api.get("/attention"))
    headers = {"Authorization": f"Bearer {api.key}"}
    text = httpx.get(f"{stack.url}/metrics", headers=headers, timeout=20).text
    lines = [line for line in text.splitlines() if line.startswith("sardeenz_gpu_faulty{") and uuid in line]
    assert [line.rpartition(" ")[2] for line in lines] == ["1.0"]
    with stack.login(stack.password or "") as browser:
        assert "is faulty" in browser.get("/").text


def test_second_card_that_breaks_leaves_it_waiting_and_no_loop(stack: Stack, api: Api) -> None:
    """Nothing is left to run on: it ends with the reason, waits for a card, and is back when one is opened again."""
    (serving,) = _serving(api)
    (uuid,) = serving["gpu_uuids"]
    last = next(one["index"] for one in api.get("/gpus") if one["uuid"] == uuid)
    stack.manage("simulate_gpu_fault", str(last), "xid:48")
    api.wait_state(serving["id"], "pending", 60)
    why = "it says what it waits for"
    wait_for(lambda: "is out of order" in api.get(f"/instances/{serving['id']}")["reason"], 30, why)
    attempts = len(api.get(f"/instances/{serving['id']}/attempts"))
    stack.manage("simulate_gpu_fault", str(last), "none")
    wait_for(lambda: _gpu(api, last)["state"] == "ok", 30, "the card answers again")
    assert api.state(serving["id"]) == "pending"
    api.post(f"/gpus/{uuid}/uncordon")
    api.wait_state(serving["id"], "ready")
    assert len(api.get(f"/instances/{serving['id']}/attempts")) == attempts + 1
