"""Ending a leftover on whichever host it lives: that it is ours and unclaimed is judged there, at that moment."""

from __future__ import annotations

import logging

from django.conf import settings

from models_app import dispatch
from models_app.errors import Conflict, NotFound, SardeenzError
from models_app.models import LaunchAttempt
from models_app.services.lifecycle import leftovers

log = logging.getLogger(__name__)


def orphan_reap_here(attempt_id: int, *, actor: str) -> None:
    """``orphan_reap`` by message, on the host where it lives: the outcome is in the audit trail and the next sweep."""
    try:
        leftovers.orphan_reap(attempt_id, actor=actor)
    except SardeenzError as exc:
        log.info("attempt %s not reaped: %s", attempt_id, exc.message)
    leftovers.sweep(settings.SARDEENZ_HOST_NAME)


def leftover_reap(host_name: str, attempt_id: int, *, actor: str) -> str:
    """End an orphan on whichever host it lives. Returns ``ended`` (this host) or ``asked`` (another one's worker).

    Raises NotFound when no sweep has seen it, Conflict when a row claims it, BrokerAway.
    """
    if host_name == settings.SARDEENZ_HOST_NAME:
        leftovers.orphan_reap(attempt_id, actor=actor)
        leftovers.sweep(host_name)
        return "ended"
    if not any(one.attempt_id == attempt_id for one in leftovers.orphans_shown([host_name])):
        raise NotFound(f"Host {host_name} shows no leftover of start {attempt_id}.")
    if LaunchAttempt.objects.filter(pk=attempt_id).exists():
        raise Conflict("An instance claims it: stop that instance instead.")
    dispatch.send(dispatch.REAP, attempt_id, actor, queue=dispatch.host_queue(host_name))
    return "asked"
