"""Weighted routes and defaults of aliases: what is accepted, what the routers are told, what the pages show."""

from __future__ import annotations

from typing import Any

import pytest

from models_app.errors import InvalidInput
from models_app.models import WeightedRoute
from models_app.router.table import RouteTable
from models_app.selectors import routes_snapshot
from models_app.services.models import model_create, model_delete, model_update
from models_app.services.routes import route_delete, route_save
from tests.builders import make_instance, make_key, make_model
from tests.models_app.api.conftest import Api
from tests.models_app.pages import client_of

pytestmark = pytest.mark.django_db


def _wrong(**fields: Any) -> dict[str, list[str]]:
    with pytest.raises(InvalidInput) as caught:
        route_save(fields.pop("name", "split"), actor="test", **fields)
    return caught.value.fields


def test_router_gets_the_name_with_its_models_and_weights() -> None:
    make_instance(model=make_model(served_model_name="old"))
    make_model(served_model_name="new")
    route_save("split", actor="test", targets={"old": 9, "new": "1"}, request_defaults={"top_p": 0.5})
    table = RouteTable.from_snapshot(routes_snapshot())
    assert sorted(table.names["split"].choices) == [("new", 1), ("old", 9)]
    assert table.names["split"].defaults == {"top_p": 0.5}


@pytest.mark.parametrize("weight", [0, -1, 1001, 1.5, "much", None, True])
def test_weight_is_a_positive_whole_number(weight: Any) -> None:
    make_model(served_model_name="a")
    assert _wrong(targets={"a": weight}) == {"targets": ["The weight of a is not a whole number from 1 to 1000."]}


def test_route_needs_models_that_exist() -> None:
    assert _wrong(targets={}) == {"targets": ["Choose at least one model, with a weight."]}
    assert _wrong(targets={"b": 1, "x\0": 1})["targets"][0] == "There is no model named 'b'."


@pytest.mark.parametrize("name", ["a", "also-a", "taken"])
def test_name_in_use_is_refused_at_its_field(name: str) -> None:
    make_model(served_model_name="a", aliases=["also-a"])
    route_save("taken", actor="test", targets={"a": 1})
    assert "already" in _wrong(name=name, targets={"a": 1})["name"][0]


def test_model_and_alias_cannot_take_the_name_of_a_route() -> None:
    model = make_model(served_model_name="a")
    route_save("split", actor="test", targets={"a": 1})
    with pytest.raises(InvalidInput) as caught:
        model_update(model, actor="test", aliases=["split"])
    assert caught.value.fields == {"aliases": ["'split' is a weighted route already."]}
    with pytest.raises(InvalidInput) as caught:
        model_create(actor="test", served_model_name="split", source="catalogue", model="Qwen/Qwen3-0.6B")
    assert caught.value.fields == {"served_model_name": ["'split' is a weighted route already."]}


def test_what_decides_where_a_request_goes_is_no_default() -> None:
    make_model(served_model_name="a")
    assert "request_defaults" in _wrong(targets={"a": 1}, request_defaults={"model": "b"})


def test_change_replaces_the_models_and_keeps_the_row() -> None:
    make_model(served_model_name="a")
    make_model(served_model_name="b")
    route = route_save("split", actor="test", targets={"a": 1})
    route_save("renamed", actor="test", targets={"b": 2}, route=route)
    (row,) = WeightedRoute.objects.all()
    assert row.name == "renamed"
    assert [(one.model.served_model_name, one.weight) for one in row.targets.all()] == [("b", 2)]


def test_deleted_model_leaves_the_route_and_deleted_route_leaves_its_models() -> None:
    model = make_model(served_model_name="a")
    make_model(served_model_name="b")
    route = route_save("split", actor="test", targets={"a": 1, "b": 1})
    model_delete(model, actor="test")
    assert [one["model"] for one in routes_snapshot()["routes"][0]["targets"]] == ["b"]
    route_delete(route, actor="test")
    assert routes_snapshot()["routes"] == []
    assert [one["name"] for one in routes_snapshot()["models"]] == ["b"]


def test_rest_puts_shows_and_deletes() -> None:
    make_model(served_model_name="a")
    api = Api(make_key()[1])
    status, body = api("PUT", "/routes/team/split", {"targets": {"a": 3}})
    assert (status, body["targets"]) == (200, {"a": 3})
    status, body = api("PUT", "/routes/team/split", {"targets": {"nope": 3}})
    assert (status, list(body["error"]["fields"])) == (422, ["targets"])
    assert api("GET", "/routes")[1][0]["name"] == "team/split"
    assert api("DELETE", "/routes/team/split")[0] == 204
    assert api("GET", "/routes/team/split")[0] == 404


