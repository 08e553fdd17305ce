"""scheduled → starting → a guardian with an engine under it. The claim comes first; only then is anything started."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from pathlib import Path

from django.conf import settings
from django.db import IntegrityError, transaction

from gpus_app.models import Host
from models_app import dispatch, transitions
from models_app.engines import identity, process
from models_app.engines.base import EngineSpec
from models_app.engines.causes import Cause
from models_app.engines.process import AlreadyLaunched, LaunchFailed, LaunchRecord, NoFreePort
from models_app.models import Instance, LaunchAttempt, new_engine_token
from models_app.services import specs
from models_app.services.access import here, host_of, run_dir, this_installation
from models_app.services.lifecycle import hosts
from models_app.services.lifecycle.ending import instance_fail
from models_app.services.lifecycle.stop import instance_stop_begin
from models_app.states import LIVE, DesiredState, InstanceState, LimitStatus, Stage

log = logging.getLogger(__name__)
S = InstanceState

#: A port may be taken between our look and the claim by another instance's claim.
_PORT_TRIES = 3
FIRST_PROBE_S = 0.3
_ANOTHERS = (
    "Its run folder holds a start that the database knows nothing of, as after it was put back from a copy or lost its "
    "last seconds. That engine is ended, and the next start has a folder of its own."
)


def instance_start(instance_id: int) -> bool:
    """Claim (scheduled → starting) unless another start is under way on a shared GPU; then exec. Host worker.

    False: not ours to start, or not yet: it stays scheduled with the reason and is tried again when the other is done.
    """
    row = here(instance_id)
    if row is None or row.state != S.SCHEDULED:
        return False
    attempt = _claim(row)
    if attempt is None:
        return False
    row = here(instance_id)
    if row is None:
        return False
    try:
        record = _exec(row, attempt)
    except AlreadyLaunched:
        if _is_anothers(row):
            instance_fail(row, Cause("launch_failed", _ANOTHERS, "", ""))
        return False
    except (LaunchFailed, OSError, ValueError) as exc:
        message = getattr(exc, "message", None) or str(exc)
        instance_fail(row, Cause("launch_failed", f"The engine could not be started: {message}", "", ""))
        return False
    _record(attempt, record)
    _after(row)
    return True


def _is_anothers(row: Instance) -> bool:
    """Whether the folder is of a start that this one is not; a doubled message finds its own."""
    folder = run_dir(row.attempt)
    found = process.read_attempt(folder) if folder else None
    return found is not None and found.get("port") != row.port


def _claim(row: Instance) -> LaunchAttempt | None:
    """Take the start under a lock of the host, so that of two workers, or two instances on one GPU, one goes first."""
    for _ in range(_PORT_TRIES):
        try:
            with transaction.atomic():
                host = Host.objects.select_for_update(no_key=True).get(pk=host_of(row).pk)
                return _claim_locked(row, host)
        except IntegrityError:
            log.info("port of %s was taken in between, trying another", row)
        except NoFreePort as exc:
            instance_fail(row, Cause("no_port", f"No free port on {host_of(row).address}: {exc}", "", ""))
            return None
    return None


def _claim_locked(row: Instance, host: Host) -> LaunchAttempt | None:
    if row.desired_state == DesiredState.STOPPED:
        instance_stop_begin(row, reason="Cancelled before it was started.", actor="system")
        return None
    other = _starting_beside(row)
    if other is not None:
        reason = f"Waits: {other.model.served_model_name} is starting on the same GPU, one start at a time."
        if row.reason != reason:
            transitions.report(row.pk, expected=S.SCHEDULED, reason=reason)
        return None
    port = _free_port(host)
    last = row.attempts.order_by("-number").values_list("number", flat=True).first() or 0
    attempt = LaunchAttempt.objects.create(
        instance=row, number=last + 1, host=host, spec=specs.spec_of(row.model).to_json(), boot_id=hosts.boot_id()
    )
    attempt.run_dir = str(Path(settings.SARDEENZ_RUN_DIR) / str(attempt.pk))
    attempt.save(update_fields=["run_dir"])
    moved = transitions.move(
        row.pk,
        S.STARTING,
        expected=S.SCHEDULED,
        reason="Starting.",
        event_facts={"attempt": attempt.number, "port": port},
        attempt=attempt,
        port=port,
        ipc_name=identity.ipc_name(this_installation(), row.pk, attempt.pk),
        engine_token=new_engine_token(),
        spec_revision=row.model.spec_revision,
        stage=Stage.STARTING,
        stage_progress=None,
        ready_at=None,
        sleep_level=None,
        provider="",
        effective_limit_bytes=None,
        limit_acked_revision=0,
        limit_status=LimitStatus.PENDING if row.limit_bytes else LimitStatus.NONE,
    )
    if not moved:
        attempt.delete()
        return None
    return attempt


def _starting_beside(row: Instance) -> Instance | None:
    """Another instance whose engine is starting on one of the same GPUs: two would spoil each other's profiling."""
    starting = Instance.objects.filter(host=row.host, state=S.STARTING).exclude(pk=row.pk).select_related("model")
    return next((one for one in starting if set(one.gpu_uuids) & set(row.gpu_uuids)), None)


def _free_port(host: Host) -> int:
    ports = Instance.objects.filter(host=host, state__in=LIVE).exclude(port=None).values_list("port", flat=True)
    return process.free_port(host.address, taken={port for port in ports if port is not None})


def _exec(row: Instance, attempt: LaunchAttempt) -> LaunchRecord:
    """Build the command from the spec that was recorded with the claim, and hand it to a guardian."""
    host = host_of(row)
    spec = EngineSpec.from_json(attempt.spec)
    command = specs.engine_of(host).command(spec, specs.context_of(row, attempt, host))
    attempt.argv = list(command.masked_argv)
    attempt.save(update_fields=["argv"])
    return process.launch(
        command,
        Path(attempt.run_dir),
        {
            "installation": this_installation(),
            "attempt_id": attempt.pk,
            "instance_id": row.pk,
            "served_model_name": row.model.served_model_name,
            "model": row.model.model,
            "replica_index": row.replica_index,
            "engine": host.engine_kind,
            "address": host.address,
            "port": row.port,
            "gpu_uuids": row.gpu_uuids,
            "tensor_parallel_size": spec.tensor_parallel_size,
            "ipc_name": row.ipc_name,
            "spec_revision": spec.spec_revision,
        },
        token=row.engine_token,
    )


def _record(attempt: LaunchAttempt, record: LaunchRecord) -> None:
    LaunchAttempt.objects.filter(pk=attempt.pk).update(
        guardian_pid=record.guardian_pid,
        guardian_start_ticks=record.guardian_start_ticks,
        engine_pid=record.engine_pid,
        engine_start_ticks=record.engine_start_ticks,
        exec_at=datetime.fromtimestamp(record.started_at, UTC),
    )


def _after(row: Instance) -> None:
    """Go on: look at it soon; or end it at once when it was stopped while the guardian came up."""
    queue = host_of(row).queue
    now = here(row.pk)
    if now is not None and now.state == S.STARTING and now.attempt_id == row.attempt_id:
        dispatch.send(dispatch.PROBE, row.pk, queue=queue, countdown=FIRST_PROBE_S)
    else:
        dispatch.send(dispatch.STOP, row.pk, queue=queue)
