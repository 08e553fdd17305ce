"""Idle rules: who has had nothing to do for as long as its model allows goes to sleep, or stops when it can come back.

The clock runs from the last moment at which a request was seen running or waiting in the engine, never from a
request's start, and only inference counts: lists, health checks and readings do not.
"""

from __future__ import annotations

import logging
import time

from models_app import broker
from models_app.errors import SardeenzError
from models_app.models import Instance
from models_app.services.lifecycle.sleep import instance_sleep
from models_app.services.lifecycle.stop import instance_stop
from models_app.services.memory.cards import cards
from models_app.states import InstanceState

log = logging.getLogger(__name__)
ACTOR = "idle rule"
_EVERY_S = 5.0


def idle_check(*, now: float | None = None) -> None:
    """Put to sleep what is idle for long enough; a model without sleep mode that loads on demand is stopped."""
    if not broker.once_in("idle", _EVERY_S):
        return
    rules = Instance.objects.filter(
        state=InstanceState.READY, model__idle_sleep_after_s__isnull=False, model__pinned=False
    )
    waiting = {row.pk: row for row in rules.select_related("model", "host")}
    if not waiting:
        return
    now = time.time() if now is None else now
    idle: dict[int, float] = {}
    busy: set[int] = set()
    for view in (view for card in cards(now=now).values() for view in card.rows):
        if view.idle_since is None:
            busy.add(view.id)  # at work, or not known
        else:
            idle[view.id] = max(view.idle_since, idle.get(view.id, 0.0))
    for pk, row in waiting.items():
        since = idle.get(pk)
        if since is None or pk in busy or now - since < (row.model.idle_sleep_after_s or 0):
            continue
        try:
            if row.model.enable_sleep_mode:
                instance_sleep(row, actor=ACTOR)
            elif row.model.on_demand:
                instance_stop(row, actor=ACTOR)
        except SardeenzError as exc:
            log.info("%s stays awake: %s", row, exc.message)
