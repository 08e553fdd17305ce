"""Sums, times out of histograms, and the CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from datetime import date, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models_app.models import UsageRecord
from models_app.presentation.usage_chart import HEIGHT, WIDTH, chart_of
from models_app.router.usage import TTFT_BOUNDS_MS, UsageBook
from models_app.usage_report import CSV_COLUMNS, UsageFilter, cell, quantile, usage_csv, usage_names, usage_report
from tests.builders import make_usage

DAY = date(2026, 11, 30)
WEEK = UsageFilter(DAY - timedelta(days=6), DAY)


# --- times -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("histogram", "share", "value"),
    [
        ({}, 0.5, None),
        ({"50": 0}, 0.5, None),
        ({"50": 10}, 0.5, 37.5),  # the middle of 25 to 50
        ({"10": 10}, 0.5, 5.0),
        ({"50": 10}, 1.0, 50.0),
        ({"25": 50, "100": 50}, 0.5, 25.0),
        ({"25": 90, "1000": 10}, 0.95, 750.0),
        ({"inf": 3}, 0.5, 60000.0),  # more is not known
        ({"25": 9, "inf": 1}, 0.95, 60000.0),
        ({"25": 9, "inf": 1}, 0.5, 10 + 15 * 5 / 9),
    ],
)
def test_quantile_by_straight_line_within_its_bucket(
    histogram: Mapping[str, int], share: float, value: float | None
) -> None:
    """SZ-110: of times, p95 is the slow end; the page says so."""
    assert quantile(histogram, TTFT_BOUNDS_MS, share) == (None if value is None else pytest.approx(value))


@given(st.lists(st.floats(0.0001, 90), min_size=1, max_size=60), st.floats(0, 1))
def test_quantile_lies_in_the_bucket_of_the_true_one(seconds: list[float], share: float) -> None:
    record = UsageBook().record(1, "k", "m")
    for one in seconds:
        record.first_token(one)
    found = quantile(record.to_json()["ttft_histogram"], TTFT_BOUNDS_MS, share)
    assert found is not None
    true = sorted(seconds)[max(0, -int(-share * len(seconds) // 1) - 1)] * 1000
    lower = max((bound for bound in (0, *TTFT_BOUNDS_MS) if bound < true), default=0)
    upper = min((bound for bound in TTFT_BOUNDS_MS if bound >= true), default=TTFT_BOUNDS_MS[-1])
    assert min(lower, TTFT_BOUNDS_MS[-1]) - 1e-6 <= found <= upper + 1e-6


# --- sums ------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_lines_of_each_grouping_and_their_total(django_assert_num_queries: Any) -> None:
    make_usage(day=DAY, key="ci", model="a", requests=3, prompt=30, completion=6, ttft_histogram={"50": 3})
    make_usage(day=DAY, key="ci", model="b", requests=1, errors=1, prompt=5)
    make_usage(day=DAY - timedelta(days=1), key="web", model="a", requests=2, prompt=100, ttft_histogram={"100": 1})
    make_usage(day=DAY - timedelta(days=30), key="old", model="a", requests=99)
    with django_assert_num_queries(1):
        report = usage_report(WEEK)
    assert [(line.day, line.key, line.model, line.requests) for line in report.lines] == [
        (DAY, "ci", "a", 3),
        (DAY, "ci", "b", 1),
        (DAY - timedelta(days=1), "web", "a", 2),
    ]
    totals = report.totals
    assert (totals.requests, totals.errors, totals.prompt_tokens, totals.completion_tokens) == (6, 1, 135, 6)
    assert totals.ttft == {"50": 3, "100": 1}
    by_day = usage_report(WEEK, "day").lines
    assert [(line.day, line.key, line.model, line.requests) for line in by_day] == [
        (DAY, None, None, 4),
        (DAY - timedelta(days=1), None, None, 2),
    ]
    assert [(line.key, line.tokens) for line in usage_report(WEEK, "key").lines] == [("web", 100), ("ci", 41)]
    assert [(line.model, line.requests) for line in usage_report(WEEK, "model").lines] == [("a", 5), ("b", 1)]


@pytest.mark.django_db
def test_one_key_and_one_model() -> None:
    make_usage(day=DAY, key="ci", model="a")
    make_usage(day=DAY, key="ci", model="b")
    make_usage(day=DAY, key="web", model="b")
    report = usage_report(UsageFilter(DAY, DAY, key="ci", model="b"))
    assert [(line.key, line.model) for line in report.lines] == [("ci", "b")]
    assert usage_names() == (["ci", "web"], ["a", "b"])


@pytest.mark.django_db
def test_every_day_has_its_place_in_the_chart() -> None:
    make_usage(day=DAY, key="ci", model="a", prompt=60, completion=20)
    make_usage(day=DAY - timedelta(days=6), key="ci", model="a", prompt=10, completion=30)
    make_usage(day=DAY - timedelta(days=3), key="ci", model="a", requests=5)  # of no tokens
    chart = chart_of(usage_report(WEEK), WEEK)
    first, last = chart.columns
    assert (first.day, last.day, chart.most_tokens) == (DAY - timedelta(days=6), DAY, 80)
    assert (last.prompt_height, last.completion_height, last.completion_y) == (HEIGHT * 0.75, HEIGHT * 0.25, 0)
    assert first.x < WIDTH / 7
    assert last.x + last.width < WIDTH
    assert chart_of(usage_report(UsageFilter(DAY, DAY, key="none")), WEEK).columns == []


# --- CSV -------------------------------------------------------------------------------------------


def _parsed(wanted: UsageFilter) -> list[list[str]]:
    text = b"".join(usage_csv(wanted)).decode()
    assert text.endswith("\r\n")
    return list(csv.reader(io.StringIO(text, newline="")))


@pytest.mark.django_db
def test_file_holds_one_line_per_row_oldest_first() -> None:
    make_usage(day=DAY, key="ci", model="a", requests=3, prompt=30, completion=6, ttft_histogram={"50": 3})
    make_usage(day=DAY - timedelta(days=1), key='two\r\n"lines", once', model="a", requests=2)
    header, first, second = _parsed(WEEK)
    assert header == list(CSV_COLUMNS)
    assert first[:4] == ["2026-11-29", 'two\r\n"lines", once', "a", "2"]
    assert first[7:] == ["", "", "", ""]
    assert second == ["2026-11-30", "ci", "a", "3", "0", "30", "6", "37.5", "48.8", "", ""]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_cell_is_a_formula(text: str) -> None:
    assert cell(text) == f"'{text}"
    assert cell(f"a{text}") == f"a{text}"


@pytest.mark.django_db
def test_name_of_a_key_that_is_a_formula_is_defused_in_the_file() -> None:
    make_usage(day=DAY, key='=HYPERLINK("http://x")', model="a")
    assert _parsed(WEEK)[1][1] == '\'=HYPERLINK("http://x")'


@pytest.mark.django_db
def test_large_file_comes_in_blocks() -> None:
    UsageRecord.objects.bulk_create(
        UsageRecord(day=DAY, key_name=f"k{number:04}", served_model_name="a", requests=1) for number in range(1200)
    )
    blocks = list(usage_csv(WEEK))
    assert len(blocks) == 3
    assert b"".join(blocks).count(b"\r\n") == 1201
