"""The history of one GPU as columns, for the chart and for its twin, the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.utils import timezone

from gpus_app.models import Gpu
from gpus_app.selectors import HistoryPoint, history
from models_app.models import Instance, InstanceEvent
from models_app.presentation.board import label_of

#: What the chart marks: changes of limits and what they cost, not every step of a life.
MARKED_KINDS = ("limit", "trim", "preempt", "drift", "sleep", "plan", "move")
MOST_MARKS = 60
TABLE_LINES = 60


@dataclass(frozen=True, slots=True)
class Window:
    """A span that the chart can show."""

    seconds: int
    label: str


WINDOWS = (Window(300, "5 min"), Window(900, "15 min"), Window(3600, "60 min"), Window(86400, "24 h"))


def window_of(text: str | None) -> Window:
    """The window that a query asks for; the shortest for anything else."""
    return next((window for window in WINDOWS if str(window.seconds) == text), WINDOWS[0])


@dataclass(frozen=True, slots=True)
class TableLine:
    """One line of the chart's twin; ``cells`` are bytes in the order of the instances."""

    at: datetime
    used_bytes: int
    cells: list[int | None]


def chart_of(gpu: Gpu, window: Window) -> dict[str, Any]:
    """Columns for the script: times, and per instance its KV bytes in use and its limit. Three queries at most."""
    points = history(gpu.uuid, float(window.seconds))
    found = _instances(points)
    columns = {pk: ([0] * len(points), [None] * len(points)) for pk in found}
    for place, point in enumerate(points):
        for part in point.get("instances") or []:
            kv, limits = columns[part["id"]]
            kv[place] = part.get("used") or 0
            limits[place] = part.get("limit") or None
    return {
        "window": window.seconds,
        "total": gpu.total_bytes,
        "t": [point["t"] for point in points],
        "instances": [
            {"id": pk, "label": label, "slot": slot, "kv": columns[pk][0], "limit": columns[pk][1]}
            for pk, (label, slot) in found.items()
        ],
        "events": marks(list(found), window),
    }


def table_of(gpu: Gpu, window: Window) -> tuple[list[str], list[TableLine]]:
    """The same figures, thinned to a readable number of lines, newest first."""
    points = history(gpu.uuid, float(window.seconds), max_points=TABLE_LINES)
    found = _instances(points)
    lines = []
    for point in reversed(points):
        parts = {part["id"]: part for part in point.get("instances") or []}
        lines.append(
            TableLine(
                at=datetime.fromtimestamp(point["t"], UTC),
                used_bytes=point.get("used") or 0,
                cells=[parts[pk].get("used") if pk in parts else None for pk in found],
            )
        )
    return [label for label, _slot in found.values()], lines


def marks(instance_ids: Sequence[int], window: Window) -> list[dict[str, Any]]:
    """What happened to the memory of these instances in the window, oldest first."""
    events = InstanceEvent.objects.filter(
        instance_id__in=instance_ids,
        at__gte=timezone.now() - timedelta(seconds=window.seconds),
        kind__in=MARKED_KINDS,
    ).select_related("instance__model")[:MOST_MARKS]
    return [
        {"t": event.at.timestamp(), "kind": event.kind, "text": f"{label_of(event.instance)}: {event.reason}"}
        for event in reversed(events)
    ]


def _instances(points: Sequence[HistoryPoint]) -> dict[int, tuple[str, int]]:
    """Label and colour of every instance in the points, by id in rising order: the order of the bar."""
    names: dict[int, str] = {}
    for point in points:
        for part in point.get("instances") or []:
            names[part["id"]] = part.get("name") or f"instance {part['id']}"
    rows = {row.pk: row for row in Instance.objects.filter(pk__in=names).select_related("model")}
    found = {}
    for pk in sorted(names):
        row = rows.get(pk)
        slot = pk if row is None or row.colour_slot is None else row.colour_slot
        found[pk] = (label_of(row) if row else names[pk], slot)
    return found
