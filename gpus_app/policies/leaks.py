"""Memory of an engine that grows while nobody asks anything of it: slow, so told by hours of means, not by a reading.

Between two minutes without a request everything an engine holds is constant. Over a time of load only its baseline is:
caches come and go, so what the pool holds is compared within idle stretches alone, and what is beside it always. A
step up that stays (workspaces of the first large batch) is no leak: it has to go on in every part of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from gpus_app.policies.base import MIB

#: Idle time that must have been seen, and the least growth in it, before anything is said.
LEAST_SPAN_S, LEAST_BYTES = 2 * 3600.0, 256 * MIB
#: The time is looked at in so many parts, each of which has to be above the one before.
PARTS = 6
#: Points further apart than this are not neighbours: the sampler was away, or there was load.
GAP_S = 180.0
#: Growth up to here counts as the level at the beginning.
BEGUN = 0.05


@dataclass(frozen=True, slots=True)
class Point:
    """A mean of some seconds: what an instance held on one GPU, and whether nothing was asked of it. Epoch seconds."""

    t: float
    baseline_bytes: int
    footprint_bytes: int
    idle: bool


@dataclass(frozen=True, slots=True)
class Leak:
    """``since``: epoch seconds when the growth began; ``grown_bytes`` from there until now."""

    since: float
    bytes_per_hour: int
    grown_bytes: int


def leak(points: Sequence[Point]) -> Leak | None:
    """The growth without load in these points (oldest first); None when there is none, or too little is known."""
    series = _without_load(points)
    if len(series) < 2 * PARTS or series[-1][0] - series[0][0] < LEAST_SPAN_S:
        return None
    size = len(series) / PARTS
    parts = [series[round(size * part) : round(size * (part + 1))] for part in range(PARTS)]
    levels = [median(value for _, value in part) for part in parts]
    if any(after <= before for before, after in pairwise(levels)):
        return None
    first = min(value for _, value in parts[0])
    grown = series[-1][1] - first
    if grown < LEAST_BYTES:
        return None
    since = max(t for t, value in series if value <= first + BEGUN * grown)
    hours = max(series[-1][0] - since, GAP_S) / 3600
    return Leak(since, round((series[-1][1] - first) / hours), grown)


def _without_load(points: Sequence[Point]) -> list[tuple[float, int]]:
    """(time, bytes) of the idle points: the level of the first, and from there only what changed without load."""
    series: list[tuple[float, int]] = []
    last: Point | None = None
    neighbour = False
    for point in points:
        if not point.idle:
            neighbour = False
            continue
        if last is None:
            series.append((point.t, point.baseline_bytes))
        else:
            change = point.baseline_bytes - last.baseline_bytes
            if neighbour and point.t - last.t <= GAP_S:
                change += point.footprint_bytes - last.footprint_bytes
            series.append((point.t, series[-1][1] + change))
        last, neighbour = point, True
    return series
