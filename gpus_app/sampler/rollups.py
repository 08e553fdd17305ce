"""Means over 10 and 60 seconds of the records of one host, in step with the clock (``:00``, ``:10`` …)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from gpus_app.sampler.record import GpuPart, HostRecord, InstancePart
from gpus_app.services import RollUp

RESOLUTIONS_S = (10, 60)
_GAUGES = ("util", "temp", "power")
_KV = ("baseline", "used", "prealloc")
_LOAD = ("running", "waiting")


@dataclass(slots=True)
class _Mean:
    """A mean in the making; None is left out."""

    total: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None

    @property
    def whole(self) -> int | None:
        return round(self.total / self.count) if self.count else None


@dataclass(slots=True)
class _Share:
    """One instance on one GPU."""

    last: InstancePart
    busy: bool = False
    tokens: int | None = None
    means: dict[str, _Mean] = field(default_factory=lambda: {name: _Mean() for name in _KV})

    def add(self, part: InstancePart) -> None:
        """Busy is who has a request, who made a token since the last reading, and who does not tell."""
        self.last = part
        for name in _KV:
            self.means[name].add(part[name])  # type: ignore[literal-required]
        tokens = part["gen_tokens"]
        counted = self.tokens is not None and tokens is not None and tokens > self.tokens
        self.busy = self.busy or counted or any(part[name] != 0 for name in _LOAD)  # type: ignore[literal-required]
        self.tokens = tokens


@dataclass(slots=True)
class _Bucket:
    """One GPU in one span of time."""

    used: _Mean = field(default_factory=_Mean)
    gauges: dict[str, _Mean] = field(default_factory=lambda: {name: _Mean() for name in _GAUGES})
    shares: dict[tuple[int, str], _Share] = field(default_factory=dict)

    def add(self, gpu: GpuPart) -> None:
        self.used.add(gpu["used"])
        self.gauges["util"].add(gpu["util"])
        self.gauges["temp"].add(gpu["temp"])
        self.gauges["power"].add(gpu["power"])
        for part in gpu["instances"]:
            share = self.shares.setdefault((part["id"], part["ipc"]), _Share(part))
            share.add(part)


class RollUps:
    """Adds records and gives out the means of every span that is over."""

    def __init__(self) -> None:
        self._starts: dict[int, int] = {}
        self._buckets: dict[int, dict[str, _Bucket]] = {resolution: {} for resolution in RESOLUTIONS_S}

    def add(self, record: HostRecord) -> list[RollUp]:
        """Rows that became complete with this record; GPUs in error for the whole span have none."""
        done: list[RollUp] = []
        for resolution in RESOLUTIONS_S:
            start = int(record["t"] // resolution) * resolution
            before = self._starts.get(resolution)
            if before is not None and before != start:
                done += _rows(before, resolution, self._buckets[resolution].items())
                self._buckets[resolution] = {}
            self._starts[resolution] = start
            for gpu in record["gpus"]:
                if gpu["error"] is None:
                    self._buckets[resolution].setdefault(gpu["uuid"], _Bucket()).add(gpu)
        return done

    def flush(self) -> list[RollUp]:
        """What there is of the spans under way; at the end of the process."""
        rows: list[RollUp] = []
        for resolution, start in self._starts.items():
            rows += _rows(start, resolution, self._buckets[resolution].items())
            self._buckets[resolution] = {}
        return rows


def _rows(start: int, resolution: int, buckets: Iterable[tuple[str, _Bucket]]) -> list[RollUp]:
    at = datetime.fromtimestamp(start, UTC)
    return [
        RollUp(
            uuid=uuid,
            at=at,
            resolution_s=resolution,
            used_bytes=bucket.used.whole or 0,
            utilization_percent=_rounded(bucket.gauges["util"]),
            temperature_c=_rounded(bucket.gauges["temp"]),
            power_w=_rounded(bucket.gauges["power"]),
            instances=[
                {
                    "id": share.last["id"],
                    "name": share.last["name"],
                    "replica": share.last["replica"],
                    "limit": share.last["limit"],
                    "busy": share.busy,
                    **{name: mean.whole for name, mean in share.means.items()},
                }
                for share in bucket.shares.values()
            ],
        )
        for uuid, bucket in buckets
    ]


def _rounded(mean: _Mean) -> float | None:
    return None if mean.value is None else round(mean.value, 1)
