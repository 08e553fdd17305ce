"""Hosts that fall silent: one of them, for long enough, is lost and its instances start elsewhere; most of them at once
are not lost but out of our hearing (a broken link, a database that was away), and then nothing is decided.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from django.conf import settings
from django.utils import timezone

from gpus_app.models import Host
from models_app.engines.causes import Cause
from models_app.errors import Conflict
from models_app.models import AuditEntry, Instance, Model
from models_app.services.audit import audit
from models_app.services.lifecycle.ending import instance_fail
from models_app.services.memory.placement import Wish
from models_app.states import DesiredState, InstanceState

log = logging.getLogger(__name__)
S = InstanceState
ACTOR = "reconciler"
LOST = "host_lost"
FREEZE, THAW = "hosts.freeze", "hosts.thaw"
_FEWEST = 3
#: States of an instance that may be started elsewhere once its host is lost.
_MOVES_ON = (S.UNREACHABLE, S.STARTING)


def last_heard(host: Host) -> datetime | None:
    """When its worker or its sampler last spoke; None: never."""
    return max((at for at in (host.worker_seen_at, host.sampler_seen_at) if at), default=None)


def vanished_together(hosts: Iterable[Host]) -> list[Host]:
    """The silent hosts, when more than half of at least three fell silent within one heartbeat limit; else nothing.

    Counted are the hosts that spoke when the first of those did: one that has been off for months is not in the sum,
    nor is one in maintenance, which is the operator's way out of a freeze.
    """
    heard = [(at, host) for host in hosts if not host.maintenance and (at := last_heard(host)) is not None]
    silent = [(at, host) for at, host in heard if not host.reachable]
    limit = timedelta(seconds=settings.HOST_HEARTBEAT_LIMIT_S)
    for first, _ in sorted(silent, key=lambda one: one[0]):
        together = [host for at, host in silent if first <= at <= first + limit]
        spoke_then = sum(at >= first for at, _ in heard)
        if spoke_then >= _FEWEST and 2 * len(together) > spoke_then:
            return together
    return []


def is_frozen(hosts: Iterable[Host]) -> bool:
    return bool(vanished_together(hosts))


def freeze_sentence(hosts: Sequence[Host]) -> str:
    """What is said while it is frozen, with the way out; empty when it is not."""
    gone = vanished_together(hosts)
    if not gone:
        return ""
    names = ", ".join(sorted(host.name for host in gone))
    return (
        f"{len(gone)} of {len(hosts)} hosts fell silent at once ({names}). That looks like the network or the "
        "database, so nothing is taken out of the routes, restarted or placed anew until they are heard of again. "
        "If they are truly gone, set them to maintenance."
    )


def require_thaw() -> None:
    """Raises Conflict, with the sentence, while it is frozen: nothing new is placed then."""
    if sentence := freeze_sentence(list(Host.objects.all())):
        raise Conflict(sentence)


def freeze_check(hosts: Sequence[Host]) -> bool:
    """Whether it is frozen; the beginning and the end of it are put on record, once each."""
    sentence = freeze_sentence(hosts)
    last = AuditEntry.objects.filter(action__in=(FREEZE, THAW)).order_by("-at", "-pk").values_list("action", flat=True)
    was = last.first() == FREEZE
    if sentence and not was:
        log.warning(sentence)
        audit(ACTOR, FREEZE, detail=sentence)
    elif was and not sentence:
        audit(ACTOR, THAW, detail="Enough hosts are heard of again: the reconcilers go on.")
    return bool(sentence)


def lost_hosts_give_up(hosts: Iterable[Host]) -> None:
    """Instances of a host silent for HOST_LOST_S fail, and their restart policy starts them elsewhere.

    Its worker, should it come back, ends what runs there under an older start than the instance's newest (``sweep``),
    so there are never two owners for longer than one look. What is bound to that host by hand or by its model stays
    unreachable: it could start nowhere else, and may be found running. Sleepers sleep on where they start again.
    """
    if settings.HOST_LOST_S <= 0:
        return
    before = timezone.now() - timedelta(seconds=settings.HOST_LOST_S)
    lost = {host.pk: host for host in hosts if not host.reachable and ((at := last_heard(host)) is None or at < before)}
    rows = Instance.objects.filter(host__in=lost, state__in=_MOVES_ON).exclude(desired_state=DesiredState.STOPPED)
    rows = rows.exclude(model__restart_policy=Model.RestartPolicy.NEVER)
    for row in rows.select_related("model__host", "host", "attempt__host"):
        host = lost[row.host_id or 0]
        if Wish.of(row.model, row.placement_wish).host == host.name or host.maintenance:
            continue
        sentence = f"Host {host.name} has been silent for more than {settings.HOST_LOST_S:g} s."
        instance_fail(row, Cause(LOST, sentence, "It starts on another host, if one has room.", ""))
