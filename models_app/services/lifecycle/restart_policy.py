"""Whether and when an ended instance is started again: decided from what is known, without clock or database."""

from __future__ import annotations

from dataclasses import dataclass

from models_app.models import Model
from models_app.states import DesiredState

#: Lack of memory at load: tried again as it is, it would fail again and disturb its neighbours. The answer is room, a
#: shorter context or a smaller limit, and the cause's advice says so.
NO_MEMORY = frozenset({"gpu_out_of_memory", "gpu_memory_taken", "kv_memory_too_small"})
#: Nothing that the instance did: it comes back whatever its policy says.
HOST_RESTARTED = "host_restarted"
#: Nothing that the instance did either, but its policy decides: it is placed anew, never on the faulty GPU.
GPU_FAULT = "gpu_fault"


@dataclass(frozen=True)
class Decision:
    """``delay_s`` None: not started again. ``sentence`` says what will happen, or why nothing will."""

    delay_s: float | None
    sentence: str


def decide(
    *,
    policy: str,
    desired: str,
    asked_to_stop: bool,
    clean_exit: bool,
    was_ready: bool,
    cause_code: str,
    permanent: bool,
    restarts: int,
    limit: int,
    backoff_s: float,
    backoff_max_s: float,
    jitter: float,
    spread: float = 0.25,
    host_in_maintenance: bool = False,
) -> Decision:
    """``permanent``: the cause is such that the same start fails the same way. ``restarts`` counts starts since the
    last long good run; ``jitter`` in [0, 1) spreads them by up to the share ``spread`` of the wait.

    An engine that ended by itself with exit code 0 has failed all the same (a dead EngineCore makes vLLM exit with 0),
    so *on failure* covers it. A sleeper whose process is gone comes back like any other, and sleeps again.
    """
    if desired == DesiredState.STOPPED or (asked_to_stop and clean_exit):
        return Decision(None, "")
    if cause_code == HOST_RESTARTED:
        return Decision(0.0, "It starts again.")
    if policy == Model.RestartPolicy.NEVER:
        return Decision(None, "Its restart policy is never: start it again by hand.")
    if cause_code == GPU_FAULT:
        return Decision(0.0, "It starts again where there is room.")
    if host_in_maintenance:
        return Decision(None, "Its host is in maintenance: nothing is restarted there.")
    if not was_ready and (permanent or cause_code in NO_MEMORY):
        return Decision(None, "It is not tried again by itself: the same settings would fail the same way.")
    if restarts >= limit:
        return Decision(None, f"It failed {restarts + 1} times in a row and is not tried again by itself (crash loop).")
    delay = min(backoff_s * 2**restarts, backoff_max_s) * (1 + spread * jitter)
    return Decision(delay, f"Restart {restarts + 1} of {limit} in {delay:.0f} s.")
