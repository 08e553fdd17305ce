"""KV memory beyond one instance: what fits, making room, the controller's rules and plans, tidying a GPU."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from django.http import HttpRequest
from ninja import Field, Path, Router, Status

from gpus_app.api import ERRORS, GpuUuid, PolicyOut
from gpus_app.models import Gpu
from gpus_app.services import gpu_hold, gpu_hold_end
from models_app.api.auth import caller_of, operator
from models_app.api.models import ServedName, model_named
from models_app.api.schemas import MAX_ID, Bytes, Empty, OperationOut, Strict, Text
from models_app.errors import NotFound
from models_app.models import Operation
from models_app.services.memory.cards import policy_of
from models_app.services.memory.memory_rules import gpu_policy_change
from models_app.services.memory.placement import Wish
from models_app.services.plans.operations import operation_cancel
from models_app.services.plans.room import room_judge, room_make, tidy

router = Router()


class WhereIn(Strict):
    """Where to launch; empty: the placer chooses."""

    host: Text | None = None
    gpu_uuids: list[Text] | None = None


class FitOut(Strict):
    """``plans`` (one a GPU) and ``steps`` are filled for *fits_after_making_room*; ``largest_bytes``: *does_not_fit*.

    Bytes are per GPU; an instance over several GPUs has one step, which says where, and ``total_bytes`` of them all.
    """

    verdict: Literal["fits", "fits_after_making_room", "does_not_fit"]
    sentence: str
    need_bytes: int
    measured: bool
    lines: list[dict[str, Any]]
    gpus: list[str]
    largest_bytes: int
    suggested_tensor_parallel_size: int | None
    plans: list[dict[str, Any]]
    steps: list[dict[str, Any]]


class PolicyIn(Strict):
    reserve_bytes: Bytes | None = None
    rebalance: Literal["off", "dry_run", "on"] | None = None


class HoldIn(Strict):
    """The controller shows what it would do and does nothing for so many seconds; 0 ends a hold."""

    seconds: Annotated[float, Field(ge=0, le=30 * 86400)]


class PlanOut(Strict):
    """What the controller did or would do at its last look; empty ``plan``: nothing is to be done."""

    plan: dict[str, Any]
    planned_at: datetime | None


def gpu_by_uuid(uuid: str) -> Gpu:
    """The GPU with its host and policy. Raises NotFound."""
    gpu = Gpu.objects.select_related("host", "policy").filter(uuid=uuid).first()
    if gpu is None:
        raise NotFound(f"There is no GPU {uuid!r}.")
    return gpu


@router.post("/models/{path:served_model_name}/fit", response={200: FitOut, **ERRORS})
def judge_fit(request: HttpRequest, served_model_name: ServedName, payload: WhereIn) -> Any:
    """Whether one more instance fits now, fits after making room (with the plan), or does not. Changes nothing."""
    model = model_named(served_model_name)
    wish = Wish.of(model, {"host": payload.host, "gpu_uuids": payload.gpu_uuids or []})
    return room_judge(model, wish=wish).json()


@router.post("/models/{path:served_model_name}/make_room", auth=operator, response={202: OperationOut, **ERRORS})
def make_room_for(request: HttpRequest, served_model_name: ServedName, payload: WhereIn) -> Any:
    """Carry out the plan that ``fit`` showed, made anew, and launch. 409 when it fits already or cannot fit."""
    model = model_named(served_model_name)
    return Status(202, room_make(model, actor=caller_of(request).actor, host=payload.host, gpu_uuids=payload.gpu_uuids))


@router.get("/gpus/{uuid}/plan", response={200: PlanOut, **ERRORS})
def get_plan(request: HttpRequest, uuid: GpuUuid) -> Any:
    policy = policy_of(gpu_by_uuid(uuid))
    return {"plan": policy.plan, "planned_at": policy.planned_at}


@router.patch("/gpus/{uuid}/policy", auth=operator, response={200: PolicyOut, **ERRORS})
def change_policy(request: HttpRequest, uuid: GpuUuid, payload: PolicyIn) -> Any:
    return gpu_policy_change(gpu_by_uuid(uuid), actor=caller_of(request).actor, **payload.dict())


@router.post("/gpus/{uuid}/hold", auth=operator, response={200: PolicyOut, **ERRORS})
def hold_gpu(request: HttpRequest, uuid: GpuUuid, payload: HoldIn) -> Any:
    gpu, actor = gpu_by_uuid(uuid), caller_of(request).actor
    if payload.seconds:
        gpu_hold([gpu], actor=actor, seconds=payload.seconds)
    else:
        gpu_hold_end([gpu], actor=actor)
    return policy_of(gpu_by_uuid(uuid))


@router.post("/gpus/{uuid}/trim_all", auth=operator, response={202: OperationOut, **ERRORS})
def trim_gpu(request: HttpRequest, uuid: GpuUuid, payload: Empty) -> Any:
    """Trim every instance of the GPU. 409 when there is nothing to trim."""
    return Status(202, tidy(gpu_by_uuid(uuid).uuid, how="trim", actor=caller_of(request).actor))


@router.post("/gpus/{uuid}/shrink_idle", auth=operator, response={202: OperationOut, **ERRORS})
def shrink_gpu(request: HttpRequest, uuid: GpuUuid, payload: Empty) -> Any:
    """Lower every idle instance of the GPU to its guarantee or safety floor. 409 when none can shrink."""
    return Status(202, tidy(gpu_by_uuid(uuid).uuid, how="shrink", actor=caller_of(request).actor))


@router.post("/operations/{operation_id}/cancel", auth=operator, response={202: OperationOut, **ERRORS})
def cancel_operation(request: HttpRequest, operation_id: Annotated[int, Path(ge=1, le=MAX_ID)], payload: Empty) -> Any:
    """Ask for its end; what can be undone is undone."""
    row = Operation.objects.select_related("model").filter(pk=operation_id).first()
    if row is None:
        raise NotFound(f"There is no operation {operation_id}.")
    return Status(202, operation_cancel(row, actor=caller_of(request).actor))
