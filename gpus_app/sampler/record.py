"""The sample record: what one host looked like in one second. JSON and MessagePack as it stands; bytes are integers.

A byte figure is None where it is not known (a process of another PID namespace, an unreadable segment): never 0 for
*don't know*. ``other`` is device memory in use that belongs to none of our instances, whoever has it.
"""

from __future__ import annotations

from typing import Literal, TypedDict

#: ``ok``; ``starting``: serves not yet; ``no_segment``: serves without kvcached; ``lost``: its segment has vanished or
#: holds no valid limit; ``unreadable``: may not be read or is no segment; ``stale``: the engine is gone, the figures
#: (or its memory) are still there.
InstanceState = Literal["ok", "starting", "stale", "lost", "unreadable", "no_segment"]


class ProcessPart(TypedDict):
    """A process that is none of ours. ``bytes`` None: the driver does not tell."""

    pid: int
    name: str
    bytes: int | None


class InstancePart(TypedDict):
    """One instance on one GPU. KV figures are those of this GPU. ``drift``: the limit that a stranger wrote."""

    id: int
    name: str
    replica: int
    ipc: str
    resident: int | None
    baseline: int | None
    used: int | None
    prealloc: int | None
    limit: int | None
    capacity: int | None
    running: int | None
    waiting: int | None
    preemptions: int | None
    gen_tokens: int | None
    gen_tokens_per_s: float | None
    sleep_state: str | None
    metrics_age_s: float | None
    state: InstanceState
    note: str
    drift: int | None


class GpuPart(TypedDict):
    """One GPU. With ``error`` set the other figures say nothing."""

    uuid: str
    index: int
    name: str
    total: int
    used: int
    free: int
    util: float | None
    temp: float | None
    power: float | None
    power_limit: float | None
    error: str | None
    other: int
    other_processes: list[ProcessPart]
    instances: list[InstancePart]


class SamplerPart(TypedDict):
    """How the sampler itself does: seconds that this reading began late, seconds that it took."""

    lag_s: float
    took_s: float


class HostRecord(TypedDict):
    """``t``: epoch seconds of the host's clock at the reading; ``seq`` counts from the sampler's start.

    ``stale_segments``: segments of this installation without a living owner.
    """

    type: Literal["sample"]
    host: str
    t: float
    seq: int
    sampler: SamplerPart
    gpus: list[GpuPart]
    stale_segments: list[str]
