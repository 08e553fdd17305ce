"""One error shape, roles on every route, the exported schema, and nothing that answers 5xx to nonsense."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from models_app.api.v1 import api as ninja_api
from models_app.models import ApiKey
from tests.builders import make_instance, make_key, make_user
from tests.models_app.api.conftest import MODEL, Api

EXPORTED = Path(__file__).resolve().parents[3] / "models_app" / "api" / "openapi.json"
SCHEMA = ninja_api.get_openapi_schema()
OPERATIONS = [
    (method.upper(), path.removeprefix("/api/v1"))
    for path, methods in SCHEMA["paths"].items()
    for method in methods
    if method in ("get", "post", "patch", "put", "delete")
]


def _filled(path: str) -> str:
    for name, value in {"served_model_name": "a", "instance_id": "1", "operation_id": "1", "uuid": "GPU-x"}.items():
        path = path.replace("{" + name + "}", value)
    return path.replace("{name}", "x")


def test_schema_is_openapi_3_1() -> None:
    assert SCHEMA["openapi"].startswith("3.1")


def test_exported_schema_is_the_served_one() -> None:
    """``make openapi`` writes it anew."""
    assert json.loads(EXPORTED.read_text()) == json.loads(json.dumps(SCHEMA, default=str))


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=str)
def test_strangers_get_401_in_the_one_shape(db: None, method: str, path: str) -> None:
    status, body = Api()(method, _filled(path), {} if method in ("POST", "PATCH") else None)
    assert status == 401
    assert body["error"]["code"] == "unauthenticated"


@pytest.mark.parametrize(("method", "path"), [o for o in OPERATIONS if o[0] != "GET"], ids=str)
def test_viewers_change_nothing(api_as: Callable[[str], Api], method: str, path: str) -> None:
    """SZ-119: every writing route, walked from the schema."""
    if path.endswith("/fit"):
        pytest.skip("reads only")
    status, body = api_as("viewer")(method, _filled(path), {} if method in ("POST", "PATCH") else None)
    assert (status, body["error"]["code"]) == (403, "forbidden")


def test_a_word_in_the_query_opens_nothing(db: None) -> None:
    """SZ-118."""
    assert Api()("GET", "/models?auth_error=x")[0] == 401


def test_revoked_and_expired_keys_are_refused(db: None) -> None:
    key, token = make_key()
    assert Api(token)("GET", "/models")[0] == 200
    ApiKey.objects.filter(pk=key.pk).update(revoked_at="2026-01-01T00:00:00Z")
    assert Api(token)("GET", "/models")[0] == 401


def test_a_session_needs_its_csrf_token_to_write(db: None) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(make_user(role="operator"))
    assert client.get("/api/v1/models").status_code == 200
    answer = client.post("/api/v1/models", data=json.dumps(MODEL), content_type="application/json")
    assert answer.status_code == 403
    assert "CSRF" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({**MODEL, "replicas": 0}, "replicas"),
        ({**MODEL, "tensor_parallel_size": "two"}, "tensor_parallel_size"),
        ({**MODEL, "no_such_field": 1}, "no_such_field"),
        ({**MODEL, "served_model_name": "a\x00"}, "served_model_name"),
        ({**MODEL, "extra_args": "--port 1"}, "extra_args"),
        ({"served_model_name": "a", "source": "elsewhere", "model": "x"}, "source"),
    ],
)
def test_a_bad_value_names_its_field(api: Api, body: dict[str, Any], field: str) -> None:
    status, answer = api("POST", "/models", body)
    assert status == 422
    assert field in answer["error"]["fields"]


def test_body_that_is_no_json_is_400(api: Api) -> None:
    answer = api.client.post("/api/v1/models", data="{", content_type="application/json")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "bad_request"


def test_unknown_things_are_404_with_a_sentence(api: Api) -> None:
    for path in ("/models/none", "/instances/99999", "/gpus/none", "/hosts/none", "/operations/9"):
        status, body = api("GET", path)
        assert (status, body["error"]["code"]) == (404, "not_found"), path
        assert body["error"]["message"].endswith(".")


def test_line_break_in_a_name_is_answered_in_the_one_shape(api: Api) -> None:
    api.client.handler.enforce_csrf_checks = True
    for method in ("GET", "POST", "DELETE"):
        status, body = api(method, "/models/a%0Ab/launch", {})
        assert (status, body["error"]["code"]) == (404, "not_found")


def test_huge_ids_are_refused_not_crashed_on(api: Api) -> None:
    assert api("GET", f"/instances/{10**30}")[0] == 422


def test_the_engines_token_is_nowhere_in_an_answer(api: Api) -> None:
    instance = make_instance()
    for path in ("/instances", f"/instances/{instance.pk}", f"/instances/{instance.pk}/attempts"):
        assert instance.engine_token not in json.dumps(api("GET", path)[1])
