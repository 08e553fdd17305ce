"""The audit trail: every act of an operator, key or policy, with what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from models_app.errors import SardeenzError
from models_app.models import AuditEntry


def audit(
    actor: str, action: str, target: str = "", outcome: str = "ok", detail: str = "", address: str | None = None
) -> AuditEntry:
    """Record an act. ``outcome`` is ok, refused or failed. Texts are cut to their columns, never refused."""
    return AuditEntry.objects.create(
        actor=actor[:150],
        action=action[:64],
        target=target[:255],
        outcome=outcome[:16],
        detail=detail[:1000],
        address=address,
    )


def host_act_audit(*, actor: str, action: str, target: str, detail: str = "", **_: Any) -> None:
    """An act on a host or GPU, as ``gpus_app.events.acted`` tells it: that app does not know this one."""
    audit(actor, action, target, detail=detail)


@contextmanager
def audited(actor: str, action: str, target: str = "", detail: str = "") -> Iterator[None]:
    """Record the act inside as ok, as refused (a named error below 500) or as failed, and let the error pass.

    Use it outside of the act's own transaction: a refusal must stay on record when the act is rolled back.
    """
    try:
        yield
    except SardeenzError as exc:
        audit(actor, action, target, "refused" if exc.status < 500 else "failed", exc.message)
        raise
    audit(actor, action, target, "ok", detail)
