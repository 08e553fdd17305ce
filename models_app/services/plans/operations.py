"""Long work in steps that survives its worker: one short step at a time, each under a fence.

A kind of operation registers a handler. The handler looks at the operation and at the world, does at most one short
thing, and answers what is to be written. It is called again every second until it says that it is done, by whichever
control worker comes first; a worker that was overtaken finds the fence raised and writes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.utils import timezone

from models_app import dispatch, events
from models_app.errors import SardeenzError
from models_app.models import Instance, Model, Operation
from models_app.services.audit import audit

log = logging.getLogger(__name__)

STEP_EVERY_S = 1.0
OPEN = (Operation.State.PENDING, Operation.State.RUNNING)


@dataclass
class Progress:
    """What a handler answers. ``done`` ends the operation: succeeded, or failed with ``message`` when ``failed``."""

    done: bool = False
    failed: bool = False
    cancelled: bool = False
    phase: str = ""
    message: str = ""
    progress: float | None = None
    steps: list[dict[str, Any]] | None = None
    facts: dict[str, Any] = field(default_factory=dict)


Handler = Callable[[Operation], Progress]
HANDLERS: dict[str, Handler] = {}


def handles(kind: str) -> Callable[[Handler], Handler]:
    """Register the handler of a kind of operation."""

    def register(handler: Handler) -> Handler:
        HANDLERS[kind] = handler
        return handler

    return register


def operation_create(
    kind: str,
    *,
    title: str,
    actor: str,
    steps: list[dict[str, Any]],
    facts: dict[str, Any] | None = None,
    model: Model | None = None,
    instance: Instance | None = None,
    deadline_s: float | None = None,
) -> Operation:
    """Record the plan and send its first step; it fails after ``deadline_s`` (default OPERATION_LIMIT_S).

    Raises ValueError for a kind that nobody handles."""
    limit_s = settings.OPERATION_LIMIT_S if deadline_s is None else deadline_s
    if kind not in HANDLERS:
        raise ValueError(f"no handler for operations of kind {kind!r}")
    with transaction.atomic():
        operation = Operation.objects.create(
            kind=kind,
            title=title[:255],
            steps=steps,
            facts=facts or {},
            model=model,
            instance=instance,
            created_by=actor[:150],
            deadline_at=timezone.now() + timedelta(seconds=limit_s),
        )
        audit(actor, f"operation.{kind}", title)
        events.publish_operation_on_commit(operation.pk)
        dispatch.send_on_commit(dispatch.OPERATION_STEP, operation.pk, queue=dispatch.CONTROL_QUEUE)
    return operation


def operation_step(operation_id: int) -> bool:
    """Do one step of an operation. True: there is more to do. Control worker."""
    taken = Operation.objects.filter(pk=operation_id, state__in=OPEN).update(
        fence=F("fence") + 1, state=Operation.State.RUNNING
    )
    if not taken:
        return False
    operation = Operation.objects.select_related("model", "instance").get(pk=operation_id)
    progress = _run(operation)
    return _write(operation, progress) and not progress.done


def _run(operation: Operation) -> Progress:
    if operation.deadline_at and timezone.now() > operation.deadline_at:
        return Progress(
            done=True, failed=True, message=f"Not finished within its time limit; last: {operation.message}"
        )
    handler = HANDLERS.get(operation.kind)
    if handler is None:
        return Progress(done=True, failed=True, message=f"This version knows no operation of kind {operation.kind!r}.")
    try:
        return handler(operation)
    except SardeenzError as exc:
        return Progress(done=True, failed=True, message=exc.message)


def _write(operation: Operation, progress: Progress) -> bool:
    """Write the outcome unless another worker has taken the operation over; whether it was written."""
    now = timezone.now()
    changes: dict[str, Any] = {
        "phase": progress.phase[:64],
        "message": progress.message[:1000],
        "progress": progress.progress,
        "facts": operation.facts | progress.facts,
        "updated_at": now,
    }
    if progress.steps is not None:
        changes["steps"] = progress.steps
    if progress.done:
        state = Operation.State.FAILED if progress.failed else Operation.State.SUCCEEDED
        changes |= {"state": Operation.State.CANCELLED if progress.cancelled else state, "ended_at": now}
    with transaction.atomic():
        written = Operation.objects.filter(pk=operation.pk, fence=operation.fence, state__in=OPEN).update(**changes)
        if written:
            events.publish_operation_on_commit(operation.pk)
            if progress.done:
                outcome = "failed" if progress.failed else "ok"
                audit(
                    operation.created_by, f"operation.{operation.kind}.end", operation.title, outcome, progress.message
                )
    return bool(written)


def operation_cancel(operation: Operation, *, actor: str) -> Operation:
    """Ask for its end; the step under way finishes first. Repeating it changes nothing."""
    with transaction.atomic():
        asked = Operation.objects.filter(pk=operation.pk, state__in=OPEN, cancel_requested=False).update(
            cancel_requested=True
        )
        if asked:
            audit(actor, "operation.cancel", operation.title)
            events.publish_operation_on_commit(operation.pk)
            dispatch.send_on_commit(dispatch.OPERATION_STEP, operation.pk, queue=dispatch.CONTROL_QUEUE)
    operation.refresh_from_db()
    return operation
