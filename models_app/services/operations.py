"""Long work in steps that survives its worker: one short step at a time, each under a fence."""

from __future__ import annotations

from typing import Any

from models_app.models import Instance, Model, Operation


def operation_create(
    kind: str,
    *,
    title: str,
    actor: str,
    steps: list[dict[str, Any]],
    facts: dict[str, Any] | None = None,
    model: Model | None = None,
    instance: Instance | None = None,
    deadline_s: float = 3600.0,
) -> Operation:
    """Record the plan and send its first step."""
    raise NotImplementedError


def operation_step(operation_id: int) -> bool:
    """Do one step of an operation. True: there is more to do. Control worker."""
    raise NotImplementedError


def operation_cancel(operation: Operation, *, actor: str) -> Operation:
    """Ask for its end; the step under way finishes first."""
    raise NotImplementedError
