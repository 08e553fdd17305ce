"""Weighted routes in Chromium: made and changed in light, dark, on a phone, and without script."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import expect

from models_app.models import WeightedRoute
from models_app.services.routes import route_save
from tests.browser.conftest import Visitor
from tests.builders import make_model

pytestmark = pytest.mark.browser

Visit = Callable[..., Visitor]


@pytest.fixture(autouse=True)
def two_models(transactional_db: None) -> None:
    for name in ("llama-3.1-8b-instruct", "qwen3-8b"):
        make_model(served_model_name=name)


@pytest.mark.parametrize("script", [True, False])
def test_route_is_made_and_a_wrong_one_is_told_at_its_field(visit: Visit, script: bool) -> None:
    visitor = visit("operator", java_script_enabled=script)
    page = visitor.open("/routes/")
    page.fill("#route-name", "assistant")
    for number, (model, weight) in enumerate((("llama-3.1-8b-instruct", "9"), ("qwen3-8b", "0")), start=1):
        page.get_by_label(f"Model {number}", exact=True).select_option(model)
        page.get_by_label(f"Weight of model {number}").fill(weight)
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_text("The weight of qwen3-8b is not a whole number from 1 to 1000.")).to_be_visible()
    page.get_by_label("Weight of model 2").fill("1")
    page.get_by_role("button", name="Save").click()
    page.wait_for_url("**/routes/*/")
    expect(page.get_by_role("cell", name="90 %")).to_be_visible()
    assert WeightedRoute.objects.get().targets.count() == 2
    assert visitor.complaints == []


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_page_fits_its_window(visit: Visit, width: int, scheme: str) -> None:
    route = route_save("assistant", actor="test", targets={"llama-3.1-8b-instruct": 9, "qwen3-8b": 1})
    visitor = visit("operator", width=width, color_scheme=scheme)
    for path in ("/routes/", f"/routes/{route.pk}/"):
        visitor.open(path)
        assert visitor.overflow() == 0
    assert visitor.complaints == []
