"""Counters of this process and their Prometheus text. Base units; the only labels are served names and short words.

Plain dicts, for a counter is touched on every request: one look-up and one addition. What is counted can be written to
a file and added up with the files of other router processes (``metrics_share``), since a scrape reaches any of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

Labels = tuple[str, ...]

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
SMALL_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1.0)


class Counter:
    kind = "counter"

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self.values: dict[Labels, float] = {}

    def add(self, labels: Labels = (), amount: float = 1) -> None:
        values = self.values
        values[labels] = values.get(labels, 0) + amount


class Gauge(Counter):
    kind = "gauge"

    def set(self, labels: Labels, value: float) -> None:
        self.values[labels] = value


class Histogram:
    kind = "histogram"

    def __init__(self, name: str, text: str, bounds: tuple[float, ...], *labels: str) -> None:
        self.name = name
        self.text = text
        self.bounds = bounds
        self.labels = labels
        self.values: dict[Labels, list[float]] = {}  # a count per bucket, one for what is above, then the sum

    def observe(self, labels: Labels, value: float) -> None:
        row = self.values.get(labels)
        if row is None:
            row = self.values[labels] = [0.0] * (len(self.bounds) + 2)
        row[bisect_left(self.bounds, value)] += 1
        row[-1] += value


class Metrics:
    """Everything that the router counts."""

    def __init__(self) -> None:
        p = "sardeenz_router_"
        self.requests = Counter(f"{p}requests_total", "Answers by served model name and HTTP status.", "model", "code")
        self.duration = Histogram(
            f"{p}request_duration_seconds", "From the request to the end of its answer.", SECONDS, "model"
        )
        self.first_byte = Histogram(
            f"{p}time_to_first_byte_seconds", "From the request to the first byte of its answer.", SECONDS, "model"
        )
        self.overhead = Histogram(f"{p}overhead_seconds", "The router's own time before the first byte.", SMALL_SECONDS)
        self.inflight = Gauge(f"{p}inflight_requests", "Requests under way.", "model")
        self.queued = Gauge(f"{p}queued_requests", "Requests that wait for a model.", "model")
        self.queue_wait = Histogram(
            f"{p}queue_wait_seconds", "Time that requests waited for a model.", SECONDS, "model"
        )
        self.demands = Counter(f"{p}demands_total", "Times that a model was asked for on demand.", "model")
        self.failures = Counter(
            f"{p}upstream_failures_total", "Engines that did not answer as they should.", "model", "kind"
        )
        self.retries = Counter(f"{p}retries_total", "Requests sent to another engine before the first byte.", "model")
        self.gone = Counter(f"{p}clients_gone_total", "Clients that left before the end of the answer.", "model")
        self.limited = Counter(f"{p}limited_total", "Requests refused by a limit of their key or model.", "code")
        self.tokens = Counter(f"{p}tokens_total", "Tokens by kind: prompt, completion.", "model", "kind")
        self.routes_age = Gauge(f"{p}routes_age_seconds", "Time since the control side was last heard.")

    def all(self) -> Iterable[Counter | Histogram]:
        return (one for one in vars(self).values() if isinstance(one, (Counter, Histogram)))

    def snapshot(self, *, gauges: bool = True) -> dict[str, list[list[Any]]]:
        """Values by metric name, fit for JSON."""
        return {
            one.name: [[list(labels), value] for labels, value in one.values.items()]
            for one in self.all()
            if gauges or one.kind != "gauge"
        }

    def render(self, others: Iterable[Mapping[str, Any]] = ()) -> bytes:
        """Prometheus text of this process's values and those of ``others`` (snapshots) together."""
        others = list(others)
        lines: list[str] = []
        for one in self.all():
            lines.append(f"# HELP {one.name} {one.text}")
            lines.append(f"# TYPE {one.name} {one.kind}")
            if isinstance(one, Histogram):
                self._histogram(one, others, lines)
            else:
                self._plain(one, others, lines)
        return ("\n".join(lines) + "\n").encode()

    def _plain(self, one: Counter, others: list[Mapping[str, Any]], lines: list[str]) -> None:
        total = dict(one.values)
        for snapshot in others:
            for labels, value in snapshot.get(one.name, ()):
                key = tuple(labels)
                old = total.get(key, 0)
                # an age is everyone's own; what is under way, and what was counted, adds up
                total[key] = max(old, value) if one is self.routes_age else old + value
        for labels, value in sorted(total.items()):
            lines.append(f"{one.name}{_braces(one.labels, labels)} {_number(value)}")

    @staticmethod
    def _histogram(one: Histogram, others: list[Mapping[str, Any]], lines: list[str]) -> None:
        total = {labels: list(row) for labels, row in one.values.items()}
        for snapshot in others:
            for labels, row in snapshot.get(one.name, ()):
                key = tuple(labels)
                old = total.get(key)
                if old is None:
                    total[key] = list(row)
                elif len(old) == len(row):
                    total[key] = [a + b for a, b in zip(old, row, strict=True)]
        for labels, row in sorted(total.items()):
            running = 0.0
            for bound, count in zip([*map(_number, one.bounds), "+Inf"], row[:-1], strict=True):
                running += count
                lines.append(f"{one.name}_bucket{_braces((*one.labels, 'le'), (*labels, bound))} {_number(running)}")
            lines.append(f"{one.name}_sum{_braces(one.labels, labels)} {_number(row[-1])}")
            lines.append(f"{one.name}_count{_braces(one.labels, labels)} {_number(running)}")


def _braces(names: tuple[str, ...], values: Labels) -> str:
    if not names:
        return ""
    pairs = (f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True))
    return "{" + ",".join(pairs) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(round(value, 9))
