"""One short look at an engine: how far its start has got, whether it is ready, whether it has ended.

*Ready* is never believed of ``/health`` alone: our process lives, ``/health`` answers 200, ``/v1/models`` lists our
name (an old engine on a reused port would list another), and with kvcached our segment has a limit in force.
"""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from django.conf import settings
from django.utils import timezone

from models_app import dispatch, transitions
from models_app.engines import process
from models_app.engines.causes import Cause
from models_app.engines.process import Status
from models_app.engines.progress import LogFollower, Progress
from models_app.models import Instance, LaunchAttempt
from models_app.services.access import EngineSaidNo, client, here, host_of, run_dir, share_log, status_of
from models_app.services.lifecycle import hosts, ready, sleep
from models_app.services.lifecycle.ending import find_cause, instance_fail
from models_app.services.lifecycle.known_answer import answer_differs
from models_app.services.lifecycle.restart_policy import HOST_RESTARTED
from models_app.states import HAS_PROCESS, DesiredState, InstanceState, Stage

log = logging.getLogger(__name__)
S = InstanceState

PROBE_EVERY_S = 0.4
#: A starting API server that is slow to answer is looked at again; waiting for it would hold a worker's thread.
_CALL_LIMIT_S = 2.0


def instance_probe(instance_id: int) -> bool:
    """Look once at a starting or running engine: stage, readiness, end. True: look again soon. Host worker."""
    row = here(instance_id)
    if row is None or S(row.state) not in HAS_PROCESS:
        return False
    status = status_of(row)
    if row.state == S.STOPPING:
        dispatch.send(dispatch.STOP, row.pk, queue=host_of(row).queue)
        return False
    if end_found(row, status):
        return False
    # Dead, and its guardian has not written it down yet: the record is a moment away.
    ending = status is not None and not status.engine_alive
    again = ending or (row.state == S.STARTING and _look_at_start(row, status))
    if not again:
        _forget(row)
    return again


def end_found(row: Instance, status: Status | None) -> bool:
    """Whether the engine has ended, or never came to be; it is failed with its cause. True: nothing more to see."""
    found = _never_came(row) if status is None else _end_recorded(row, status)
    if found:
        _forget(row)
    return found


def _end_recorded(row: Instance, status: Status) -> bool:
    if status.ended:
        if status.stop_requested and row.state == S.DRAINING:
            return False
        instance_fail(row, find_cause(run_dir(row.attempt), status), status=status)
        return True
    if not status.engine_alive and not status.guardian_alive:
        instance_fail(row, _vanished(row), status=status)
        return True
    return False


def _never_came(row: Instance) -> bool:
    """A worker died between the claim and the start, or the run directory was removed under it."""
    age = (timezone.now() - (row.attempt.started_at if row.attempt else row.state_since)).total_seconds()
    if age < settings.START_GRACE_S:
        return False
    if row.attempt is not None and row.attempt.guardian_pid is not None:
        if process.is_alive(row.attempt.engine_pid, row.attempt.engine_start_ticks):
            return False
        cause = Cause("vanished", "Its run directory is gone, and so is its process.", "", "")
    else:
        cause = Cause("no_guardian", f"No engine came up within {settings.START_GRACE_S:g} s of the claim.", "", "")
    instance_fail(row, cause)
    return True


def _vanished(row: Instance) -> Cause:
    """Guardian and engine are gone without a record: the machine was restarted, or somebody killed both."""
    if row.attempt is not None and row.attempt.boot_id and row.attempt.boot_id != hosts.boot_id():
        return Cause(HOST_RESTARTED, f"Host {host_of(row).name} was restarted.", "", "")
    return Cause("vanished", "Guardian and engine are gone without a record: both were killed.", "", "")


# --- a start ---------------------------------------------------------------------------------------


