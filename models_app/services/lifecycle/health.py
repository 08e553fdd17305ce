"""Engines that live and do nothing: found by what moves, not by ``/health``, which a hung engine answers with 200.

*Hung*: requests run and neither prompt nor generated tokens grow for HUNG_AFTER_S, and then a one-token probe gets
nothing within PROBE_LIMIT_S. An engine with nothing to do is probed every PROBE_EVERY_S; one whose counters moved in
that time has proved itself. A probe alone condemns nobody: when anything moved while it waited, the engine was busy.

*Stuck* is another thing: requests wait, none runs, none can under the limit in force. The engine is well; the operator
is told which request and what to do, and nothing is ended.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.conf import settings

from gpus_app.policies.base import gib
from models_app import broker, transitions
from models_app.engines.causes import Cause
from models_app.engines.client import EngineMetrics, EngineRefused
from models_app.errors import EngineUnavailable
from models_app.models import Instance, Model
from models_app.services.access import EngineSaidNo, client, here
from models_app.services.audit import audit
from models_app.services.lifecycle.ending import instance_fail
from models_app.states import InstanceState, LimitStatus

log = logging.getLogger(__name__)
S = InstanceState
ACTOR = "health check"
HUNG = "hung"
STUCK = "stuck"
_OK = "ok"
_BUSY = "busy"
#: A figure's page of a living engine comes within milliseconds.
_CALL_LIMIT_S = 2.0


@dataclass(frozen=True)
class Seen:
    """What the last look saw, as ``Instance.health_facts`` keeps it. Times are epoch seconds; 0: not so."""

    attempt: int = 0
    tokens: float = 0.0
    moved_at: float = 0.0
    stalled_since: float = 0.0
    silent_since: float = 0.0
    waiting_since: float = 0.0

    @classmethod
    def of(cls, row: Instance, now: float) -> Seen:
        facts = row.health_facts
        if facts.get("attempt") != row.attempt_id:
            return cls(attempt=row.attempt_id or 0, tokens=-1.0, moved_at=now)
        return cls(**{name: facts[name] for name in cls.__dataclass_fields__ if name in facts})


def health_check(instance_id: int, *, now: float | None = None) -> None:
    """Look once at an engine that should serve; take a hung one out of the routes and let its policy decide. Host
    worker.

    Costs one read of ``/metrics``; a probe only after a silence, so a busy engine pays nothing.
    """
    row = here(instance_id)
    now = time.time() if now is None else now
    if row is None:
        return
    if row.state == S.UNREACHABLE and row.health == HUNG:
        _again(row)
    elif row.state == S.READY:
        _look(row, Seen.of(row, now), now)


def _look(row: Instance, before: Seen, now: float) -> None:
    try:
        figures = client(row, limit_s=_CALL_LIMIT_S).metrics()
    except EngineRefused as exc:
        log.info("%s shows no figures: %s", row, exc.message)
        return
    except EngineUnavailable:
        _silent(row, before, now)
        return
    seen = _see(row, figures, before, now)
    _keep(row, seen, moved=seen.moved_at == now and seen.tokens != before.tokens)
    if seen.waiting_since:
        _waits(row, seen, now)
    elif seen.stalled_since and now - seen.stalled_since >= settings.HUNG_AFTER_S:
        stalled = f"{figures.running:.0f} running and no token for {now - seen.stalled_since:.0f} s"
        _prove(row, seen, figures, f"{stalled}, and a probe got none within {settings.PROBE_LIMIT_S:g} s.", now)
    elif _probe_is_due(row, seen, figures, now):
        sentence = f"It had nothing to do, and a probe got no token within {settings.PROBE_LIMIT_S:g} s."
        _prove(row, seen, figures, sentence, now)
    elif row.health != _OK and not seen.stalled_since:
        transitions.report(row.pk, expected=S.READY, health=_OK, health_reason="")


def _see(row: Instance, figures: EngineMetrics, before: Seen, now: float) -> Seen:
    tokens = figures.prompt_tokens + figures.generation_tokens
    moved = tokens != before.tokens
    waits = figures.waiting >= 1 and figures.running == 0 and not moved
    stalls = figures.running >= 1 and not moved
    return Seen(
        attempt=row.attempt_id or 0,
        tokens=tokens,
        moved_at=now if moved else before.moved_at,
        stalled_since=(before.stalled_since or now) if stalls else 0.0,
        waiting_since=(before.waiting_since or now) if waits else 0.0,
    )


def _keep(row: Instance, seen: Seen, *, moved: bool) -> None:
    """Written past ``transitions.report``: pages are not told every ten seconds that nothing has changed."""
    fields: dict[str, Any] = {"health_facts": vars(seen)}
    if moved:
        fields["last_progress_at"] = datetime.fromtimestamp(seen.moved_at, UTC)
    Instance.objects.filter(pk=row.pk, state=S.READY, attempt=row.attempt_id).update(**fields)


def _probe_is_due(row: Instance, seen: Seen, figures: EngineMetrics, now: float) -> bool:
    """When idle for long enough; not where the model goes to sleep when idle, which a probe would keep from it."""
    if settings.PROBE_EVERY_S <= 0 or figures.busy:
        return False
    if row.model.idle_sleep_after_s is not None and not row.model.pinned:
        return False
    return now - seen.moved_at >= settings.PROBE_EVERY_S


# --- silence -----------------------------------------------------------------------------------------


def _silent(row: Instance, before: Seen, now: float) -> None:
    """It does not even show its figures: stopped by a signal, or swamped. It is given the same time, then hung."""
    since = before.silent_since or now
    _keep(row, Seen(**{**vars(before), "silent_since": since}), moved=False)
    if now - since < settings.HUNG_AFTER_S or not _my_turn(row):
        return
    if _token(row) or _figures(row) is not None:
        return
    _condemn(row, f"It has answered nothing for {now - since:.0f} s, although its process lives.")


# --- the proof -----------------------------------------------------------------------------------------


def _token(row: Instance) -> bool:
    """Whether the engine answers a one-token request in time. A refusal is an answer: something in there thinks."""
    try:
        client(row, limit_s=settings.PROBE_LIMIT_S).probe_token(row.model.served_model_name)
    except EngineRefused:
        return True
    except EngineUnavailable:
        return False
    return True


def _my_turn(row: Instance) -> bool:
    """Looks come every ten seconds and a probe may take longer: one at a time."""
    return broker.once_in(f"probe:{row.pk}", settings.PROBE_LIMIT_S)


def _figures(row: Instance) -> EngineMetrics | None:
    try:
        return client(row, limit_s=_CALL_LIMIT_S).metrics()
    except EngineSaidNo:
        return None


def _prove(row: Instance, seen: Seen, before: EngineMetrics, sentence: str, now: float) -> None:
    """Let it make one token. None, and nothing else moved either: it hangs."""
    if not _my_turn(row):
        return
    if _token(row):
        _keep(row, Seen(attempt=seen.attempt, tokens=seen.tokens, moved_at=now), moved=True)
        if row.health != _OK:
            transitions.report(row.pk, expected=S.READY, health=_OK, health_reason="")
        return
    after = _figures(row)
    if after is not None:
        moved = after.prompt_tokens + after.generation_tokens != seen.tokens
        came = not before.busy and after.running > 1  # real requests beside the probe: a long prompt, perhaps
        if moved or came:
            transitions.report(
                row.pk, expected=S.READY, health=_BUSY, health_reason="Too busy to answer a probe in time."
            )
            return
        if (stuck := _stuck_sentence(row)) is not None:
            _say_stuck(row, stuck)
            return
    _condemn(row, sentence)


def _condemn(row: Instance, sentence: str) -> None:
    """ready → unreachable, which takes it out of the routes; then its restart policy decides."""
    reason = f"Hung: {sentence}"
    moved = transitions.move(
        row.pk, S.UNREACHABLE, expected=S.READY, reason=reason, actor=ACTOR, health=HUNG, health_reason=reason[:500]
    )
    if moved:
        audit(ACTOR, "instance.hung", str(row), "failed", sentence)
        row.state = S.UNREACHABLE
        _by_policy(row, sentence)


def _by_policy(row: Instance, sentence: str) -> None:
    """Restarted, unless its policy is *never*: then it stays as it is, out of the routes, for somebody to look at."""
    if row.model.restart_policy == Model.RestartPolicy.NEVER:
        return
    advice = "See its log for the last thing that it did; a driver or NCCL error there explains most hangs."
    instance_fail(row, Cause(HUNG, f"The engine hung. {sentence}", advice, ""))


def _again(row: Instance) -> None:
    """A hung engine that makes tokens again serves again; one that does not is left to its policy."""
    if _token(row):
        transitions.move(
            row.pk,
            S.READY,
            expected=S.UNREACHABLE,
            reason="It makes tokens again.",
            actor=ACTOR,
            health=_OK,
            health_reason="",
            health_facts={},
        )
    else:
        _by_policy(row, row.health_reason.removeprefix("Hung: "))


# --- stuck -------------------------------------------------------------------------------------------


def _waits(row: Instance, seen: Seen, now: float) -> None:
    """Requests wait and none runs. The add-on names those that can never run; else time tells."""
    sentence = _stuck_sentence(row)
    if sentence is None and now - seen.waiting_since >= settings.HUNG_AFTER_S:
        sentence = (
            f"Requests have waited for {now - seen.waiting_since:.0f} s and none runs. "
            "Raise its KV limit, or abort what waits."
        )
    if sentence is not None:
        _say_stuck(row, sentence)


def _stuck_sentence(row: Instance) -> str | None:
    """Which requests cannot run under the limit in force, by the engine's own account; None: it names none."""
    if row.provider == "none":
        return None
    try:
        requests = client(row, limit_s=_CALL_LIMIT_S).kvcache_status().get("requests") or {}
    except EngineSaidNo:
        return None
    stuck = requests.get("stuck") or []
    if not stuck:
        if row.limit_status == LimitStatus.STARVED and requests.get("waiting"):
            return "Requests wait and no page of KV memory can be had: raise its limit, or abort what waits."
        return None
    first = stuck[0]
    needs = f" needs {gib(int(first['needs_bytes']))} of KV memory" if first.get("needs_bytes") else " cannot run"
    limit = f" and the limit is {gib(row.effective_limit_bytes)}" if row.effective_limit_bytes else ""
    more = f" ({len(stuck)} such requests)" if len(stuck) > 1 else ""
    return f"Request {first.get('id', '?')}{needs}{limit}{more}: raise the limit, or abort it."


def _say_stuck(row: Instance, sentence: str) -> None:
    if (row.health, row.health_reason) == (STUCK, sentence[:500]):
        return
    transitions.report(row.pk, expected=S.READY, health=STUCK, health_reason=sentence[:500])
    if row.health != STUCK:
        transitions.note(row.pk, "health", sentence, actor=ACTOR)
