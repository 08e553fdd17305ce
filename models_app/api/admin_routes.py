"""Audit, operations and leftovers."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Path, Query, Router
from pydantic import Field

from gpus_app.api import ERRORS
from gpus_app.models import Host
from models_app.api.auth import caller_of, viewer
from models_app.api.schemas import MAX_ID, AuditOut, OperationOut, Strict, Text
from models_app.errors import NotFound
from models_app.models import AuditEntry, Operation
from models_app.presentation.attention import attention
from models_app.presentation.board import build_board
from models_app.services.lifecycle.leftovers import orphans_shown
from models_app.services.lifecycle.reaping import leftover_reap

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
