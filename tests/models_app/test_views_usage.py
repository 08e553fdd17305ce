"""The page of usage and its file: filters, roles, without JavaScript, and streamed under ASGI."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.test import AsyncClient

from models_app.usage_report import today
from tests.builders import make_usage, make_user
from tests.models_app.pages import client_of, htmx

pytestmark = pytest.mark.django_db


def test_page_shows_the_last_seven_days_with_totals_and_chart(django_assert_max_num_queries: Any) -> None:
    make_usage(day=today(), key="ci", model="a", requests=1234, prompt=10, completion=5, ttft_histogram={"50": 2})
    make_usage(day=today() - timedelta(days=7), key="old", model="a", requests=7)
    client = client_of("operator")
    with django_assert_max_num_queries(9):
        text = client.get("/usage/").content.decode()
    assert "1,234" in text
    assert "38 ms / 49 ms" in text
    assert '<svg class="usage-chart"' in text
    assert "<td>ci</td>" in text
    assert "<td>old</td>" not in text
    assert "/usage.csv" in text


def test_filters_are_a_plain_form_and_stay_in_the_address_of_the_file() -> None:
    make_usage(day=today(), key="ci", model="a")
    make_usage(day=today(), key="web", model="b")
    text = client_of().get(f"/usage/?start={today()}&end={today()}&key=web&by=key").content.decode()
    assert "<td>web</td>" in text
    assert "<td>ci</td>" not in text
    assert '<option value="web" selected>' in text
    assert f"/usage.csv?start={today()}&amp;end={today()}&amp;key=web" in text


def test_htmx_gets_the_part_and_the_address_gets_the_page() -> None:
    client = client_of()
    assert "<html" not in client.get("/usage/", **htmx("usage")).content.decode()
    assert "<html" in client.get("/usage/").content.decode()


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("start=yesterday", "Give the first day as YYYY-MM-DD."),
        ("end=2026-02-30", "Give the last day as YYYY-MM-DD."),
        ("start=2026-11-30&end=2026-11-29", "The first day lies after the last one."),
        ("start=2020-01-01&end=2026-11-29", "Choose at most 366 days."),
    ],
)
def test_nonsense_is_said_and_the_default_is_shown(query: str, sentence: str) -> None:
    make_usage(day=today(), key="ci", model="a")
    response = client_of().get(f"/usage/?{query}")
    assert response.status_code == 422
    text = response.content.decode()
    assert sentence in text
    assert "<td>ci</td>" in text
    assert client_of().get(f"/usage.csv?{query}").status_code == 422


def test_the_first_day_of_all_is_a_day() -> None:
    assert client_of().get("/usage/?end=0001-01-01").status_code == 200


def test_lines_are_paged() -> None:
    for number in range(60):
        make_usage(day=today(), key=f"k{number:02}", model="a")
    client = client_of()
    assert "Page 1 of 2" in client.get("/usage/").content.decode()
    second = client.get("/usage/?page=2").content.decode()
    assert "<td>k59</td>" in second
    assert "<td>k00</td>" not in second


def test_names_of_keys_are_not_for_viewers() -> None:
    client = client_of("viewer")
    assert client.get("/usage/").status_code == 403
    assert client.get("/usage.csv").status_code == 403
    assert "/usage/" not in client.get("/").content.decode()


def test_file_is_a_download_of_what_is_shown() -> None:
    make_usage(day=today(), key="ci", model="a", requests=2)
    make_usage(day=today(), key="web", model="a")
    response = client_of().get(f"/usage.csv?start={today()}&end={today()}&key=ci")
    assert response.headers["Content-Type"] == "text/csv; charset=utf-8"
    assert response.headers["Content-Disposition"] == f'attachment; filename="usage-{today()}-{today()}.csv"'
    lines = response.getvalue().decode().splitlines()
    assert lines[1:] == [f"{today()},ci,a,2,0,0,0,,,,"]


@pytest.mark.django_db(transaction=True)
async def test_file_is_streamed_under_asgi_too() -> None:
    """In service there is an event loop, which Django would fill a plain iterator into memory for, with a warning."""
    from asgiref.sync import sync_to_async

    user = await sync_to_async(make_user)(role="operator")
    await sync_to_async(make_usage)(day=today(), key="ci", model="a", requests=2)
    client = AsyncClient()
    await sync_to_async(client.force_login)(user)
    response: Any = await client.get("/usage.csv")
    assert response.is_async
    blocks = [block async for block in response.streaming_content]
    assert b"".join(blocks).count(b"\r\n") == 2
