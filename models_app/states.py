"""The life of an instance: its states, the legal steps between them, and the sets that code asks about.

    pending -> scheduled -> starting -> ready --> draining -> stopping -> stopped
                               ^        |  ^         |
                               |        v  |         v
                               |   unreachable    sleeping
                               +--------------------+ (wake)

Who causes each step, and on what evidence:

======================  ==========================  ================================================================
step                    who                         evidence
======================  ==========================  ================================================================
pending -> scheduled    services.launch (control)   GPUs chosen, bytes reserved in the same transaction
scheduled -> starting   host worker                 none: this step is the claim, taken before anything is started
starting -> ready       host worker                 /health 200, our served name listed, our limit in force
ready <-> unreachable   reconciler                  heartbeat of the host old / fresh again, or the engine hangs
ready -> draining       services                    operator or policy; the route goes first
draining -> stopping    host worker                 nothing in flight, or the drain time limit
draining -> sleeping    host worker                 the same, then the engine said that it sleeps
sleeping -> starting    host worker                 wake was sent; ready again only after /health and a known answer
stopping -> stopped     host worker                 the guardian's exit record, and the memory is back
any live -> failed      host worker, reconciler     the guardian's exit record (code, signal, first cause in the log)
failed -> pending       restart policy, operator    a new LaunchAttempt
======================  ==========================  ================================================================

Plain Python: the router, the engines and the simulator read this module without Django.
"""

from __future__ import annotations

from enum import StrEnum


class InstanceState(StrEnum):
    """What an instance is doing now. Only ``transitions.move`` writes it."""

    PENDING = "pending"
    SCHEDULED = "scheduled"
    STARTING = "starting"
    READY = "ready"
    UNREACHABLE = "unreachable"
    DRAINING = "draining"
    SLEEPING = "sleeping"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class DesiredState(StrEnum):
    """What the operator, or a policy, wants of an instance."""

    RUNNING = "running"
    SLEEPING = "sleeping"
    STOPPED = "stopped"


class Stage(StrEnum):
    """Where a start has got to; shown while ``state`` is pending, scheduled or starting."""

    QUEUED = "queued"
    STARTING = "starting"
    DOWNLOADING = "downloading"
    LOADING_WEIGHTS = "loading weights"
    COMPILING = "compiling"
    CAPTURING_GRAPHS = "capturing graphs"
    WARMING_UP = "warming up"
    WAKING = "waking"
    READY = "ready"


class LimitStatus(StrEnum):
    """What the engine said of the wanted KV limit (kvcached's own vocabulary, plus ours for *not asked yet*)."""

    NONE = ""
    PENDING = "pending"
    APPLIED = "applied"
    DEFERRED = "deferred"
    STARVED = "starved"
    STALE = "stale"
    CONFLICT = "conflict"
    REJECTED = "rejected"
    UNAVAILABLE = "unavailable"


S = InstanceState

TRANSITIONS: dict[InstanceState, frozenset[InstanceState]] = {
    S.PENDING: frozenset({S.SCHEDULED, S.STOPPED, S.FAILED}),
    S.SCHEDULED: frozenset({S.STARTING, S.PENDING, S.STOPPED, S.FAILED}),
    S.STARTING: frozenset({S.READY, S.STOPPING, S.SLEEPING, S.FAILED}),
    S.READY: frozenset({S.UNREACHABLE, S.DRAINING, S.STOPPING, S.FAILED}),
    S.UNREACHABLE: frozenset({S.READY, S.SLEEPING, S.DRAINING, S.STOPPING, S.FAILED}),
    S.DRAINING: frozenset({S.STOPPING, S.SLEEPING, S.READY, S.UNREACHABLE, S.FAILED}),
    S.SLEEPING: frozenset({S.STARTING, S.STOPPING, S.UNREACHABLE, S.FAILED}),
    S.STOPPING: frozenset({S.STOPPED, S.FAILED}),
    S.STOPPED: frozenset({S.PENDING}),
    S.FAILED: frozenset({S.PENDING, S.STOPPED}),
}

TERMINAL = frozenset({S.STOPPED, S.FAILED})
LIVE = frozenset(S) - TERMINAL
ROUTABLE = frozenset({S.READY})
#: States in which a process of the instance may exist on a GPU.
HAS_PROCESS = frozenset({S.STARTING, S.READY, S.UNREACHABLE, S.DRAINING, S.SLEEPING, S.STOPPING})
#: States in which the instance's reservation counts against its GPUs.
OCCUPIES_GPU = HAS_PROCESS | {S.SCHEDULED}
#: States in which a KV limit can be sent to the engine at once.
LIMIT_NOW = frozenset({S.READY, S.DRAINING, S.UNREACHABLE})


def can_move(source: InstanceState, target: InstanceState) -> bool:
    """Whether the table above allows the step."""
    return target in TRANSITIONS[source]
