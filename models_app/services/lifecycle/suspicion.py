"""What requests found out before any check did: a router could not use an engine, so it is looked at now.

The router has taken it out of its own choice already; whether it is dead or hangs is decided here by the same looks as
ever, only sooner. A hint that is lost, late or wrong costs one look.
"""

from __future__ import annotations

import logging

from models_app import broker, dispatch, transitions
from models_app.errors import BrokerAway
from models_app.models import Instance
from models_app.states import InstanceState

log = logging.getLogger(__name__)
ACTOR = "router"

#: Several routers find the same engine dead in the same second: one look serves them all.
LOOK_EVERY_S = 2.0
#: How often the history of an instance says that requests fail there.
NOTE_EVERY_S = 60.0
_EXPIRES_S = 10.0

_WORDS = {
    "connect": "it takes no connection",
    "connect_timeout": "it did not take a connection in time",
    "reset": "it closed the connection before its answer was complete",
    "protocol": "its answer is not HTTP",
    "first_byte_timeout": "it did not begin to answer in time",
    "idle_timeout": "it fell silent in the middle of an answer",
}


def instance_suspect(instance_id: int, *, kind: str) -> None:
    """Have the worker of its host see whether a ready engine has ended, and whether it still makes tokens.

    ``kind`` is the router's word for the failure. Does nothing for an instance that is not ready: it is known already.
    """
    row = Instance.objects.select_related("host").filter(pk=instance_id, state=InstanceState.READY).first()
    if row is None or row.host is None or not broker.once_in(f"suspect:{row.pk}", LOOK_EVERY_S):
        return
    if broker.once_in(f"suspect-note:{row.pk}", NOTE_EVERY_S):
        why = _WORDS.get(kind, f"it answered several requests in a row with {kind.removeprefix('status_')}")
        transitions.note(row.pk, "router", f"Requests fail here: {why}. It is looked at now.", actor=ACTOR)
    try:
        dispatch.send(dispatch.PROBE, row.pk, queue=row.host.queue, expires=_EXPIRES_S)
        dispatch.send(dispatch.HEALTH, row.pk, queue=row.host.queue, expires=_EXPIRES_S)
    except BrokerAway as exc:
        log.warning("no look at %s: %s", row, exc.message)
