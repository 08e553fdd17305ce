"""Hosts, GPUs and readings for scripts. The composing door chooses who may read and who may write."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from django.http import Http404, HttpRequest
from ninja import Path, Query, Router, Schema
from pydantic import AfterValidator, ConfigDict

from gpus_app.models import Gpu, GpuPolicy, Host
from gpus_app.selectors import history, hosts_with_gpus, latest_all
from gpus_app.services import gpu_cordon, gpu_uncordon, host_cordon, host_maintenance_set, host_uncordon


class ErrorBody(Schema):
    """``code`` is stable for scripts; ``message`` is a sentence for people; ``fields`` has one list a bad field."""

    code: str
    message: str
    fields: dict[str, list[str]] | None = None
    facts: dict[str, Any] | None = None


class ErrorOut(Schema):
    """The one shape of every error of this API."""

    error: ErrorBody


#: Documented on every operation, whatever else it answers.
ERRORS: dict[int, Any] = dict.fromkeys((400, 401, 403, 404, 409, 422, 503), ErrorOut)

read_router = Router()
write_router = Router()


def _no_nul(text: str) -> str:
    if "\x00" in text:
        raise ValueError("The character NUL is not allowed.")
    return text


HostName = Annotated[str, Path(max_length=64), AfterValidator(_no_nul)]
GpuUuid = Annotated[str, Path(max_length=64), AfterValidator(_no_nul)]


class PolicyOut(Schema):
    reserve_bytes: int
    rebalance: Literal["off", "dry_run", "on"]
    held_until: datetime | None
    held_by: str


class InstanceReading(Schema):
    """One instance on one GPU in the newest reading, bytes; None where nothing could be read."""

    model_config = ConfigDict(extra="allow")

    id: int
    name: str
    replica: int
    state: str
    resident: int | None = None
    baseline: int | None = None
    used: int | None = None
    prealloc: int | None = None
    limit: int | None = None
    capacity: int | None = None
    running: int | None = None
    waiting: int | None = None


class GpuReadingOut(Schema):
    """The newest reading of one GPU; bytes, percent, degrees Celsius, watts."""

    model_config = ConfigDict(extra="allow")

    t: float
    age_s: float
    used: int | None = None
    free: int | None = None
    util: float | None = None
    temp: float | None = None
    power: float | None = None
    other: int | None = None
    error: str | None = None
    instances: list[InstanceReading] = []


class GpuOut(Schema):
    uuid: str
    host: str
    index: int
    name: str
    total_bytes: int
    state: Literal["ok", "faulty", "missing"]
    state_reason: str
    state_since: datetime
    grade: Literal["", "passing", "blind", "fatal"]
    cordoned: bool
    cordon_reason: str
    seen_at: datetime | None
    policy: PolicyOut
    latest: GpuReadingOut | None

    @classmethod
    def of(cls, gpu: Gpu, host: Host, records: dict[str, dict[str, Any]]) -> GpuOut:
        """One row with its newest reading out of the host's record."""
        record = records.get(host.name) or {}
        reading = next((entry for entry in record.get("gpus", []) if entry["uuid"] == gpu.uuid), None)
        policy = getattr(gpu, "policy", None)
        return cls(
            uuid=gpu.uuid,
            host=host.name,
            index=gpu.index,
            name=gpu.name,
            total_bytes=gpu.total_bytes,
            state=gpu.state,  # type: ignore[arg-type]
            state_reason=gpu.state_reason,
            state_since=gpu.state_since,
            grade=gpu.grade,  # type: ignore[arg-type]
            cordoned=gpu.cordoned,
            cordon_reason=gpu.cordon_reason,
            seen_at=gpu.seen_at,
            policy=PolicyOut.from_orm(policy or GpuPolicy(gpu=gpu)),
            latest=GpuReadingOut(t=record["t"], age_s=record["age_s"], **_rest(reading)) if reading else None,
        )


def _rest(reading: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in reading.items() if key not in ("t", "age_s")}


class HostOut(Schema):
    name: str
    address: str
    engine_kind: str
    versions: dict[str, Any]
    reachable: bool
    cordoned: bool
    maintenance: bool
    note: str
    worker_seen_at: datetime | None
    sampler_seen_at: datetime | None
    total_ram_bytes: int
    available_ram_bytes: int
    total_shm_bytes: int
    available_shm_bytes: int
    gpus: list[str]

    @staticmethod
    def resolve_gpus(obj: Host) -> list[str]:
        return [gpu.uuid for gpu in obj.gpus.all()]


