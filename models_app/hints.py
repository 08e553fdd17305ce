"""Hints from the sampler: *look at this instance now*. A lost hint costs seconds, so sending never raises."""

from __future__ import annotations

import logging

from models_app import dispatch
from models_app.errors import BrokerAway

log = logging.getLogger(__name__)

#: A hint that waited this long is worth nothing: the reconciler has looked since.
_EXPIRES_S = 10.0


def send_hint(kind: str, *, host: str, instance_id: int | None = None) -> None:
    """Ask the worker of ``host`` to look.

    ``kind`` "ended" (an exit record appeared) and "drift" (the segment's limit is not the one we set) look at one
    instance; anything else, or no ``instance_id``, has the whole host reconciled.
    """
    queue = dispatch.host_queue(host)
    try:
        if instance_id is None or kind not in ("ended", "drift"):
            dispatch.send(dispatch.RECONCILE_HOST, host, queue=queue, expires=_EXPIRES_S)
        elif kind == "ended":
            dispatch.send(dispatch.PROBE, instance_id, queue=queue, expires=_EXPIRES_S)
        else:
            dispatch.send(dispatch.LIMIT, instance_id, queue=queue, expires=_EXPIRES_S)
    except BrokerAway as exc:
        log.warning("hint %s for %s not sent: %s", kind, host, exc)
