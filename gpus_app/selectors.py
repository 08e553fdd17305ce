"""Shared reads of hosts, GPUs and readings. The broker is asked first; when it is away, the database answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict

import orjson

from gpus_app import broker
from gpus_app.models import Gpu, GpuSample, Host

log = logging.getLogger(__name__)

#: A chart has few pixels: more points than this are thinned out.
MAX_POINTS = 900
#: A beginning that is missing by less than this is not looked for in the database.
GAP_S = 15.0


class HistoryPoint(TypedDict, total=False):
    """One moment of one GPU; the keys of the sample record, ``resolution_s`` telling a second from a mean."""

    t: float
    resolution_s: int
    total: int
    used: int
    free: int
    util: float | None
    temp: float | None
    power: float | None
    other: int
    error: str | None
    instances: list[dict[str, Any]]


def latest(host_name: str) -> dict[str, Any] | None:
    """The host's last sample record, None when there never was one. See ``latest_all``."""
    return latest_all([host_name]).get(host_name)


def latest_all(host_names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
    """The last record of each host (all of them by default), by name, with ``source`` and ``age_s`` added.

    ``source`` is ``broker``, or ``database`` when the broker is away: then the figures are the newest 10 s means.
    """
    names = list(Host.objects.values_list("name", flat=True)) if host_names is None else list(host_names)
    if not names:
        return {}
    try:
        values = broker.client().mget([broker.host_latest_key(name) for name in names])
    except broker.BrokerErrors as exc:
        log.info("readings come from the database, the broker is away: %s", exc)
        return _latest_from_database(names)
    now = time.time()
    records = {}
    for name, value in zip(names, values, strict=True):
        if value is not None:
            record = orjson.loads(value)
            records[name] = {**record, "source": "broker", "age_s": max(0.0, now - record["t"])}
    return records


def _latest_from_database(names: list[str]) -> dict[str, dict[str, Any]]:
    """The newest 10 s means of the last minutes, in two queries; figures that means do not have are left out."""
    recent = datetime.now(UTC) - timedelta(minutes=2)
    samples = GpuSample.objects.filter(resolution_s=10, at__gte=recent, gpu__host__name__in=names).order_by("at")
    newest = {row.gpu_id: row for row in samples}
    now = time.time()
    records: dict[str, dict[str, Any]] = {}
    for gpu in Gpu.objects.filter(pk__in=newest).select_related("host"):
        row = newest[gpu.pk]
        record = records.setdefault(
            gpu.host.name,
            {"type": "sample", "host": gpu.host.name, "t": 0.0, "seq": 0, "gpus": [], "source": "database"},
        )
        record["t"] = max(record["t"], row.at.timestamp() + row.resolution_s)
        record["age_s"] = max(0.0, now - record["t"])
        part = {"uuid": gpu.uuid, "index": gpu.index, "name": gpu.name, "other_processes": []}
        record["gpus"].append({**part, **_point(row, gpu.total_bytes)})
    return records


def history(
    uuid: str, window_s: float, *, max_points: int = MAX_POINTS, now: float | None = None
) -> list[HistoryPoint]:
    """Readings of one GPU over the last ``window_s`` seconds, oldest first.

    Up to an hour: every second, from the broker, the part that it does not have (it was started since, or is away) from
    10 s means. Longer: 10 s means for a day, else 60 s means.
    """
    now = time.time() if now is None else now
    since = now - window_s
    seconds: list[HistoryPoint] = []
    if window_s <= broker.STREAM_LENGTH:
        try:
            seconds = _from_stream(uuid, since)
        except broker.BrokerErrors as exc:
            log.info("history comes from the database, the broker is away: %s", exc)
    begins = seconds[0]["t"] if seconds else now
    means: list[HistoryPoint] = []
    if begins - since > GAP_S:
        means = _from_database(uuid, since, begins, 10 if window_s <= 86400 else 60)
    return _thin([*means, *seconds], max_points)


def _from_stream(uuid: str, since: float) -> list[HistoryPoint]:
    entries: Any = broker.client().xrange(broker.gpu_stream_key(uuid), min=int(since * 1000))
    points: list[HistoryPoint] = [orjson.loads(fields[b"d"]) for _, fields in entries]
    for point in points:
        point["resolution_s"] = 1
    return points


def _from_database(uuid: str, since: float, until: float, resolution_s: int) -> list[HistoryPoint]:
    total = Gpu.objects.filter(uuid=uuid).values_list("total_bytes", flat=True).first()
    if total is None:
        return []
    span = (datetime.fromtimestamp(since, UTC), datetime.fromtimestamp(until - resolution_s, UTC))
    rows = GpuSample.objects.filter(gpu__uuid=uuid, resolution_s=resolution_s, at__range=span).order_by("at")
    return [_point(row, total) for row in rows.iterator()]


def _point(row: GpuSample, total: int) -> HistoryPoint:
    mine = sum((i.get("baseline") or 0) + (i.get("used") or 0) + (i.get("prealloc") or 0) for i in row.instances)
    return {
        "t": row.at.timestamp(),
        "resolution_s": row.resolution_s,
        "total": total,
        "used": row.used_bytes,
        "free": max(0, total - row.used_bytes),
        "util": row.utilization_percent,
        "temp": row.temperature_c,
        "power": row.power_w,
        "other": max(0, row.used_bytes - mine),
        "error": None,
        "instances": row.instances,
    }


def _thin(points: list[HistoryPoint], max_points: int) -> list[HistoryPoint]:
    """At most ``max_points``, evenly spread, the newest always among them."""
    if len(points) <= max_points:
        return points
    step = -(-len(points) // max_points)
    return points[(len(points) - 1) % step :: step]


def hosts_with_gpus() -> list[Host]:
    """Every host with its GPUs and their policies, in three queries."""
    return list(Host.objects.prefetch_related("gpus__policy"))
