"""Keys, usage and capture over REST: who may, what is told once, and what it does."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from redis import Redis

from models_app.models import ApiKey, AuditEntry
from models_app.services.capture import RING
from models_app.usage_report import today
from tests.builders import make_key, make_model, make_usage, make_user
from tests.models_app.api.conftest import Api
from tests.models_app.test_capture import captured


@pytest.fixture
def admin(api_as: Callable[[str], Api]) -> Api:
    return api_as("admin")


@pytest.fixture
def reader(db: None) -> Api:
    """An admin's key that may capture."""
    return Api(make_key(name="reader", role="admin", may_capture=True)[1])


def session(*, permission: bool, **fields: Any) -> Client:
    user = make_user(role="admin", **fields)
    if permission:
        user.user_permissions.add(Permission.objects.get(codename="capture_prompts"))
    client = Client()
    client.force_login(User.objects.get(pk=user.pk))
    return client


# --- keys ------------------------------------------------------------------------------------------


def test_key_with_everything_is_made_and_shown_without_its_secret(admin: Api) -> None:
    make_model(served_model_name="a")
    body = {"name": "ci", "role": "viewer", "models": ["a"], "requests_per_minute": 5, "priority": 80}
    status, made = admin("POST", "/keys", body)
    assert status == 201
    assert (made["priority"], made["may_capture"], made["capture_until"]) == (80, False, None)
    assert Api(made["key"])("GET", "/models")[0] == 200
    status, keys = admin("GET", "/keys")
    assert status == 200
    assert made["key"] not in json.dumps(keys)


def test_only_what_is_sent_is_changed(admin: Api) -> None:
    make_key(name="ci", requests_per_minute=5, tokens_per_minute=7)
    status, row = admin("PATCH", "/keys/ci", {"requests_per_minute": None, "priority": 90})
    assert status == 200
    assert (row["requests_per_minute"], row["tokens_per_minute"], row["priority"]) == (None, 7, 90)
    status, row = admin("PATCH", "/keys/ci", {"models": ["none"]})
    assert status == 422
    assert "models" in row["error"]["fields"]
    assert admin("PATCH", "/keys/none", {})[0] == 404
    assert admin("PATCH", "/keys/ci", {"name": "x"})[0] == 422


def test_rotation_answers_the_new_secret_and_keeps_the_old_one_for_a_while(admin: Api) -> None:
    _, old = make_key(name="ci")
    status, row = admin("POST", "/keys/ci/rotate", {"grace_s": 3600})
    assert status == 200
    assert row["previous_until"] is not None
    for token in (old, row["key"]):
        assert Api(token)("GET", "/models")[0] == 200
    status, row = admin("POST", "/keys/ci/rotate", {"grace_s": 0})
    assert row["previous_until"] is None
    assert Api(old)("GET", "/models")[0] == 401
    assert admin("POST", "/keys/ci/rotate", {})[0] == 422  # the grace is the operator's to choose
    assert admin("POST", "/keys/ci/rotate", {"grace_s": 10**9})[0] == 422
    assert admin("DELETE", "/keys/ci")[0] == 204
    assert admin("POST", "/keys/ci/rotate", {"grace_s": 0})[0] == 409


# --- capture ---------------------------------------------------------------------------------------


def test_capture_is_switched_read_and_ended(reader: Api, valkey: str) -> None:
    key, _ = make_key(name="ci")
    status, row = reader("PUT", "/keys/ci/capture", {"seconds": 600})
    assert status == 200
    assert row["capture_until"] is not None
    with Redis.from_url(valkey) as client:
        client.lpush(f"{RING}{key.pk}", json.dumps(captured(answer="hello")))
    status, ring = reader("GET", "/keys/ci/capture")
    assert [one["answer"] for one in ring] == ["hello"]
    assert reader("DELETE", "/keys/ci/capture")[0] == 204
    assert reader("GET", "/keys/ci/capture") == (200, [])
    acts = AuditEntry.objects.filter(action__startswith="capture.").order_by("pk")
    assert list(acts.values_list("actor", "action")) == [
        ("key:reader", "capture.on"),
        ("key:reader", "capture.read"),
        ("key:reader", "capture.off"),
    ]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
