"""The single writer of ``Instance.state``: a compare-and-set with its event, in one transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from models_app.events import publish_instance_on_commit
from models_app.models import Instance, InstanceEvent
from models_app.states import TERMINAL, InstanceState, can_move


def move(
    instance_id: int,
    to: InstanceState,
    *,
    expected: InstanceState,
    reason: str,
    actor: str = "system",
    event_facts: dict[str, Any] | None = None,
    **fields: Any,
) -> bool:
    """Move an instance from ``expected`` to ``to``; ``fields`` are written in the same update.

    Returns False when the instance is no longer in ``expected``: someone was first, stop.
    Raises ValueError for a step that the table in ``states`` does not have.
    """
    if not can_move(expected, to):
        raise ValueError(f"no step from {expected} to {to}")
    now = timezone.now()
    reason = reason[:1000]
    extra: dict[str, Any] = {}
    if to is InstanceState.READY and expected is InstanceState.STARTING:
        extra["ready_at"] = now
    if to in TERMINAL:
        extra["ended_at"] = now
    if to is InstanceState.PENDING:
        extra |= {"ended_at": None, "ready_at": None}
    with transaction.atomic():
        changed = Instance.objects.filter(pk=instance_id, state=expected).update(
            state=to, state_version=F("state_version") + 1, state_since=now, reason=reason, **(extra | fields)
        )
        if not changed:
            return False
        InstanceEvent.objects.create(
            instance_id=instance_id,
            at=now,
            kind="state",
            from_state=expected,
            to_state=to,
            reason=reason,
            actor=actor[:150],
            facts=event_facts or {},
        )
        publish_instance_on_commit(instance_id, routes=True)
    return True


def report(
    instance_id: int,
    *,
    expected: InstanceState | None = None,
    matching: Mapping[str, Any] | None = None,
    **fields: Any,
) -> bool:
    """Write what was wanted or observed (stage, limit, health …) and tell the pages; never ``state``.

    With ``expected`` the write happens only while the instance is in that state; with ``matching`` only while these
    columns hold these values (an answer to an older revision of a limit must not cover a newer one).
    """
    if "state" in fields or "state_version" in fields:
        raise ValueError("state is written by move() alone")
    rows = Instance.objects.filter(pk=instance_id, **(matching or {}))
    if expected is not None:
        rows = rows.filter(state=expected)
    with transaction.atomic():
        changed = bool(rows.update(**fields))
        if changed:
            publish_instance_on_commit(instance_id)
    return changed


def note(
    instance_id: int, kind: str, reason: str, *, actor: str = "system", facts: dict[str, Any] | None = None
) -> InstanceEvent:
    """Record something that happened without a change of state."""
    return InstanceEvent.objects.create(
        instance_id=instance_id, kind=kind, reason=reason[:1000], actor=actor[:150], facts=facts or {}
    )
