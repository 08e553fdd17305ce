"""Keys, usage and capture in Chromium: in the dialog, on a phone, and without script."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from django.contrib.auth.models import Permission, User
from playwright.sync_api import expect
from redis import Redis

from models_app.models import ApiKey
from models_app.services.capture import RING
from models_app.services.keys import api_key_check
from models_app.usage_report import today
from tests.browser.conftest import Visitor
from tests.builders import make_key, make_usage
from tests.models_app.test_capture import captured

pytestmark = pytest.mark.browser

Visit = Callable[..., Visitor]


def as_reader(visit: Visit, **options: object) -> Visitor:
    """An admin who may capture."""
    visitor = visit("admin", **options)
    User.objects.get().user_permissions.add(Permission.objects.get(codename="capture_prompts"))
    return visitor


def test_a_key_is_rotated_in_the_dialog(visit: Visit) -> None:
    key, old = make_key(name="billing")
    visitor = visit("admin")
    page = visitor.open("/keys/")
    page.click("a:has-text('Rotate')")
    page.select_option("#id_grace_s", "3600")
    page.click("dialog button:has-text('Make new secret')")
    token = page.locator("#rotated-key").inner_text()
    assert api_key_check(token) == api_key_check(old) == key
    page.click("dialog a:has-text('Done')")
    expect(page.locator("tbody")).to_contain_text("too, until")
    assert visitor.complaints == []


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
def test_capture_keeps_to_the_content_policy_and_to_its_width(
    visit: Visit, valkey: str, width: int, scheme: str
) -> None:
    key, _ = make_key(name="billing")
    visitor = as_reader(visit, width=width, color_scheme=scheme)
    page = visitor.open(f"/keys/{key.pk}/capture/")
    page.click("button:has-text('Switch on')")
    expect(page.locator(".banner:visible")).to_contain_text("Capture is on.")
    with Redis.from_url(valkey) as client:
        client.lpush(f"{RING}{key.pk}", json.dumps(captured(request="x" * 5000, answer="<script>alert(1)</script>")))
    page.click("a:has-text('Look again')")
    page.click("details.captured summary")
    expect(page.locator("details.captured")).to_contain_text("<script>alert(1)</script>")
    assert visitor.overflow() <= 0
    page.click("button:has-text('Switch off and delete')")
    expect(page.locator("h2").first).to_have_text("Off")
    assert visitor.complaints == []


def test_usage_is_filtered_where_it_stands(visit: Visit) -> None:
    make_usage(day=today(), key="billing", model="a", requests=7, prompt=700, completion=70)
    make_usage(day=today(), key="web", model="b", requests=5)
    visitor = visit()
    page = visitor.open("/usage/")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.select_option("#usage-key", "web")
    expect(page.locator("tbody tr")).to_have_count(1)
    assert "key=web" in page.url
    page.reload()
    expect(page.locator("tbody tr")).to_have_count(1)
    with page.expect_download() as download:
        page.click("a:has-text('CSV')")
    assert download.value.suggested_filename.startswith("usage-")
    assert "web,b,5" in download.value.path().read_text()
    assert visitor.complaints == []


def test_keys_usage_and_capture_need_no_script(visit: Visit) -> None:
    key, _ = make_key(name="billing")
    make_usage(day=today(), key="billing", model="a", requests=7, prompt=700, completion=70)
    visitor = as_reader(visit, java_script_enabled=False)
    page = visitor.open("/keys/")
    page.click("a:has-text('Change')")
    page.fill("#id_priority", "80")
    page.click("button:has-text('Save')")
    expect(page.locator("tbody")).to_contain_text("priority 80")
    page.click("a:has-text('Rotate')")
    page.click("button:has-text('Make new secret')")
    assert api_key_check(page.locator("#rotated-key").inner_text()) == key
    page.click("a:has-text('Done')")
    page.click("tbody a:has-text('Capture')")
    page.click("button:has-text('Switch on')")
    assert ApiKey.objects.get().is_captured
    page.click("button:has-text('Switch off')")
    assert not ApiKey.objects.get().is_captured
    page = visitor.open("/usage/")
    expect(page.locator("svg.usage-chart")).to_be_visible()
    page.select_option("#usage-by", "model")
    page.click("button:has-text('Show')")
    expect(page.locator("tbody td").first).to_have_text("a")
