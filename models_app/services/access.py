"""How a host worker gets at its own engines: the row if it is of this host, its run directory, its client."""

from __future__ import annotations

import logging
from pathlib import Path

import redis
from django.conf import settings
from django.db import transaction

from gpus_app.models import Host
from models_app import broker, dispatch, selectors
from models_app.engines.client import EngineClient, EngineRefused
from models_app.engines.identity import installation_id
from models_app.engines.process import Status, read_status
from models_app.engines.progress import tail
from models_app.errors import EngineUnavailable
from models_app.models import Instance, LaunchAttempt
from models_app.states import InstanceState

log = logging.getLogger(__name__)

#: What an engine that does not do what it is asked looks like: silent, or with a refusal of its own.
EngineSaidNo = (EngineUnavailable, EngineRefused)

#: What other hosts' web processes may read of a log, and for how long after the last look.
_SHARED_LINES = 400
_SHARED_S = 3600


def this_installation() -> str:
    """The mark by which processes, segments and folders of this installation are known on its hosts."""
    return installation_id(Path(settings.SARDEENZ_HOME))


def here(instance_id: int) -> Instance | None:
    """The instance with all that a step needs; None when it is gone or lives on another host."""
    return (
        Instance.objects.select_related("model__memory_policy", "host", "attempt__host")
        .filter(pk=instance_id, host__name=settings.SARDEENZ_HOST_NAME)
        .first()
    )


def host_of(row: Instance) -> Host:
    """The host of an instance that has been placed. Raises ValueError for one that has not."""
    if row.host is None:
        raise ValueError(f"instance {row.pk} has no host")
    return row.host


def run_dir(attempt: LaunchAttempt | None) -> Path | None:
    return Path(attempt.run_dir) if attempt and attempt.run_dir else None


def status_of(row: Instance) -> Status | None:
    """The guardian's record of the newest start; None while there is none."""
    folder = run_dir(row.attempt)
    return read_status(folder) if folder else None


def client(row: Instance, *, limit_s: float | None = None) -> EngineClient:
    """A client of the row's engine; every call of it ends within ``limit_s`` (default CONTROL_CALL_LIMIT_S)."""
    return EngineClient(
        row.base_url or "", row.engine_token, timeout=settings.CONTROL_CALL_LIMIT_S if limit_s is None else limit_s
    )


def start_waiting(host_name: str) -> None:
    """After a start has come to its end: let those that wait for a GPU of this host try. Call inside a transaction."""
    waiting = Instance.objects.filter(host__name=host_name, state=InstanceState.SCHEDULED).order_by("state_since", "pk")
    for pk in waiting.values_list("pk", flat=True):
        dispatch.send_on_commit(dispatch.START, pk, queue=dispatch.host_queue(host_name))


def start_waiting_now(host_name: str) -> None:
    with transaction.atomic():
        start_waiting(host_name)


def share_log(attempt: LaunchAttempt) -> None:
    """Leave the end of the log where web processes on other hosts can read it."""
    connection, folder = broker.client(), run_dir(attempt)
    if connection is None or folder is None:
        return
    lines = selectors.masked(tail(folder, _SHARED_LINES), attempt)
    try:
        connection.set(selectors.log_key(attempt.pk), "\n".join(lines), ex=_SHARED_S)
    except (redis.RedisError, OSError) as exc:
        log.warning("log of attempt %s not shared: %s", attempt.pk, exc)
