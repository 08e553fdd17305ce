"""Keys and usage in a whole stack: revocation at both doors, and a router that is killed while it counts."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.sardeenz_site.stack import Stack, wait_for
from tests.sardeenz_site.traffic import Api

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(SARDEENZ_SIM_SPEED="20") as stack:
        yield stack


@pytest.fixture(scope="module")
def api(stack: Stack) -> Iterator[Api]:
    """An operator, and the model ``m`` that serves."""
    with Api(stack) as api:
        api.wait_state(api.launch("m"), "ready")
        yield api


def ask(base: str, key: str, **fields: object) -> httpx.Response:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}], **fields}
    return httpx.post(f"{base}/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=20)


def both(stack: Stack, key: str, status: int) -> float:
    """Wait until web and router answer so; how long it took, seconds."""
    begun = time.monotonic()
    for base in (stack.url, stack.router_url):
        wait_for(lambda base=base: ask(base, key).status_code == status, 20, f"{base} answers {status}")  # type: ignore[misc]
    return time.monotonic() - begun


def test_revoked_key_is_refused_by_router_web_and_rest(stack: Stack, api: Api) -> None:
    key = stack.manage("create_api_key", "gone").split()[-1]
    both(stack, key, 200)
    stack.manage("revoke_api_key", "gone")
    print(f"refused by both doors {both(stack, key, 401):.2f} s after the command had ended")
    headers = {"Authorization": f"Bearer {key}"}
    assert httpx.get(f"{stack.url}/api/v1/models", headers=headers).status_code == 401


def test_rotated_key_goes_on_with_both_secrets_and_one_name(stack: Stack, api: Api) -> None:
    old = stack.manage("create_api_key", "turned").split()[-1]
    both(stack, old, 200)
    new = stack.manage("rotate_api_key", "turned", "--grace", "600").split()[-1]
    both(stack, new, 200)
    assert ask(stack.router_url, old).status_code == 200
    newest = stack.manage("rotate_api_key", "turned", "--grace", "0").split()[-1]
    both(stack, newest, 200)
    both(stack, new, 401)
    both(stack, old, 401)


def used(api: Api, name: str) -> tuple[int, int]:
    """Requests and completion tokens of a key as REST tells them."""
    totals = api.get(f"/usage?key={name}")["totals"]
    return totals["requests"], totals["completion_tokens"]


def test_usage_of_both_doors_is_one_and_a_killed_router_loses_nothing_it_has_told(stack: Stack, api: Api) -> None:
    key = stack.manage("create_api_key", "counted").split()[-1]
    both(stack, key, 200)
    for base in (stack.url, stack.router_url):
        for stream in (False, True):
            answer = ask(base, key, stream=stream)
            assert answer.status_code == 200
            assert not stream or "usage" not in answer.text
    asked = used_at_least(stack, api, "counted", 6)
    stack.children()["router"].kill()
    wait_for(lambda: _router_answers(stack, key), 30, "the router is there again")
    wait_for(lambda: used(api, "counted")[0] > asked[0], 20, "the new router's usage arrives")
    requests, tokens = used(api, "counted")
    assert tokens == 5 * requests  # each of five tokens: none counted twice, none lost
    text = api.client.get("/usage.csv?key=counted").text
    rows = list(csv.DictReader(io.StringIO(text)))  # two when the day has ended meanwhile
    assert sum(int(row["requests"]) for row in rows) >= requests
    assert all(float(row["ttft_p50_ms"]) > 0 for row in rows if row["ttft_p50_ms"])


def used_at_least(stack: Stack, api: Api, name: str, requests: int) -> tuple[int, int]:
    wait_for(lambda: used(api, name)[0] >= requests, 20, f"{requests} requests counted")
    return used(api, name)


def _router_answers(stack: Stack, key: str) -> bool:
    try:
        return ask(stack.router_url, key).status_code == 200
    except httpx.HTTPError:
        return False