class HistoryOut(Schema):
    """Readings, oldest first; each carries its ``resolution_s``."""

    uuid: str
    window_s: float
    points: list[dict[str, Any]]


class HostCordonIn(Schema):
    model_config = ConfigDict(extra="forbid")

    note: Annotated[str, AfterValidator(_no_nul)] = ""
    maintenance: bool = False


class NothingIn(Schema):
    """An empty JSON object."""

    model_config = ConfigDict(extra="forbid")


def _host(name: str) -> Host:
    host = Host.objects.prefetch_related("gpus").filter(name=name).first()
    if host is None:
        raise Http404(f"There is no host named {name!r}.")
    return host


def _gpu(uuid: str) -> Gpu:
    gpu = Gpu.objects.select_related("host", "policy").filter(uuid=uuid).first()
    if gpu is None:
        raise Http404(f"There is no GPU {uuid!r}.")
    return gpu


def _one(gpu: Gpu) -> GpuOut:
    return GpuOut.of(gpu, gpu.host, latest_all([gpu.host.name]))


def _actor(request: HttpRequest) -> str:
    return str(request.auth.actor)  # type: ignore[attr-defined]


@read_router.get("/hosts", response={200: list[HostOut], **ERRORS})
def list_hosts(request: HttpRequest) -> Any:
    return hosts_with_gpus()


@read_router.get("/hosts/{name}", response={200: HostOut, **ERRORS})
def get_host(request: HttpRequest, name: HostName) -> Any:
    return _host(name)


@read_router.get("/gpus", response={200: list[GpuOut], **ERRORS})
def list_gpus(request: HttpRequest) -> Any:
    """Every GPU with its newest reading."""
    hosts = hosts_with_gpus()
    records = latest_all([host.name for host in hosts])
    return [GpuOut.of(gpu, host, records) for host in hosts for gpu in host.gpus.all()]


@read_router.get("/gpus/{uuid}", response={200: GpuOut, **ERRORS})
def get_gpu(request: HttpRequest, uuid: GpuUuid) -> Any:
    return _one(_gpu(uuid))


@read_router.get("/gpus/{uuid}/history", response={200: HistoryOut, **ERRORS})
def get_history(
    request: HttpRequest,
    uuid: GpuUuid,
    window: Annotated[float, Query(gt=0, le=30 * 86400, description="Seconds back from now.")] = 300,
) -> Any:
    """Every second for the last hour, 10 s means for a day, 1 min means for 30 days."""
    gpu = _gpu(uuid)
    return {"uuid": gpu.uuid, "window_s": window, "points": history(gpu.uuid, window)}


@write_router.post("/hosts/{name}/cordon", response={200: HostOut, **ERRORS})
def cordon_host(request: HttpRequest, name: HostName, payload: HostCordonIn) -> Any:
    """No new instances here; with ``maintenance``, nothing that ends here is started again either."""
    host = _host(name)
    if payload.maintenance:
        host_maintenance_set(host, on=True, actor=_actor(request), note=payload.note)
    else:
        host_cordon(host, actor=_actor(request), note=payload.note)
    return _host(name)


@write_router.post("/hosts/{name}/uncordon", response={200: HostOut, **ERRORS})
def uncordon_host(request: HttpRequest, name: HostName, payload: NothingIn) -> Any:
    host_uncordon(_host(name), actor=_actor(request))
    return _host(name)


@write_router.post("/gpus/{uuid}/cordon", response={200: GpuOut, **ERRORS})
def cordon_gpu(request: HttpRequest, uuid: GpuUuid, payload: NothingIn) -> Any:
    gpu_cordon(_gpu(uuid), actor=_actor(request))
    return _one(_gpu(uuid))


@write_router.post("/gpus/{uuid}/uncordon", response={200: GpuOut, **ERRORS})
def uncordon_gpu(request: HttpRequest, uuid: GpuUuid, payload: NothingIn) -> Any:
    gpu_uncordon(_gpu(uuid), actor=_actor(request))
    return _one(_gpu(uuid))
