"""The whole log of a start, bounded and with secrets masked, from whichever host it lies on."""

from __future__ import annotations

import gzip
import logging
import time
from pathlib import Path

import redis
from django.conf import settings

from models_app import broker, dispatch
from models_app.engines.progress import tail
from models_app.errors import BrokerAway
from models_app.models import Instance, LaunchAttempt
from models_app.selectors import masked

log = logging.getLogger(__name__)

_MOST_LINES = 1_000_000
_KEPT_S = 120
_WAIT_S = 8.0
_LOOK_S = 0.2


def _key(attempt_id: int) -> str:
    return f"sardeenz:whole-log:{attempt_id}"


def log_name(row: Instance, attempt: LaunchAttempt | None) -> str:
    """A file name that every system takes."""
    name = f"{row.model.served_model_name}-{row.pk}-start{attempt.number if attempt else 0}.log"
    return "".join(char if char.isascii() and (char.isalnum() or char in "-._") else "_" for char in name)


def attempt_log(attempt: LaunchAttempt) -> str:
    """At most LOG_DOWNLOAD_BYTES of it, the newest; when its host does not give it, what was stored, and why."""
    if attempt.host.name == settings.SARDEENZ_HOST_NAME:
        found: str | None = _here(attempt)
    else:
        found = _from_host(attempt)
    if found is not None:
        return found
    stored = "\n".join(masked(attempt.log_tail.splitlines(), attempt))
    return f"[The whole log is not to be had from host {attempt.host.name}; these are its last lines.]\n{stored}\n"


def _here(attempt: LaunchAttempt) -> str | None:
    folder = Path(attempt.run_dir)
    if not folder.is_dir():
        return None
    lines = masked(tail(folder, _MOST_LINES, limit_bytes=settings.LOG_DOWNLOAD_BYTES), attempt)
    return "\n".join(lines) + "\n"


def _from_host(attempt: LaunchAttempt) -> str | None:
    """Its worker is asked to leave it in the broker; None when it does not within a few seconds."""
    connection = broker.client()
    if connection is None:
        return None
    try:
        dispatch.send(dispatch.LOG, attempt.pk, queue=attempt.host.queue, expires=_WAIT_S)
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline:
            stored = connection.get(_key(attempt.pk))
            if isinstance(stored, bytes):
                return gzip.decompress(stored).decode() if stored else None
            time.sleep(_LOOK_S)
    except (redis.RedisError, BrokerAway, OSError) as exc:
        log.info("log of attempt %s not fetched: %s", attempt.pk, exc)
    return None


def attempt_log_leave(attempt_id: int) -> None:
    """Leave the log where the asking process finds it, an empty value when there is none. Host worker."""
    attempt = LaunchAttempt.objects.select_related("host", "instance").filter(pk=attempt_id).first()
    connection = broker.client()
    if attempt is None or connection is None or attempt.host.name != settings.SARDEENZ_HOST_NAME:
        return
    text = _here(attempt)
    connection.set(_key(attempt_id), gzip.compress(text.encode()) if text is not None else b"", ex=_KEPT_S)
