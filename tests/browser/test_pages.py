"""The pages in Chromium: content policy, phone width, live values, dialogs, keyboard, and the way without script."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import pytest
from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer
from playwright.sync_api import expect

from gpus_app import broker
from gpus_app.models import Gpu, Host
from models_app.models import ApiKey, Instance, Model, Operation
from models_app.usage_report import today
from tests.browser.conftest import Visitor
from tests.builders import GIB, make_gpu, make_host, make_instance, make_key, make_model, make_usage
from tests.models_app.pages import read

pytestmark = pytest.mark.browser

Visit = Callable[..., Visitor]


def fleet() -> list[Instance]:
    """A card with a served model, one that shrinks, one that starts and one that failed."""
    host = make_host()
    gpu = make_gpu(host=host)
    make_gpu(host=host, index=1, state="missing", state_reason="It fell off the bus.")
    rows = [
        make_instance(
            model=make_model(served_model_name="qwen"), gpus=[gpu], limit_bytes=8 * GIB, limit_status="applied"
        ),
        make_instance(
            model=make_model(served_model_name="llama"), gpus=[gpu], limit_bytes=2 * GIB, limit_status="deferred"
        ),
        make_instance(
            model=make_model(served_model_name="gemma"), gpus=[gpu], state="starting", stage="loading weights"
        ),
        make_instance(model=make_model(served_model_name="phi"), gpus=[gpu], state="failed", first_cause="No room."),
    ]
    Operation.objects.create(kind="make_room", title="Make room for phi", state="running", progress=0.4, steps=[])
    make_key(name="billing")
    make_usage(day=today(), key="billing", model="qwen", requests=7, prompt=700, completion=70)
    read(host, rows[:3])
    return rows


def pages(rows: list[Instance]) -> list[str]:
    row, gpu = rows[0], Gpu.objects.get(index=0)
    return [
        "/",
        "/gpus/",
        f"/gpus/{gpu.pk}/",
        "/models/",
        f"/models/{row.model_id}/",
        "/models/new/",
        f"/models/{row.model_id}/edit/",
        f"/models/{rows[3].model_id}/launch/",
        *[f"/instances/{one.pk}/" for one in rows],
        f"/instances/{row.pk}/limit/",
        f"/instances/{row.pk}/move/",
        "/stop-all/",
        "/playground/",
        "/policies/",
        "/limits/",
        f"/gpus/{gpu.pk}/policy/",
        "/presets/",
        "/operations/",
        f"/operations/{Operation.objects.get().pk}/",
        "/usage/",
        "/keys/",
        *[f"/keys/{ApiKey.objects.get().pk}/{part}/" for part in ("edit", "rotate")],
        "/audit/",
    ]


def tell(message: dict[str, Any]) -> None:
    """Send to every page, from a thread of its own: an event loop counts as running in this one."""
    layer = get_channel_layer()
    assert layer is not None
    with ThreadPoolExecutor(1) as pool:
        pool.submit(async_to_sync(layer.group_send), "live", message).result(10)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_every_page_keeps_to_the_content_policy_and_to_its_width(visit: Visit, width: int, scheme: str) -> None:
    rows = fleet()
    visitor = visit("admin", width=width, color_scheme=scheme)
    for path in pages(rows):
        page = visitor.open(path)
        page.locator("html[data-link]").wait_for(state="attached")
        assert visitor.overflow() <= 0, f"{path} is {visitor.overflow()} px wider than {width}"
        assert page.evaluate("document.documentElement.dataset.bsTheme") == scheme
        assert visitor.complaints == [], path


def test_a_reading_moves_bar_and_numbers_without_a_reload(visit: Visit) -> None:
    rows = fleet()
    visitor = visit("viewer")
    page = visitor.open("/gpus/")
    visitor.wait_live()
    line = page.locator(f'tr[data-row="{rows[0].pk}"]')
    expect(line.locator('[data-f="used"]')).to_have_text("3.0")
    before = page.locator(f'g[data-key="i{rows[0].pk}"][data-part="used"] rect').first.get_attribute("width")
    record = read(Host.objects.get(), rows[:3], used=5 * GIB, resident=8 * GIB, running=9)
    tell({"type": "sample", "record": record})
    expect(line.locator('[data-f="used"]')).to_have_text("5.0")
    expect(line.locator('[data-f="running"]')).to_have_text("9")
    after = page.locator(f'g[data-key="i{rows[0].pk}"][data-part="used"] rect').first.get_attribute("width")
    assert float(str(after).rstrip("%")) > float(str(before).rstrip("%"))
    assert visitor.complaints == []


def test_a_change_of_state_refreshes_the_row_where_it_stands(visit: Visit) -> None:
    rows = fleet()
    visitor = visit("viewer")
    page = visitor.open("/gpus/")
    visitor.wait_live()
    order = page.locator("tr[data-row]").evaluate_all("rows => rows.map(row => row.dataset.row)")
    Instance.objects.filter(pk=rows[2].pk).update(state="ready", stage="ready")
    tell({"type": "instance.changed", "instance_id": rows[2].pk})
    expect(page.locator(f'tr[data-row="{rows[2].pk}"] .state').first).to_contain_text("Ready")
    assert page.locator("tr[data-row]").evaluate_all("rows => rows.map(row => row.dataset.row)") == order


def test_the_chart_is_drawn_from_history(visit: Visit) -> None:
    rows = fleet()
    gpu = Host.objects.get().gpus.first()
    assert gpu is not None
    now = time.time()
    for ago in range(60, 0, -1):
        part = {"id": rows[0].pk, "name": "qwen", "used": ago * GIB // 10, "limit": 8 * GIB}
        entry = {"t": now - ago, "total": gpu.total_bytes, "used": GIB, "instances": [part]}
        stamp = f"{int((now - ago) * 1000)}-0"
        broker.client().xadd(broker.gpu_stream_key(gpu.uuid), {"d": orjson.dumps(entry)}, id=stamp)
    visitor = visit("viewer")
    page = visitor.open("/gpus/")
    expect(page.locator(f"#chart-{gpu.pk} canvas")).to_have_count(1)
    page.click(f"#windows-{gpu.pk} a:has-text('15 min')")
    expect(page.locator(f"#windows-{gpu.pk} [aria-current]")).to_have_text("15 min")
    assert visitor.complaints == []


def test_the_parts_of_a_bar_are_walked_by_keyboard(visit: Visit) -> None:
    fleet()
    visitor = visit("viewer")
    page = visitor.open("/gpus/")
    page.locator("svg.membar g.seg[tabindex='0']").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("[data-readout]").first).to_contain_text("qwen: KV in use 3.0 GiB")
    page.keyboard.press("End")
    expect(page.locator("[data-readout]").first).to_contain_text("free")


def test_the_limit_dialog_previews_refuses_and_gives_the_focus_back(visit: Visit) -> None:
    rows = fleet()
    visitor = visit()
    page = visitor.open("/gpus/")
    opener = page.locator(f'tr[data-row="{rows[0].pk}"] a:has-text("Limit")').first
    opener.click()
    dialog = page.locator("#dialog[open]")
    expect(dialog.locator("h2")).to_have_text("KV limit of qwen")
    expect(dialog.locator("#limit-preview")).to_contain_text("GPU after")
    dialog.locator("#id_size").fill("300M")
    expect(dialog.locator("#limit-preview")).to_contain_text("Below the safety floor")
    dialog.locator("#id_size").fill("plenty")
    dialog.locator("button[type=submit]").click()
    expect(dialog.locator("#size-errors")).to_contain_text("is not a size")
    page.keyboard.press("Escape")
    expect(page.locator("#dialog")).not_to_have_attribute("open", "")
    expect(opener).to_be_focused()
    assert visitor.complaints == []


def test_the_form_judges_while_it_is_filled_in_and_keeps_what_was_typed(visit: Visit) -> None:
    fleet()
    visitor = visit()
    page = visitor.open("/models/new/")
    page.check("input[value='Qwen/Qwen3-0.6B']")
    expect(page.locator("#id_served_model_name")).to_have_value("qwen3-0.6b")
    expect(page.locator("#check")).to_contain_text("Fits")
    expect(page.locator("#check pre")).to_contain_text("--served-model-name qwen3-0.6b")
    page.fill("#id_replicas", "many")
    page.click("button[data-save]:has-text('Save'):not([name])")
    expect(page.locator("#id_replicas-errors")).to_contain_text("whole number")
    expect(page.locator("#id_replicas")).to_be_focused()
    expect(page.locator("#id_served_model_name")).to_have_value("qwen3-0.6b")
    page.fill("#id_replicas", "1")
    page.click("button[data-save]:has-text('Save'):not([name])")
    page.wait_for_url("**/models/*/")
    expect(page.locator("h1")).to_have_text("qwen3-0.6b")
    assert visitor.complaints == []


def test_the_theme_is_switched_at_once_and_stays_after_a_reload(visit: Visit) -> None:
    fleet()
    visitor = visit("viewer", color_scheme="light")
    page = visitor.open("/gpus/")
    page.click("summary[aria-label='Account and theme']")
    page.click("button[value='dark']")
    expect(page.locator("html")).to_have_attribute("data-bs-theme", "dark")
    response = page.reload()
    assert response is not None
    assert 'data-bs-theme="dark"' in response.text()


def test_without_a_socket_the_page_polls_and_says_so(visit: Visit) -> None:
    rows = fleet()
    visitor = visit("viewer")
    visitor.page.route_web_socket("**/ws/live*", lambda ws: ws.close())
    page = visitor.open("/gpus/")
    expect(page.locator("#link-state")).to_have_text("Polling every 5 s", timeout=30_000)
    expect(page.locator("#link-banner")).to_be_visible()
    read(Host.objects.get(), rows[:3], used=6 * GIB, resident=9 * GIB)
    expect(page.locator(f'tr[data-row="{rows[0].pk}"] [data-f="used"]')).to_have_text("6.0", timeout=30_000)


def test_a_link_that_comes_back_fetches_what_was_missed(visit: Visit) -> None:
    rows = fleet()
    visitor = visit("viewer")
    refuse = {"on": False}

    def link(ws: Any) -> None:
        if refuse["on"]:
            ws.close()
        else:
            ws.connect_to_server()
            links.append(ws)

    links: list[Any] = []
    visitor.page.route_web_socket("**/ws/live*", link)
    page = visitor.open("/gpus/")
    visitor.wait_live()
    refuse["on"] = True
    links[-1].close()
    expect(page.locator("#link-state")).to_have_text("Reconnecting", timeout=30_000)
    Instance.objects.filter(pk=rows[0].pk).update(state="draining")
    refuse["on"] = False
    visitor.wait_live()
    expect(page.locator(f'tr[data-row="{rows[0].pk}"] .state').first).to_contain_text("Draining")


def test_the_header_folds_on_a_phone(visit: Visit) -> None:
    fleet()
    visitor = visit("viewer", width=390)
    page = visitor.open("/")
    expect(page.locator(".nav-main")).to_be_hidden()
    page.click("summary[aria-label='Menu']")
    page.click(".nav-fold a:has-text('GPUs')")
    page.wait_for_url("**/gpus/")


def test_the_operators_path_needs_no_script(visit: Visit) -> None:
    fleet()
    visitor = visit(java_script_enabled=False)
    page = visitor.open("/gpus/")
    expect(page.locator("svg.membar").first).to_be_visible()
    page.click("a:has-text('Add model')")
    page.check("input[value='Qwen/Qwen3-0.6B']", force=True)
    page.fill("#id_served_model_name", "plain")
    page.click("button[name=check]")
    expect(page.locator("#check")).to_contain_text("Fits")
    page.click("button[data-save]:has-text('Save'):not([name])")
    model = Model.objects.get(served_model_name="plain")
    page.wait_for_url(f"**/models/{model.pk}/")
    page.click("a:has-text('Launch') >> nth=0")
    expect(page.locator("h2").first).to_have_text("Launch plain")
    page.click("button:has-text('Launch')")
    row = Instance.objects.get(model=model)
    page.wait_for_url(f"**/instances/{row.pk}/")
    expect(page.locator(".stepper")).to_be_visible()
    page.click("a:has-text('Cancel')")
    page.click("button:has-text('Cancel the start')")
    expect(page.locator(".alert-success")).to_contain_text("is being stopped")
