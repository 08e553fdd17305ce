"""What a Celery worker does besides its tasks: a host's worker registers its machine, says that it lives, and has it
reconciled, at its start and every few seconds.

This runs in a thread of the worker's own process, so it needs neither beat nor the control worker: each host keeps
itself right even when it is alone with the database.
"""

from __future__ import annotations

import logging
import random
import threading
from typing import Any

from celery.signals import worker_ready, worker_shutting_down
from django.conf import settings
from django.db import DatabaseError, connections

from models_app import dispatch
from models_app.errors import BrokerAway
from models_app.services.lifecycle import hosts

log = logging.getLogger(__name__)

HEARTBEAT_EVERY_S = 4.0
RECONCILE_EVERY_S = 10.0


class HostBeat(threading.Thread):
    """Registers the host, then beats until it is told to stop. A database that is away is asked again."""

    def __init__(self, host_name: str) -> None:
        super().__init__(name="host-beat", daemon=True)
        self.host_name = host_name
        self.ending = threading.Event()
        self._registered = False
        self._since_reconcile = RECONCILE_EVERY_S

    def run(self) -> None:
        while not self.ending.is_set():
            self.tick()
            # A connection kept over a pause would be found broken after a restart of the database.
            connections.close_all()
            # Jitter: a fleet that was started together must not write in step for ever.
            pause = HEARTBEAT_EVERY_S * random.uniform(0.9, 1.1)  # noqa: S311
            self._since_reconcile += pause
            self.ending.wait(pause)

    def tick(self) -> None:
        try:
            if not self._registered:
                hosts.this_host_register()
                self._registered = True
            if not hosts.this_host_beat():
                self._registered = False
        except DatabaseError as exc:
            log.warning("heartbeat of %s not written: %s", self.host_name, exc)
        if self._since_reconcile >= RECONCILE_EVERY_S:
            self._since_reconcile = 0.0
            self._reconcile()

    def _reconcile(self) -> None:
        try:
            dispatch.send(
                dispatch.RECONCILE_HOST,
                self.host_name,
                queue=dispatch.host_queue(self.host_name),
                expires=RECONCILE_EVERY_S,
            )
        except BrokerAway as exc:
            log.warning("%s", exc)


_beat: HostBeat | None = None


def _on_ready(sender: Any, **_: Any) -> None:
    """Start the beat in a worker that consumes this host's queue."""
    global _beat
    name = settings.SARDEENZ_HOST_NAME
    queues = sender.app.amqp.queues.consume_from
    if dispatch.host_queue(name) in queues and _beat is None:
        _beat = HostBeat(name)
        _beat.start()
    if dispatch.CONTROL_QUEUE in queues:
        try:
            dispatch.send(dispatch.RECONCILE_CONTROL, queue=dispatch.CONTROL_QUEUE, expires=RECONCILE_EVERY_S)
        except BrokerAway as exc:
            log.warning("%s", exc)


def _on_shutdown(**_: Any) -> None:
    if _beat is not None:
        _beat.ending.set()


def connect() -> None:
    """Called where tasks are registered: every worker imports them, no other process minds."""
    worker_ready.connect(_on_ready, dispatch_uid="sardeenz.host_beat", weak=False)
    worker_shutting_down.connect(_on_shutdown, dispatch_uid="sardeenz.host_beat_end", weak=False)
