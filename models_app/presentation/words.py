"""The few words of the pages: one per state, each with a tone and an icon of its own, and what to do next.

Never more than ten words for the state of an instance; detail (a stage, a reason) stands beside the word, not in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.utils import timezone

from models_app.models import Instance, Operation
from models_app.states import DesiredState, InstanceState, LimitStatus, Stage


@dataclass(frozen=True, slots=True)
class Word:
    """A status word. ``tone`` names a CSS class (``tone-…``), ``icon`` a glyph of the icon font."""

    text: str
    tone: str
    icon: str


QUEUED = Word("Queued", "info", "hourglass")
STARTING = Word("Starting", "info", "loader-2")
READY = Word("Ready", "ok", "circle-check")
STUCK = Word("Stuck", "bad", "hand-stop")
UNREACHABLE = Word("Unreachable", "warn", "plug-connected-x")
DRAINING = Word("Draining", "info", "hourglass-low")
SLEEPING = Word("Sleeping", "calm", "moon")
STOPPING = Word("Stopping", "info", "player-stop")
STOPPED = Word("Stopped", "calm", "circle-minus")
FAILED = Word("Failed", "bad", "alert-triangle")
#: In which they are counted: what needs somebody comes first.
ORDER = (FAILED, STUCK, UNREACHABLE, QUEUED, STARTING, READY, DRAINING, SLEEPING, STOPPING, STOPPED)

STATE_WORDS: dict[str, Word] = {
    InstanceState.PENDING: QUEUED,
    InstanceState.SCHEDULED: QUEUED,
    InstanceState.STARTING: STARTING,
    InstanceState.READY: READY,
    InstanceState.UNREACHABLE: UNREACHABLE,
    InstanceState.DRAINING: DRAINING,
    InstanceState.SLEEPING: SLEEPING,
    InstanceState.STOPPING: STOPPING,
    InstanceState.STOPPED: STOPPED,
    InstanceState.FAILED: FAILED,
}

LIMIT_WORDS: dict[str, Word] = {
    LimitStatus.NONE: Word("no limit asked", "calm", "minus"),
    LimitStatus.PENDING: Word("being sent", "info", "loader-2"),
    LimitStatus.APPLIED: Word("applied", "ok", "check"),
    LimitStatus.DEFERRED: Word("deferred", "warn", "arrow-bar-down"),
    LimitStatus.STARVED: Word("starved", "bad", "alert-triangle"),
    LimitStatus.STALE: Word("refused", "warn", "ban"),
    LimitStatus.CONFLICT: Word("refused", "warn", "ban"),
    LimitStatus.REJECTED: Word("refused", "bad", "ban"),
    LimitStatus.UNAVAILABLE: Word("unknown", "warn", "help-circle"),
}

#: Who holds an engine to its limit, so that nobody takes an advisory figure for an enforced one.
ENFORCERS: dict[str, str] = {
    "addon": "Enforced inside the engine, at once.",
    "pr324": "Enforced by the engine's own kvcached endpoints.",
    "shm": "Enforced by kvcached at the engine's next allocation, not at once.",
    "none": "Advisory: this engine has no kvcached, so its KV memory is fixed at start.",
    "": "Not known yet: the engine has not answered.",
}

OPERATION_WORDS: dict[str, Word] = {
    Operation.State.PENDING: QUEUED,
    Operation.State.RUNNING: Word("Running", "info", "loader-2"),
    Operation.State.SUCCEEDED: Word("Done", "ok", "circle-check"),
    Operation.State.FAILED: FAILED,
    Operation.State.CANCELLED: Word("Cancelled", "calm", "circle-minus"),
}

#: States of one step of an operation.
STEP_WORDS: dict[str, Word] = {
    "waiting": QUEUED,
    "running": Word("Running", "info", "loader-2"),
    "verified": Word("Done", "ok", "circle-check"),
    "short": Word("Less than expected", "warn", "alert-triangle"),
    "skipped": Word("Skipped", "calm", "circle-minus"),
    "undone": Word("Undone", "calm", "arrow-back-up"),
    "failed": FAILED,
}

SICK = frozenset({"hung", "stuck"})

#: The stages of a start, in order, as the stepper shows them.
STAGES: tuple[Stage, ...] = (
    Stage.QUEUED,
    Stage.STARTING,
    Stage.LOADING_WEIGHTS,
    Stage.COMPILING,
    Stage.CAPTURING_GRAPHS,
    Stage.READY,
)
_STAGE_PLACE: dict[str, int] = {
    Stage.QUEUED: 0,
    Stage.STARTING: 1,
    Stage.DOWNLOADING: 2,
    Stage.LOADING_WEIGHTS: 2,
    Stage.WAKING: 2,
    Stage.COMPILING: 3,
    Stage.CAPTURING_GRAPHS: 4,
    Stage.WARMING_UP: 4,
    Stage.READY: 5,
}


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a start. ``state`` is done, now, failed or todo; ``percent`` is known for some stages only."""

    label: str
    state: str
    percent: int | None = None


def state_word(instance: Instance) -> Word:
    if instance.state == InstanceState.READY and instance.health in SICK:
        return STUCK
    return STATE_WORDS[instance.state]


def limit_word(instance: Instance) -> Word:
    return LIMIT_WORDS.get(instance.limit_status, LIMIT_WORDS[LimitStatus.UNAVAILABLE])


def is_starting(instance: Instance) -> bool:
    return instance.state in (InstanceState.PENDING, InstanceState.SCHEDULED, InstanceState.STARTING)


