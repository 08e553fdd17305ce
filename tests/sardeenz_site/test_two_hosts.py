"""Two GPU hosts with names and GPUs of their own, one PostgreSQL, one Valkey, one control machine."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.sardeenz_site.stack import Stack, wait_for
from tests.sardeenz_site.traffic import Api, Chat

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stacks(postgres_url: str, valkey_url: str) -> Iterator[dict[str, Stack]]:
    shared = {
        "DATABASE_URL": postgres_url,
        "REDIS_URL": valkey_url,
        "SECRET_KEY": "k" * 50,
        "SARDEENZ_SIM_SPEED": "4",
        "SARDEENZ_SIM_GPUS": "1",
    }
    with (
        Stack(role="control", SARDEENZ_HOST_NAME="desk", **shared) as control,
        Stack(role="host", SARDEENZ_HOST_NAME="gpu-a", **shared) as first,
        Stack(role="host", SARDEENZ_HOST_NAME="gpu-b", **shared) as second,
    ):
        yield {"control": control, "gpu-a": first, "gpu-b": second}


@pytest.fixture(scope="module")
def api(stacks: dict[str, Stack]) -> Iterator[Api]:
    with Api(stacks["control"]) as session:
        yield session


def hosts(api: Api) -> dict[str, bool]:
    return {host["name"]: host["reachable"] for host in api.get("/hosts")}


def test_each_host_shows_its_own_gpus(stacks: dict[str, Stack], api: Api) -> None:
    wait_for(lambda: hosts(api) == {"gpu-a": True, "gpu-b": True}, 30, "both hosts are there")
    wait_for(lambda: len(api.get("/gpus")) == 2, 30, "both GPUs are there")
    assert len({gpu["uuid"] for gpu in api.get("/gpus")}) == 2


def test_two_replicas_go_to_two_hosts_and_both_serve(stacks: dict[str, Stack], api: Api) -> None:
    api.post("/models", served_model_name="two", source="catalogue", model="Qwen/Qwen3-0.6B", replicas=2)
    api.post("/models/two/launch")
    wait_for(lambda: [i["state"] for i in api.get("/instances")] == ["ready", "ready"], 90, "both replicas ready")
    assert {i["host"] for i in api.get("/instances")} == {"gpu-a", "gpu-b"}
    with Chat(stacks["control"], api.key, "two") as chat:
        chat.more()
        chat.more()
    assert chat.faults == []


def test_log_of_a_start_on_another_host_is_fetched_whole(stacks: dict[str, Stack], api: Api) -> None:
    """The control machine has no run directories: the host's worker is asked, and the beginning is there too."""
    for instance in api.get("/instances"):
        answer = api.client.get(f"/instances/{instance['id']}/attempts/1/log")
        assert answer.status_code == 200
        assert not answer.text.startswith("[The whole log is not to be had")
        assert len(answer.text.splitlines()) > 10


def test_drained_host_is_empty_and_clients_notice_nothing(stacks: dict[str, Stack], api: Api) -> None:
    with Chat(stacks["control"], api.key, "two") as chat:
        chat.more()
        operation = api.post("/hosts/gpu-a/drain", note="new fan")["id"]
        wait_for(
            lambda: api.get(f"/operations/{operation}")["state"] not in ("pending", "running"),
            120,
            "the drain has ended",
        )
        chat.more()
    assert chat.faults == []
    found = api.get(f"/operations/{operation}")
    assert (found["state"], found["message"]) == ("succeeded", "Host gpu-a is empty and cordoned.")
    assert [one["host"] for one in api.get("/instances?live=true")] == ["gpu-b", "gpu-b"]
    assert api.post("/hosts/gpu-a/uncordon")["cordoned"] is False


def test_host_that_went_is_shown_as_lost_and_the_other_serves_on(stacks: dict[str, Stack], api: Api) -> None:
    assert stacks["gpu-a"].end() == 0
    wait_for(lambda: hosts(api)["gpu-a"] is False, 60, "gpu-a is lost")
    assert hosts(api)["gpu-b"] is True
    with Chat(stacks["control"], api.key, "two") as chat:
        chat.more()
    assert httpx.get(f"{stacks['control'].url}/healthz").status_code == 200
