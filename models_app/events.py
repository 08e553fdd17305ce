"""What this app tells the world: payloads for live pages, and the wish that routes be read again.

The only caller of the channel layer in this app. A payload says *what* changed, by id and version; pages fetch the
fragment again, so a lost message costs seconds and a message can never show what its reader may not see.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, TypedDict

from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer
from django.db import transaction

log = logging.getLogger(__name__)

LIVE_GROUP = "live"


class InstanceChanged(TypedDict):
    type: Literal["instance.changed"]
    instance_id: int


class OperationChanged(TypedDict):
    type: Literal["operation.changed"]
    operation_id: int


class ModelsChanged(TypedDict):
    type: Literal["models.changed"]


Payload = InstanceChanged | OperationChanged | ModelsChanged

#: Called after a commit that changes what the router must know. ``route_table`` puts itself in here when Django starts.
routes_listeners: list[Callable[[], None]] = []


def _send(payload: Payload) -> None:
    layer = get_channel_layer()
    if layer is None:
        return
    try:
        async_to_sync(layer.group_send)(LIVE_GROUP, payload)
    except Exception as exc:  # the broker may be away: pages poll, routes are read by timer
        log.warning("live update not sent: %s", exc)


def publish_on_commit(payload: Payload) -> None:
    transaction.on_commit(lambda: _send(payload))


def routes_changed_on_commit() -> None:
    """Have the route table written again. Runs before pages are told: the route leaves first."""

    def go() -> None:
        for listener in routes_listeners:
            listener()

    transaction.on_commit(go)


def publish_instance_on_commit(instance_id: int, *, routes: bool = False) -> None:
    """Tell pages that an instance changed; with ``routes`` (a change of state) the route table as well."""
    if routes:
        routes_changed_on_commit()
    publish_on_commit({"type": "instance.changed", "instance_id": instance_id})


def publish_operation_on_commit(operation_id: int) -> None:
    publish_on_commit({"type": "operation.changed", "operation_id": operation_id})


def publish_models_on_commit() -> None:
    """Tell pages and the route table that a model, alias, key or policy changed."""
    routes_changed_on_commit()
    publish_on_commit({"type": "models.changed"})
