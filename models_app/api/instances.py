"""/instances: what runs, and everything one can do to it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from django.http import HttpRequest, HttpResponse
from ninja import Path, Query, Router, Status

from gpus_app.api import ERRORS
from models_app.api.auth import caller_of, operator
from models_app.api.schemas import (
    MAX_ID,
    AttemptOut,
    Empty,
    EventOut,
    InstanceOut,
    LimitIn,
    LimitOut,
    LogOut,
    ProposalOut,
    SafetyFloorOut,
    SleepIn,
    StopIn,
    TrimOut,
)
from models_app.errors import InvalidInput, NotFound
from models_app.models import Instance
from models_app.selectors import instance_log
from models_app.services.lifecycle.launch import instance_restart
from models_app.services.lifecycle.sleep import instance_sleep, instance_wake
from models_app.services.lifecycle.stop import instance_stop, stop_all
from models_app.services.logs import attempt_log, log_name
from models_app.services.memory.kvcache import (
    kvcache_limit_percent_set,
    kvcache_limit_set,
    kvcache_safety_floor,
    kvcache_trim,
)
from models_app.services.plans.rebalancing import hand_back
from models_app.services.proposals import proposal_take, proposals_of
from models_app.states import LIVE, InstanceState

router = Router()
InstanceId = Annotated[int, Path(ge=1, le=MAX_ID)]


def instance_by_id(instance_id: int) -> Instance:
    """The instance, with its model and host. Raises NotFound."""
    row = Instance.objects.select_related("model", "host", "attempt").filter(pk=instance_id).first()
    if row is None:
        raise NotFound(f"There is no instance {instance_id}.")
    return row


@router.get("", response={200: list[InstanceOut], **ERRORS})
def list_instances(
    request: HttpRequest,
    state: InstanceState | None = None,
    model: str | None = None,
    live: Annotated[bool, Query(description="Only those that are not stopped or failed.")] = False,
    limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
) -> Any:
    rows = Instance.objects.select_related("model", "host", "attempt").order_by("-pk")
    if state is not None:
        rows = rows.filter(state=state)
    if model is not None:
        rows = rows.filter(model__served_model_name=model) if "\x00" not in model else rows.none()
    if live:
        rows = rows.filter(state__in=LIVE)
    return rows[offset : offset + limit]


@router.post("/stop_all", auth=operator, response={202: list[InstanceOut], **ERRORS})
def stop_every_instance(request: HttpRequest, payload: Empty) -> Any:
    stop_all(actor=caller_of(request).actor)
    return Status(202, Instance.objects.live().select_related("model", "host", "attempt"))


@router.get("/{instance_id}", response={200: InstanceOut, **ERRORS})
def get_instance(request: HttpRequest, instance_id: InstanceId) -> Any:
    return instance_by_id(instance_id)


@router.post("/{instance_id}/stop", auth=operator, response={202: InstanceOut, **ERRORS})
def stop_instance(request: HttpRequest, instance_id: InstanceId, payload: StopIn) -> Any:
    instance_stop(instance_by_id(instance_id), actor=caller_of(request).actor, force=payload.force)
    return Status(202, instance_by_id(instance_id))


@router.post("/{instance_id}/restart", auth=operator, response={202: InstanceOut, **ERRORS})
def restart_instance(request: HttpRequest, instance_id: InstanceId, payload: Empty) -> Any:
    instance_restart(instance_by_id(instance_id), actor=caller_of(request).actor)
    return Status(202, instance_by_id(instance_id))


@router.post("/{instance_id}/sleep", auth=operator, response={202: InstanceOut, **ERRORS})
def sleep_instance(request: HttpRequest, instance_id: InstanceId, payload: SleepIn) -> Any:
    instance_sleep(instance_by_id(instance_id), actor=caller_of(request).actor, level=payload.level)
    return Status(202, instance_by_id(instance_id))


@router.post("/{instance_id}/wake", auth=operator, response={202: InstanceOut, **ERRORS})
def wake_instance(request: HttpRequest, instance_id: InstanceId, payload: Empty) -> Any:
    instance_wake(instance_by_id(instance_id), actor=caller_of(request).actor)
    return Status(202, instance_by_id(instance_id))


@router.post("/{instance_id}/limit", auth=operator, response={200: LimitOut, 202: LimitOut, **ERRORS})
def set_limit(request: HttpRequest, instance_id: InstanceId, payload: LimitIn) -> Any:
    """Set the KV limit. 200 tells what the engine did; 202 (*pending*) that it has not answered yet."""
    instance = instance_by_id(instance_id)
    common: dict[str, Any] = {
        "actor": caller_of(request).actor,
        "force": payload.force,
        "reclaim": payload.reclaim,
    }
    if payload.size is not None and payload.percent is None:
        answer = kvcache_limit_set(instance, size=payload.size, **common)
    elif payload.percent is not None and payload.size is None:
        answer = kvcache_limit_percent_set(instance, percent=payload.percent, **common)
    else:
        raise InvalidInput({"size": "Give exactly one of size and percent."})
    return Status(202 if answer.status == "pending" else 200, answer)


@router.post("/{instance_id}/limit/automatic", auth=operator, response={200: InstanceOut, **ERRORS})
def give_limit_back(request: HttpRequest, instance_id: InstanceId, payload: Empty) -> Any:
    """The controller may move the limit again; a limit set by hand stays where it was put until then."""
    hand_back(instance_by_id(instance_id), actor=caller_of(request).actor)
    return instance_by_id(instance_id)


@router.post("/{instance_id}/trim", auth=operator, response={200: TrimOut, 202: TrimOut, **ERRORS})
def trim_instance(request: HttpRequest, instance_id: InstanceId, payload: Empty) -> Any:
    """Give back idle KV memory (prefix cache, mapped pages); the limit stays. ``freed_bytes`` is measured."""
    answer = kvcache_trim(instance_by_id(instance_id), actor=caller_of(request).actor)
    return Status(202 if answer.status == "pending" else 200, answer)


@router.get("/{instance_id}/safety_floor", response={200: SafetyFloorOut, **ERRORS})
def get_safety_floor(request: HttpRequest, instance_id: InstanceId) -> Any:
    return kvcache_safety_floor(instance_by_id(instance_id))


@router.get("/{instance_id}/logs", response={200: LogOut, **ERRORS})
def get_logs(
    request: HttpRequest,
    instance_id: InstanceId,
    lines: Annotated[int, Query(ge=1, le=10_000)] = 200,
    attempt: Annotated[int | None, Query(ge=1, le=2**31 - 1)] = None,
) -> Any:
    """The last ``lines`` lines of the newest start, or of start number ``attempt``."""
    instance = instance_by_id(instance_id)
    start = instance.attempts.filter(number=attempt).first() if attempt is not None else instance.attempt
    if attempt is not None and start is None:
        raise NotFound(f"Instance {instance_id} has no start number {attempt}.")
    text = instance_log(instance, lines=lines + 1, attempt=start)
    return {"lines": text[-lines:], "attempt": start.number if start else None, "truncated": len(text) > lines}


@router.get("/{instance_id}/proposals", response={200: list[ProposalOut], **ERRORS})
def get_proposals(request: HttpRequest, instance_id: InstanceId) -> Any:
    """What would help a start that lacked memory: room, a shorter context, a smaller limit. Empty for any other."""
    return [asdict(one) for one in proposals_of(instance_by_id(instance_id))]


@router.post("/{instance_id}/proposals/{kind}", auth=operator, response={202: InstanceOut, **ERRORS})
def take_proposal(
    request: HttpRequest, instance_id: InstanceId, kind: Literal["context", "limit", "room"], payload: Empty
) -> Any:
    """Save the proposed option and launch again. For *room* use the model's ``make_room``."""
    proposal_take(instance_by_id(instance_id), kind, actor=caller_of(request).actor)
    return Status(202, instance_by_id(instance_id))