def test_page_makes_changes_and_deletes_a_route() -> None:
    make_model(served_model_name="a")
    make_model(served_model_name="b")
    client = client_of("operator")
    answer = client.post("/routes/", {"name": "split", "model": ["a", "b", ""], "weight": ["3", "1", ""]})
    route = WeightedRoute.objects.get()
    assert answer.headers["Location"] == f"/routes/{route.pk}/"
    page = client.get(f"/routes/{route.pk}/").content.decode()
    assert "75 %" in page and "25 %" in page
    answer = client.post(f"/routes/{route.pk}/", {"name": "split", "model": ["a", "a"], "weight": ["3", "1"]})
    assert answer.status_code == 422
    assert "a stands there twice." in answer.content.decode()
    answer = client.post(f"/routes/{route.pk}/", {"name": "a", "model": ["a"], "weight": ["0"]})
    text = answer.content.decode()
    assert "There is a model named &#x27;a&#x27; already." in text
    assert "The weight of a is not a whole number" in text
    client.post(f"/routes/{route.pk}/delete/")
    assert not WeightedRoute.objects.exists()


def test_page_of_a_viewer_has_no_form() -> None:
    make_model(served_model_name="a")
    route_save("split", actor="test", targets={"a": 1})
    client = client_of("viewer")
    assert "<fieldset" not in client.get("/routes/").content.decode()
    assert client.post("/routes/", {"name": "x"}).status_code == 403


# --- aliases ---------------------------------------------------------------------------------------


def test_alias_carries_its_own_defaults_to_the_router() -> None:
    model = make_model(served_model_name="a", request_defaults={"temperature": 1, "top_p": 0.9})
    model_update(model, actor="test", aliases=["exact", "plain"], alias_defaults={"exact": {"temperature": 0}})
    table = RouteTable.from_snapshot(routes_snapshot())
    assert table.names["exact"].defaults == {"temperature": 0, "top_p": 0.9}
    assert table.names["plain"].defaults == {"temperature": 1, "top_p": 0.9}
    model_update(model, actor="test", aliases=["exact"])
    assert model.alias_defaults == {"exact": {"temperature": 0}}
    model_update(model, actor="test", alias_defaults="")
    assert model.alias_defaults == {}
    assert [alias.name for alias in model.aliases.all()] == ["exact"]


@pytest.mark.parametrize("given", [{"other": {}}, {"exact": {"model": "b"}}, {"exact": 1}, "{", [1]])
def test_defaults_of_what_is_no_alias_are_refused(given: Any) -> None:
    model = make_model(served_model_name="a", aliases=["exact"])
    with pytest.raises(InvalidInput) as caught:
        model_update(model, actor="test", alias_defaults=given)
    assert list(caught.value.fields) == ["alias_defaults"]


def test_defaults_of_an_alias_are_no_option_of_the_engine() -> None:
    model = make_model(served_model_name="a", aliases=["exact"])
    model_update(model, actor="test", alias_defaults={"exact": {"temperature": 0}}, first_byte_limit_s=5)
    assert model.spec_revision == 1


@pytest.mark.parametrize("field", ["first_byte_limit_s", "idle_limit_s"])
@pytest.mark.parametrize("value", [0, -1, 86_401, "soon"])
def test_time_limits_are_whole_seconds_of_a_day(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        model_update(make_model(), actor="test", **{field: value})
    assert list(caught.value.fields) == [field]


def test_time_limits_and_affinity_reach_the_router_and_the_page() -> None:
    model = make_model(served_model_name="a")
    model_update(model, actor="test", first_byte_limit_s="90", idle_limit_s=30, prefix_affinity=True)
    route = RouteTable.from_snapshot(routes_snapshot()).models["a"]
    assert (route.first_byte_s, route.idle_s, route.affinity) == (90, 30, True)
    page = client_of("viewer").get(f"/models/{model.pk}/").content.decode()
    assert "prompts that begin alike" in page
    form = client_of("operator").get(f"/models/{model.pk}/edit/").content.decode()
    assert 'name="first_byte_limit_s"' in form and 'value="90"' in form
