"""An ended instance is wanted again: the one way back from stopped or failed to pending."""

from __future__ import annotations

from typing import Any

from models_app import dispatch, transitions
from models_app.models import Instance
from models_app.states import DesiredState, InstanceState, Stage


def requeue(
    row: Instance,
    *,
    reason: str,
    actor: str = "system",
    restart_count: int = 0,
    desired_state: str = DesiredState.RUNNING,
    **fields: Any,
) -> bool:
    """stopped or failed → pending, placed after the commit. False: someone was first.

    With ``desired_state`` *sleeping* it goes back to sleep once it is ready.

    ``restart_count`` 0 means a fresh beginning: the first cause of earlier failures is forgotten.
    """
    if restart_count == 0:
        fields.setdefault("first_cause", "")
    moved = transitions.move(
        row.pk,
        InstanceState.PENDING,
        expected=InstanceState(row.state),
        reason=reason,
        actor=actor,
        desired_state=desired_state,
        stage=Stage.QUEUED,
        stage_progress=None,
        host=None,
        gpu_uuids=[],
        port=None,
        reserved_bytes=0,
        stop_force=False,
        sleep_level=None,
        health="unknown",
        health_reason="",
        restart_count=restart_count,
        next_restart_at=None,
        **fields,
    )
    if moved:
        dispatch.send_on_commit(dispatch.PLACE, row.pk, queue=dispatch.CONTROL_QUEUE)
    return moved


def place_again(row: Instance, *, reason: str, actor: str) -> bool:
    """scheduled → pending: nothing was started yet, so another card is chosen. False: someone was first."""
    return transitions.move(
        row.pk,
        InstanceState.PENDING,
        expected=InstanceState.SCHEDULED,
        reason=reason,
        actor=actor,
        host=None,
        gpu_uuids=[],
        reserved_bytes=0,
    )