def _look_at_start(row: Instance, status: Status | None) -> bool:
    if status is None or row.attempt is None:
        return True
    folder = Path(row.attempt.run_dir)
    waking = row.stage == Stage.WAKING
    if not waking:
        _report_progress(row, row.attempt, _follow(row.attempt.pk, folder))
        share_log(row.attempt)
    if _over_time(row, row.attempt, waking):
        return False
    answer = _ready_answer(row, folder)
    if answer is None:
        return True
    if waking and (differs := answer_differs(row)):
        advice = "Its weights did not come back as they were: it is loaded anew. Report it with its log."
        instance_fail(row, Cause("wrong_answer", f"Waking failed. {differs}", advice, ""))
        return False
    if not ready.instance_ready(row, answer, waking=waking):
        return True
    if row.desired_state == DesiredState.SLEEPING:
        sleep.sleep_again(row.pk)
    return False


#: What has been read of the logs of starts under way, so that a look reads only what is new; lost without harm.
_followers: dict[int, LogFollower] = {}


def _follow(attempt_id: int, folder: Path) -> Progress:
    """How far the log has got. The log's *ready* is only *almost*: the state says when it is."""
    follower = _followers.setdefault(attempt_id, LogFollower(folder))
    follower.poll()
    now = follower.now
    return Progress(Stage.WARMING_UP, None, now.detail) if now.stage is Stage.READY else now


def _forget(row: Instance) -> None:
    if row.attempt_id is not None:
        _followers.pop(row.attempt_id, None)


def _report_progress(row: Instance, attempt: LaunchAttempt, progress: Progress) -> None:
    """Write the stage when it has changed; note when the download ended, since it does not count as loading."""
    if attempt.load_started_at is None and row.stage == Stage.DOWNLOADING and progress.stage != Stage.DOWNLOADING:
        attempt.load_started_at = timezone.now()
        attempt.save(update_fields=["load_started_at"])
    fraction = None if progress.progress is None else round(progress.progress, 2)
    if (row.stage, row.stage_progress) != (progress.stage, fraction):
        transitions.report(row.pk, expected=S.STARTING, stage=progress.stage, stage_progress=fraction)
        row.stage, row.stage_progress = progress.stage, fraction


def _over_time(row: Instance, attempt: LaunchAttempt, waking: bool) -> bool:
    """End a start that takes longer than it may: it fails, and its whole tree is ended."""
    began: datetime = attempt.load_started_at or attempt.exec_at or attempt.started_at
    limit_s, what = settings.START_LIMIT_S, "The start"
    if waking:
        began, limit_s, what = row.state_since, settings.WAKE_LIMIT_S, "Waking"
    elif row.stage == Stage.DOWNLOADING:
        began, limit_s, what = attempt.exec_at or attempt.started_at, settings.DOWNLOAD_LIMIT_S, "The download"
    if timezone.now() - began < timedelta(seconds=limit_s):
        return False
    if waking:
        sleep.wake_failed(row, f"No answer within {limit_s:g} s.")
        return True
    cause = Cause(
        "start_limit",
        f"{what} took longer than {limit_s:g} s; last stage: {row.stage}.",
        "Raise SARDEENZ_START_LIMIT_S (or SARDEENZ_DOWNLOAD_LIMIT_S) if the model is just slow to load.",
        "",
    )
    instance_fail(row, cause)
    return True


def _ready_answer(row: Instance, folder: Path) -> dict[str, Any] | None:
    """What the engine says of its KV memory once it serves ({} without kvcached); None while it is not ready."""
    engine = client(row, limit_s=_CALL_LIMIT_S)
    try:
        if not engine.health():
            return None
        if row.model.served_model_name not in engine.models():
            return None
        if row.stage == Stage.WAKING and engine.metrics().sleep_level is not None:
            return None  # a sleeper answers all of the above, and no request
    except EngineSaidNo:
        return None
    if process.port_is_ours(folder, row.port or 0) is False:
        log.warning("%s: somebody else listens on port %s", row, row.port)
        return None
    return ready.kv_answer(row, engine)