def stage_text(instance: Instance) -> str:
    """``loading weights 62 %`` while it starts, else nothing."""
    if not is_starting(instance):
        return ""
    percent = _percent(instance.stage_progress)
    return instance.stage if percent is None else f"{instance.stage} {percent} %"


def steps(instance: Instance) -> list[Step]:
    """The stepper of a start, as far as it got."""
    running = is_starting(instance)
    through = bool(instance.ready_at) and not running  # a sleeper that wakes has been ready before
    here = len(STAGES) - 1 if through else _STAGE_PLACE.get(instance.stage, 0)
    failed = instance.state == InstanceState.FAILED and not instance.ready_at
    found: list[Step] = []
    for place, stage in enumerate(STAGES):
        label: str = stage
        if place == here and not through and instance.stage in _STAGE_PLACE:
            label = instance.stage
        if place < here or (place == here and through):
            found.append(Step(label, "done"))
        elif place == here and failed:
            found.append(Step(label, "failed"))
        elif place == here and running:
            found.append(Step(label, "now", _percent(instance.stage_progress)))
        else:
            found.append(Step(label, "todo"))
    return found


def next_step(instance: Instance) -> str:
    """What happens next, or what the operator can do: a sentence, or nothing when there is nothing to do."""
    if instance.state == InstanceState.FAILED:
        if instance.next_restart_at and instance.next_restart_at > timezone.now():
            return f"Restarts by itself {duration_until(instance.next_restart_at)}."
        return "Read its log, mend the cause, then restart it."
    if instance.state == InstanceState.READY and instance.health in SICK:
        return "Restart it; requests go to its other replicas meanwhile."
    sentences: dict[str, str] = {
        InstanceState.PENDING: "Waits for a GPU with room.",
        InstanceState.SCHEDULED: "Its host starts it as soon as the start before it on this GPU is through.",
        InstanceState.UNREACHABLE: "The engine may serve on; it comes back by itself when its host is heard again.",
        InstanceState.DRAINING: "New requests go elsewhere; it ends when those in flight are through.",
        InstanceState.SLEEPING: "A request wakes it."
        if instance.model.on_demand
        else "Wake it to serve requests again.",
        InstanceState.STOPPING: "Its memory is awaited back.",
        InstanceState.STOPPED: "Launch its model to run it again."
        if instance.desired_state == DesiredState.STOPPED
        else "",
    }
    return sentences.get(instance.state, "")


def why(instance: Instance) -> str:
    """The reason to show beside the state: the first cause of a failure before anything else."""
    if instance.state == InstanceState.FAILED and instance.first_cause:
        return instance.first_cause
    if instance.state == InstanceState.READY and instance.health in SICK:
        return instance.health_reason or "Requests wait and nothing is generated."
    return instance.reason


def causes(instance: Instance) -> dict[str, str] | None:
    """First and last cause of a series of failures; None while there is no series."""
    last = instance.attempt.cause if instance.attempt else ""
    if not instance.restart_count or not instance.first_cause:
        return None
    return {"first": instance.first_cause, "last": last or instance.reason}


def limit_sentence(instance: Instance, mapped_bytes: int | None) -> str:
    """What a limit that is not simply applied means now, and the way out."""
    if instance.limit_status == LimitStatus.DEFERRED:
        over = ""
        if mapped_bytes is not None and instance.limit_bytes is not None and mapped_bytes > instance.limit_bytes:
            over = f"{gib(mapped_bytes - instance.limit_bytes)} GiB over its limit: "
        return f"{over}running requests still hold it; it shrinks as they finish."
    if instance.limit_status == LimitStatus.STARVED:
        return "Requests wait and no page can be had: raise the limit."
    if instance.limit_status in (LimitStatus.REJECTED, LimitStatus.STALE, LimitStatus.CONFLICT):
        return instance.limit_message
    if instance.limit_status == LimitStatus.UNAVAILABLE:
        return instance.limit_message or "The engine did not answer; it is asked again."
    return ENFORCERS[instance.provider] if instance.provider in ("shm", "none") else ""


def gib(value: int | float | str | None, places: int = 1) -> str:
    """Bytes as GiB without the unit; a dash for what is not known (templates say "" for what is not there)."""
    return "–" if value is None or isinstance(value, str) else f"{value / 1024**3:.{places}f}"


def size(value: int | float | str | None) -> str:
    """Bytes with their unit: ``58.9 GiB``, below one GiB ``512 MiB``."""
    if value is None or isinstance(value, str):
        return "–"
    if abs(value) >= 1024**3 or value == 0:
        return f"{value / 1024**3:.1f} GiB"
    if abs(value) >= 1024**2:
        return f"{value / 1024**2:.0f} MiB"
    return f"{value:.0f} bytes"


def milliseconds(value: float | None) -> str:
    """``35 ms``, from a second on ``1.2 s``; a dash for what is not known."""
    if value is None:
        return "–"
    return f"{value:.0f} ms" if value < 999.5 else f"{value / 1000:.1f} s"


def duration(seconds: float) -> str:
    """A span in its largest sensible unit: ``12 s``, ``5 min``, ``3 h``, ``2 d``."""
    seconds = max(0.0, seconds)
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86400:.0f} d"


def duration_until(moment: datetime) -> str:
    return f"in {duration((moment - timezone.now()).total_seconds())}"


def _percent(progress: float | None) -> int | None:
    return None if progress is None else round(max(0.0, min(1.0, progress)) * 100)