def test_no_role_alone_may_capture(api_as: Callable[[str], Api], method: str, role: str) -> None:
    make_key(name="ci")
    status, body = api_as(role)(method, "/keys/ci/capture", {} if method == "PUT" else None)
    assert (status, body["error"]["code"]) == (403, "forbidden")
    assert ApiKey.objects.get(name="ci").capture_until is None


def test_an_admins_session_needs_the_permission(db: None) -> None:
    make_key(name="ci")
    assert session(permission=False).get("/api/v1/keys/ci/capture").status_code == 403
    assert session(permission=True).get("/api/v1/keys/ci/capture").status_code == 200


def test_nobody_gives_away_the_right_to_capture_without_having_it(admin: Api, reader: Api) -> None:
    body = {"name": "x", "role": "admin", "may_capture": True}
    assert admin("POST", "/keys", body)[0] == 403
    make_key(name="ci", role="admin")
    assert admin("PATCH", "/keys/ci", {"may_capture": True})[0] == 403
    assert reader("POST", "/keys", body)[0] == 201
    assert reader("PATCH", "/keys/ci", {"may_capture": True})[0] == 200
    assert admin("PATCH", "/keys/ci", {"may_capture": False})[0] == 200  # to take it away is no gift


def test_time_of_capture_is_bounded(reader: Api) -> None:
    make_key(name="ci")
    status, body = reader("PUT", "/keys/ci/capture", {"seconds": 10**6})
    assert status == 422
    assert "SARDEENZ_CAPTURE_MAX_S" in body["error"]["message"]


# --- usage -----------------------------------------------------------------------------------------


def test_usage_comes_in_pages_with_the_total_of_all(api: Api) -> None:
    for number in range(5):
        make_usage(day=today(), key=f"k{number}", model="a", requests=2, ttft_histogram={"50": 2})
    status, body = api("GET", "/usage?limit=2&offset=4")
    assert status == 200
    assert (body["count"], [line["key"] for line in body["items"]]) == (5, ["k4"])
    assert (body["totals"]["requests"], body["totals"]["ttft_p50_ms"]) == (10, 37.5)
    assert (body["start"], body["end"]) == (str(today() - timedelta(days=6)), str(today()))
    _, body = api("GET", f"/usage?by=model&key=k1&start={today()}&end={today()}")
    assert [(line["day"], line["key"], line["model"], line["requests"]) for line in body["items"]] == [
        (None, None, "a", 2)
    ]
    status, body = api("GET", "/usage?start=2026-11-30&end=2026-11-29")
    assert status == 422
    assert "start" in body["error"]["fields"]


def test_a_viewers_key_sees_its_own_usage_only(db: None) -> None:
    _, token = make_key(name="mine", role="viewer")
    make_usage(day=today(), key="mine", model="a", requests=2)
    make_usage(day=today(), key="theirs", model="a", requests=5)
    mine = Api(token)
    _, body = mine("GET", "/usage")
    assert [(line["key"], line["requests"]) for line in body["items"]] == [("mine", 2)]
    assert mine("GET", "/usage?key=mine")[0] == 200
    assert mine("GET", "/usage?key=theirs")[0] == 403
    assert mine.client.get("/api/v1/usage.csv").getvalue().decode().count("\r\n") == 2
    viewer = Client()
    viewer.force_login(make_user(role="viewer"))
    assert viewer.get("/api/v1/usage").status_code == 403


def test_usage_as_a_file(api: Api) -> None:
    make_usage(day=today(), key="ci", model="a", requests=2)
    answer = api.client.get("/api/v1/usage.csv")
    assert answer.headers["Content-Type"] == "text/csv; charset=utf-8"
    assert answer.getvalue().decode().splitlines()[1].startswith(f"{today()},ci,a,2,")
