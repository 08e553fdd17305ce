"""What this app tells the world: samples and changes for live pages, acts for the audit, hints for the reconcilers.

The only caller of the channel layer in this app. Payloads carry no secrets and nothing that a viewer may not see.
"""

from __future__ import annotations

import logging
from typing import Any, Literal, Protocol, TypedDict

from asgiref.sync import async_to_sync
from channels.layers import get_channel_layer
from django.db import transaction
from django.dispatch import Signal
from django.utils.module_loading import import_string

log = logging.getLogger(__name__)

LIVE_GROUP = "live"

#: Sent on commit after an operator's act on a host or GPU, with ``actor``, ``action``, ``target``, ``detail``.
#: ``models_app`` listens and writes the audit entry: this app knows nothing of it.
acted = Signal()


class SamplePayload(TypedDict):
    """One host's record of one second (see ``gpus_app.sampler.record``)."""

    type: Literal["sample"]
    record: dict[str, Any]


class GpusChanged(TypedDict):
    """A host, GPU or GPU policy changed (state, cordon, reserve): pages fetch the fragment again."""

    type: Literal["gpus.changed"]
    host: str


Payload = SamplePayload | GpusChanged


class HintSender(Protocol):
    """What ``settings.SARDEENZ_HINT_SENDER`` names: a callable that wakes a reconciler early. It may raise anything.

    Kinds: ``ended`` (the guardian recorded the end of an engine, or its process is gone), ``drift`` (a foreign writer
    changed the limit in the segment, or deleted it), ``gpu`` (a GPU's state changed; ``instance_id`` is None).
    """

    def __call__(self, kind: str, *, host: str, instance_id: int | None = None) -> None: ...


def hint_sender(dotted_path: str) -> HintSender:
    """The callable behind the setting; raises ImportError when there is none."""
    sender: HintSender = import_string(dotted_path)
    return sender


def _send(payload: Payload) -> None:
    layer = get_channel_layer()
    if layer is None:
        return
    try:
        async_to_sync(layer.group_send)(LIVE_GROUP, payload)
    except Exception as exc:  # the broker may be away: pages poll
        log.warning("live update not sent: %s", exc)


def publish_gpus_on_commit(host_name: str) -> None:
    """Tell pages that something of this host's hardware, or of the rules for it, changed."""
    payload: GpusChanged = {"type": "gpus.changed", "host": host_name}
    transaction.on_commit(lambda: _send(payload))


def report_act_on_commit(*, actor: str, action: str, target: str, detail: str = "") -> None:
    """Tell the audit about an operator's act, once it is committed."""

    def go() -> None:
        for receiver, answer in acted.send_robust(
            sender=None, actor=actor, action=action, target=target, detail=detail
        ):
            if isinstance(answer, Exception):
                log.error("%s of %s not noted by %s: %s", action, target, receiver, answer)

    transaction.on_commit(go)
