"""How an engine's end is recorded: cause in plain words, exit record, and what follows from the restart policy."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from models_app import dispatch, selectors, transitions
from models_app.engines import causes, process
from models_app.engines.causes import Cause
from models_app.engines.process import Status
from models_app.engines.progress import tail
from models_app.models import Instance, LaunchAttempt
from models_app.services.access import run_dir, start_waiting
from models_app.services.audit import audit
from models_app.services.lifecycle import restart_policy
from models_app.states import InstanceState

#: Kept with the attempt for good; the whole log stays in the run directory until that is pruned.
_TAIL_LINES = 200
#: Read to find the first real error, which stands long before the last line.
_CAUSE_LINES = 4000


def find_cause(folder: Path | None, status: Status | None) -> Cause:
    """Why an engine ended, by its log and exit record."""
    lines = tail(folder, _CAUSE_LINES) if folder else []
    return causes.explain("\n".join(lines), status)


def attempt_close(attempt: LaunchAttempt | None, status: Status | None, cause: Cause | None = None) -> None:
    """Write how a start ended, once: a later look does not change a recorded cause."""
    if attempt is None:
        return
    folder = run_dir(attempt)
    ended = datetime.fromtimestamp(status.ended_at, UTC) if status and status.ended_at else timezone.now()
    fields: dict[str, object] = {
        "ended_at": ended,
        "exit_code": status.exit_code if status else None,
        "signal": status.signal if status else None,
        "log_tail": "\n".join(selectors.masked(tail(folder, _TAIL_LINES), attempt)) if folder else "",
    }
    if cause is not None:
        fields |= {"cause_code": cause.code[:64], "cause": cause.sentence[:1000], "advice": cause.advice[:1000]}
    LaunchAttempt.objects.filter(pk=attempt.pk, ended_at=None).update(**fields)


def restart_decision(
    row: Instance, *, cause_code: str, was_ready: bool, permanent: bool = False, status: Status | None = None
) -> restart_policy.Decision:
    """What the policy of the row's model says of this end."""
    return restart_policy.decide(
        policy=row.model.restart_policy,
        desired=row.desired_state,
        asked_to_stop=bool(status and status.stop_requested),
        clean_exit=bool(status and status.exit_code == 0),
        was_ready=was_ready,
        cause_code=cause_code,
        permanent=permanent,
        restarts=row.restart_count,
        limit=settings.RESTART_LIMIT,
        backoff_s=settings.RESTART_BACKOFF_S,
        backoff_max_s=settings.RESTART_BACKOFF_MAX_S,
        jitter=random.random(),  # noqa: S311 - spreads restarts, guards nothing
        spread=settings.RESTART_JITTER,
        host_in_maintenance=bool(row.host and row.host.maintenance),
    )


def restart_at(decision: restart_policy.Decision) -> datetime | None:
    return None if decision.delay_s is None else timezone.now() + timedelta(seconds=decision.delay_s)


def instance_fail(row: Instance, cause: Cause, *, status: Status | None = None) -> bool:
    """Any live state → failed, with the cause; what is left of the processes is ended; the restart policy decides.

    False: someone was first. The instance's own row must be the one that the caller looked at.
    """
    expected = InstanceState(row.state)
    was_ready = row.ready_at is not None
    decision = restart_decision(
        row, cause_code=cause.code, permanent=cause.permanent, was_ready=was_ready, status=status
    )
    reason = " ".join(part for part in (cause.sentence, decision.sentence) if part)
    with transaction.atomic():
        moved = transitions.move(
            row.pk,
            InstanceState.FAILED,
            expected=expected,
            reason=reason,
            event_facts={"cause": cause.code, "advice": cause.advice, "evidence": cause.evidence_line[:500]},
            next_restart_at=restart_at(decision),
            first_cause=row.first_cause or cause.sentence[:1000],
        )
        if not moved:
            return False
        attempt_close(row.attempt, status, cause)
        if expected is InstanceState.STARTING and not was_ready:
            taken = (timezone.now() - row.state_since).total_seconds()
            audit(row.created_by, "instance.start", str(row), "failed", f"After {taken:.0f} s: {cause.sentence}")
        if row.host is not None:
            start_waiting(row.host.name)
            dispatch.send_on_commit(dispatch.STOP, row.pk, queue=row.host.queue)
    return True


def leftovers_end(row: Instance, *, limit_s: float = 0.0) -> bool:
    """One step towards the end of whatever an ended start left running. True: something lives on, look again."""
    folder = run_dir(row.attempt)
    if folder is None or not folder.is_dir():
        return False
    if not process.stop_step(folder, limit_s=limit_s).done:
        return True
    process.cleanup(folder)
    return False
