"""The tokens of each day as columns of an SVG that the server draws: it needs no script."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

from models_app.usage_report import UsageFilter, UsageReport, UsageSum

WIDTH = 1000
HEIGHT = 160
_GAP = 0.2  # of a column's room


@dataclass(frozen=True, slots=True)
class Column:
    """One day: prompt tokens below, completion tokens above, in units of the drawing."""

    day: date
    total: UsageSum
    x: float
    width: float
    prompt_y: float
    prompt_height: float
    completion_y: float
    completion_height: float


@dataclass(frozen=True, slots=True)
class Chart:
    columns: list[Column]
    most_tokens: int
    width: int = WIDTH
    height: int = HEIGHT


def chart_of(report: UsageReport, wanted: UsageFilter) -> Chart:
    """Every day of the filter has its place, also those on which nothing was used."""
    days = wanted.days
    most = max((total.tokens for total in report.days.values()), default=0)
    room = WIDTH / len(days)
    columns = []
    for place, day in enumerate(days):
        total = report.days.get(day)
        if total is None or not total.tokens:
            continue
        prompt = HEIGHT * total.prompt_tokens / most
        completion = HEIGHT * total.completion_tokens / most
        columns.append(
            Column(
                day=day,
                total=total,
                x=room * (place + _GAP / 2),
                width=room * (1 - _GAP),
                prompt_y=HEIGHT - prompt,
                prompt_height=prompt,
                completion_y=HEIGHT - prompt - completion,
                completion_height=completion,
            )
        )
    return Chart(columns, most)
