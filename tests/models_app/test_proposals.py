"""A start that lacked memory is answered with what would help, in numbers, and each can be taken as it is."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client

from gpus_app.models import Host
from models_app import dispatch
from models_app.errors import Conflict, NotFound
from models_app.models import Instance, LaunchAttempt, Model
from models_app.services.proposals import proposal_take, proposals_of
from models_app.states import InstanceState
from tests.builders import GIB, SMALL_FACTS, make_gpu, make_host, make_instance, make_key, make_model
from tests.models_app.pages import client_of

S = InstanceState
pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    messages: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dispatch, "send", lambda name, *args, **_: messages.append((name, *args)))
    return messages


@pytest.fixture
def host(settings: Any) -> Host:
    host = make_host(name=settings.SARDEENZ_HOST_NAME)
    make_gpu(host=host, total_bytes=16 * GIB)
    return host


def _failed(
    host: Host, *, code: str = "gpu_out_of_memory", log: str = "", neighbour_gib: int = 11, **fields: Any
) -> Instance:
    """It failed for lack of memory beside a neighbour that holds most of the card."""
    make_instance(host=host, model=make_model(served_model_name="neighbour"), reserved_bytes=neighbour_gib * GIB)
    model = make_model(served_model_name="a", deployed=True, **fields)
    row = make_instance(host=host, model=model, state=S.FAILED, reserved_bytes=0)
    assert row.attempt is not None
    LaunchAttempt.objects.filter(pk=row.attempt.pk).update(cause_code=code, cause="The GPU is full.", log_tail=log)
    return Instance.objects.select_related("model", "host", "attempt").get(pk=row.pk)


def _kinds(row: Instance) -> list[str]:
    return [one.kind for one in proposals_of(row)]


def test_room_is_proposed_with_what_is_needed_what_is_there_and_what_is_missing(host: Host) -> None:
    row = _failed(host, neighbour_gib=15)
    (room, *_) = proposals_of(row)
    assert (room.kind, room.page) == ("room", f"/models/{row.model_id}/launch/")
    assert re.match(
        r"It needs about 3\.\d GiB per GPU, the emptiest has 0\.\d GiB to give\. 3\.\d GiB are missing\.", room.why
    )


def test_room_is_proposed_to_one_that_waits_to_be_placed(host: Host) -> None:
    neighbour = make_instance(host=host, model=make_model(served_model_name="neighbour"), reserved_bytes=14 * GIB)
    row = make_instance(model=make_model(served_model_name="a", deployed=True), state=S.PENDING)
    (room,) = proposals_of(row)
    assert (room.kind, room.changes, room.page) == ("room", {}, f"/models/{row.model_id}/launch/")
    assert "are missing" in room.why
    page = client_of("operator").get(f"/instances/{row.pk}/").text
    assert room.title in page
    assert room.page in page
    Instance.objects.filter(pk=neighbour.pk).update(reserved_bytes=GIB)
    assert proposals_of(row) == []  # it is placed at the next look


def test_context_is_proposed_by_what_is_left_beside_the_weights(host: Host) -> None:
    row = _failed(host)
    context = next(one for one in proposals_of(row) if one.kind == "context")
    tokens = context.changes["max_model_len"]
    assert tokens % 256 == 0
    assert 512 <= tokens < SMALL_FACTS["max_position_embeddings"]
    assert f"Shorten the context to {tokens} tokens" == context.title


def test_context_is_proposed_by_the_engines_own_estimate_where_it_gave_one(host: Host) -> None:
    log = "ValueError: … the estimated maximum model length is 6030. Try increasing …"
    row = _failed(host, code="kv_memory_too_small", log=log)
    context = next(one for one in proposals_of(row) if one.kind == "context")
    assert context.changes == {"max_model_len": 5888}
    assert "The engine reckons 6030 tokens; now it is 40960" in context.why


def test_limit_is_proposed_when_the_one_at_start_is_too_large(host: Host) -> None:
    row = _failed(host, initial_limit_bytes=10 * GIB)
    limit = next(one for one in proposals_of(row) if one.kind == "limit")
    assert 0 < limit.changes["initial_limit_bytes"] < 5 * GIB
    assert "limit" not in _kinds(_now_without_limit(row))


def _now_without_limit(row: Instance) -> Instance:
    Model.objects.filter(pk=row.model_id).update(initial_limit_bytes=None)
    return Instance.objects.select_related("model", "host", "attempt").get(pk=row.pk)


@pytest.mark.parametrize(
    "changes", [{"state": S.READY}, {"ready_at": "2026-01-01T00:00Z"}, {"state": S.PENDING, "host": None}]
)
def test_nothing_is_proposed_for_what_did_not_fail_at_load(host: Host, changes: dict[str, Any]) -> None:
    row = _failed(host)
    Instance.objects.filter(pk=row.pk).update(**changes)
    assert proposals_of(Instance.objects.select_related("model", "host", "attempt").get(pk=row.pk)) == []


def test_nothing_is_proposed_for_another_cause(host: Host) -> None:
    assert proposals_of(_failed(host, code="gated_repo")) == []


def test_taking_one_saves_it_and_starts_again(host: Host) -> None:
    row = _failed(host)
    context = next(one for one in proposals_of(row) if one.kind == "context")
    proposal_take(row, "context", actor="anna")
    row.refresh_from_db()
    assert (row.state, Model.objects.get(pk=row.model_id).max_model_len) == (
        S.PENDING,
        context.changes["max_model_len"],
    )
    with pytest.raises(NotFound):
        proposal_take(row, "context", actor="anna")


def test_room_is_not_made_without_its_plan(host: Host) -> None:
    with pytest.raises(Conflict, match="look at it"):
        proposal_take(_failed(host), "room", actor="anna")


def test_proposals_in_rest_and_on_the_page(host: Host, client: Client) -> None:
    row = _failed(host)
    headers = {"Authorization": f"Bearer {make_key()[1]}"}
    address = f"/api/v1/instances/{row.pk}/proposals"
    shown = client.get(address, headers=headers).json()
    assert [one["kind"] for one in shown] == ["room", "context"]
    page = client_of().get(f"/instances/{row.pk}/").content.decode()
    assert shown[1]["title"] in page
    assert f'href="/models/{row.model_id}/launch/"' in page
    assert f"/instances/{row.pk}/propose/context/" in page
    assert "/propose/context/" not in client_of("viewer").get(f"/instances/{row.pk}/").content.decode()
    answer = client.post(f"{address}/context", {}, content_type="application/json", headers=headers)
    assert (answer.status_code, answer.json()["state"]) == (202, "pending")


def test_button_on_the_page_does_it(host: Host) -> None:
    row = _failed(host)
    client_of().post(f"/instances/{row.pk}/propose/context/")
    row.refresh_from_db()
    assert row.state == S.PENDING


def test_room_that_is_there_meanwhile_is_said_to_be_there(host: Host) -> None:
    (room, *_) = proposals_of(_failed(host, neighbour_gib=2))
    assert room.title == "Launch it where there is room now"
