"""Keys, audit, operations and leftovers."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

from django.http import HttpRequest, JsonResponse
from ninja import Path, Query, Router, Status
from pydantic import Field

from gpus_app.api import ERRORS
from gpus_app.models import Host
from models_app.api.auth import caller_of, viewer
from models_app.api.schemas import MAX_ID, AuditOut, KeyIn, KeyOut, NewKeyOut, OperationOut, Strict, Text
from models_app.errors import InvalidInput, NotFound
from models_app.models import ApiKey, AuditEntry, Model, Operation
from models_app.presentation.attention import attention
from models_app.presentation.board import build_board
from models_app.services.keys import api_key_create, api_key_revoke
from models_app.services.leftovers import orphans_shown
from models_app.services.reaping import leftover_reap

router = Router()


class LeftoverOut(Strict):
    """Living engine processes of this installation that no instance claims. ``started_at``: epoch seconds."""

    host: str
    instance_id: int
    attempt_id: int
    pids: list[int]
    name: str
    started_at: float | None
    served_model_name: str


class AttentionOut(Strict):
    """``rank`` 0 is worst; ``href`` is the page that tells more."""

    rank: int
    tone: str
    title: str
    text: str
    href: str
    since: datetime | None


class ReapIn(Strict):
    host: Text
    attempt_id: Annotated[int, Field(ge=1, le=MAX_ID)]


class ReapOut(Strict):
    """``outcome``: ``ended``, or ``asked`` when it lives on another host, whose worker ends it."""

    host: str
    attempt_id: int
    outcome: str


def _models(names: list[str]) -> list[Model]:
    """The models that a key is for. Raises InvalidInput that names those which are not there."""
    found = list(Model.objects.filter(served_model_name__in=names))
    missing = sorted(set(names) - {model.served_model_name for model in found})
    if missing:
        raise InvalidInput({"models": f"There is no model named {', '.join(map(repr, missing))}."})
    return found


@router.get("/keys", response={200: list[KeyOut], **ERRORS})
def list_keys(request: HttpRequest) -> Any:
    return ApiKey.objects.prefetch_related("allowed_models")


@router.post("/keys", response={201: NewKeyOut, **ERRORS})
def create_key(request: HttpRequest, payload: KeyIn) -> Any:
    """The key is in this answer and nowhere else."""
    fields = payload.dict() | {"models": _models(payload.models)}
    row, key = api_key_create(actor=caller_of(request).actor, **fields)
    shown = KeyOut.from_orm(row).model_dump(mode="json") | {"key": key}
    return JsonResponse(shown, status=201)


@router.delete("/keys/{name}", response={204: None, **ERRORS})
def revoke_key(request: HttpRequest, name: Annotated[str, Path(max_length=64)]) -> Any:
    row = ApiKey.objects.filter(name=name).first() if "\x00" not in name else None
    if row is None:
        raise NotFound(f"There is no key named {name!r}.")
    api_key_revoke(row, actor=caller_of(request).actor)
    return Status(204, None)


@router.get("/audit", response={200: list[AuditOut], **ERRORS})
def list_audit(
    request: HttpRequest,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
) -> Any:
    return AuditEntry.objects.all()[offset : offset + limit]


@router.get("/operations", auth=viewer, response={200: list[OperationOut], **ERRORS})
def list_operations(
    request: HttpRequest,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
) -> Any:
    return Operation.objects.select_related("model")[offset : offset + limit]


@router.get("/operations/{operation_id}", auth=viewer, response={200: OperationOut, **ERRORS})
def get_operation(request: HttpRequest, operation_id: Annotated[int, Path(ge=1, le=MAX_ID)]) -> Any:
    row = Operation.objects.select_related("model").filter(pk=operation_id).first()
    if row is None:
        raise NotFound(f"There is no operation {operation_id}.")
    return row


@router.get("/attention", auth=viewer, response={200: list[AttentionOut], **ERRORS})
def list_attention(request: HttpRequest) -> Any:
    """What needs somebody first, as the overview shows it: faulty GPUs, silent hosts, failures, leftovers."""
    items = attention(build_board(None), may_operate=False)
    return [{name: getattr(item, name) for name in AttentionOut.model_fields} for item in items]


@router.get("/leftovers", response={200: list[LeftoverOut], **ERRORS})
def list_leftovers(request: HttpRequest) -> Any:
    """What the hosts' last sweeps found. Processes of others are never listed here, only in a GPU's picture."""
    return [asdict(one) for one in orphans_shown(Host.objects.values_list("name", flat=True))]


@router.post("/leftovers/reap", response={200: ReapOut, **ERRORS})
def reap_leftover(request: HttpRequest, payload: ReapIn) -> Any:
    """End one: looked up again on its host now, and ended only when it is ours and still no instance claims it.

    404 when nothing of it lives, 409 when an instance claims it.
    """
    outcome = leftover_reap(payload.host, payload.attempt_id, actor=caller_of(request).actor)
    return {"host": payload.host, "attempt_id": payload.attempt_id, "outcome": outcome}
