"""Move, edit without downtime, presets."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Path, Router, Status
from pydantic import StrictBool, StringConstraints

from gpus_app.api import ERRORS, HostName
from gpus_app.models import Host
from models_app.api.auth import caller_of, operator
from models_app.api.instances import InstanceId, instance_by_id
from models_app.api.models import ServedName, model_named
from models_app.api.schemas import Empty, OperationOut, Strict, Text
from models_app.errors import NotFound
from models_app.models import Preset
from models_app.presentation.limits_table import limits
from models_app.services.memory.sleep_ram import sleep_ram
from models_app.services.plans.host_drain import host_drain
from models_app.services.plans.presets import preset_apply, preset_delete, preset_diff, preset_save
from models_app.services.plans.rollout import instance_move, model_roll
from models_app.services.plans.stop_then_start import instance_move_stopped

router = Router()
PresetName = Annotated[str, Path(max_length=64)]


class MoveIn(Strict):
    host: Text | None = None
    gpu_uuids: list[Text] | None = None


class MoveStoppedOut(Strict):
    """``state`` is the instance's: it drains or stops, then starts there."""

    instance_id: int
    state: str


class DrainIn(Strict):
    note: Text = ""
    stop: StrictBool = False


class LimitSettingOut(Strict):
    group: str
    name: str
    value: float
    text: str
    what: str


class SleepersOut(Strict):
    """Host memory of sleepers of level 1, bytes. ``cap_bytes`` None: no cap (a simulated host without a setting)."""

    host: str
    sleepers: int
    held_bytes: int
    cap_bytes: int | None
    total_bytes: int
    available_bytes: int


class PresetIn(Strict):
    name: Annotated[Text, StringConstraints(min_length=1, max_length=64)]
    replace: StrictBool = False


class PresetOut(Strict):
    name: str
    entries: list[dict[str, Any]]
    created_by: str
    updated_at: datetime


class DiffOut(Strict):
    """``act``: kept, create, start, change (with the fields), sleep or stop."""

    name: str
    act: str
    fields: dict[str, Any]


def _host(name: str) -> Host:
    host = Host.objects.filter(name=name).first()
    if host is None:
        raise NotFound(f"There is no host named {name!r}.")
    return host


def _preset(name: str) -> Preset:
    row = Preset.objects.filter(name=name).first() if "\x00" not in name else None
    if row is None:
        raise NotFound(f"There is no preset named {name!r}.")
    return row


@router.post("/instances/{instance_id}/move", auth=operator, response={202: OperationOut, **ERRORS})
def move_instance(request: HttpRequest, instance_id: InstanceId, payload: MoveIn) -> Any:
    """The successor starts on the other GPUs; when it is ready the old one drains. 409 when both do not fit at once."""
    instance = instance_by_id(instance_id)
    return Status(
        202, instance_move(instance, actor=caller_of(request).actor, host=payload.host, gpu_uuids=payload.gpu_uuids)
    )


@router.post("/instances/{instance_id}/move_stopped", auth=operator, response={202: MoveStoppedOut, **ERRORS})
def move_instance_stopped(request: HttpRequest, instance_id: InstanceId, payload: MoveIn) -> Any:
    """Stop it, then start it there: for where both do not fit at once. It is away meanwhile."""
    row = instance_by_id(instance_id)
    instance_move_stopped(row, actor=caller_of(request).actor, host=payload.host, gpu_uuids=payload.gpu_uuids)
    return Status(202, {"instance_id": row.pk, "state": row.state})


@router.post("/models/{path:served_model_name}/roll", auth=operator, response={202: OperationOut, **ERRORS})
def roll_model(request: HttpRequest, served_model_name: ServedName, payload: Empty) -> Any:
    """Bring running instances to the saved options, one after another, without downtime."""
    return Status(202, model_roll(model_named(served_model_name), actor=caller_of(request).actor))


@router.get("/limits", response={200: list[LimitSettingOut], **ERRORS})
def list_limits(request: HttpRequest) -> Any:
    """Every limit that acts end by, as it is set: seconds, numbers or bytes by its name."""
    return [asdict(one) for one in limits()]


@router.get("/hosts/{name}/sleepers", response={200: SleepersOut, **ERRORS})
def get_sleepers(request: HttpRequest, name: HostName) -> Any:
    """What sleepers keep in the host's memory, and how much they may."""
    host = _host(name)
    return asdict(sleep_ram([host])[host.name])


@router.post("/hosts/{name}/drain", auth=operator, response={202: OperationOut, **ERRORS})
def drain_host(request: HttpRequest, name: HostName, payload: DrainIn) -> Any:
    """Cordon the host and move everything away from it, one instance after the other, without downtime.

    What fits nowhere else stays and is named; with ``stop`` it is stopped, and waits for a place with its wish kept.
    """
    return Status(202, host_drain(_host(name), actor=caller_of(request).actor, note=payload.note, stop=payload.stop))


@router.get("/presets", response={200: list[PresetOut], **ERRORS})
def list_presets(request: HttpRequest) -> Any:
    return Preset.objects.all()


@router.post("/presets", auth=operator, response={201: PresetOut, **ERRORS})
def save_preset(request: HttpRequest, payload: PresetIn) -> Any:
    """Keep what is deployed now under a name; 409 when the name is taken."""
    return Status(201, preset_save(payload.name, actor=caller_of(request).actor, replace=payload.replace))


@router.get("/presets/{name}/diff", response={200: list[DiffOut], **ERRORS})
def show_diff(request: HttpRequest, name: PresetName) -> Any:
    """What applying it would do."""
    return preset_diff(_preset(name))


@router.post("/presets/{name}/apply", auth=operator, response={202: OperationOut, **ERRORS})
def apply_preset(request: HttpRequest, name: PresetName, payload: Empty) -> Any:
    return Status(202, preset_apply(_preset(name), actor=caller_of(request).actor))


@router.delete("/presets/{name}", auth=operator, response={204: None, **ERRORS})
def delete_preset(request: HttpRequest, name: PresetName) -> Any:
    preset_delete(_preset(name), actor=caller_of(request).actor)
    return Status(204, None)