#: Nothing of this framework's own: an answer that is no JSON.
_TEXT = {"responses": {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}}


@router.get("/{instance_id}/attempts/{number}/log", response={200: None, **ERRORS}, openapi_extra=_TEXT)
def download_log(
    request: HttpRequest, instance_id: InstanceId, number: Annotated[int, Path(ge=1, le=2**31 - 1)]
) -> HttpResponse:
    """The whole log of one start as ``text/plain``, at most SARDEENZ_LOG_DOWNLOAD_BYTES of it, secrets masked."""
    instance = instance_by_id(instance_id)
    start = instance.attempts.select_related("host", "instance").filter(number=number).first()
    if start is None:
        raise NotFound(f"Instance {instance_id} has no start number {number}.")
    headers = {"Content-Disposition": f'attachment; filename="{log_name(instance, start)}"'}
    return HttpResponse(attempt_log(start), content_type="text/plain; charset=utf-8", headers=headers)


@router.get("/{instance_id}/events", response={200: list[EventOut], **ERRORS})
def get_events(
    request: HttpRequest,
    instance_id: InstanceId,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
) -> Any:
    return instance_by_id(instance_id).events.all()[offset : offset + limit]


@router.get("/{instance_id}/attempts", response={200: list[AttemptOut], **ERRORS})
def get_attempts(request: HttpRequest, instance_id: InstanceId) -> Any:
    return instance_by_id(instance_id).attempts.all()[:100]
