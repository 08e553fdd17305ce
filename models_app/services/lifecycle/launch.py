"""From *wanted* to *scheduled*: which replicas are missing, and where each goes.

The start itself is ``start``, its progress ``probe``, its end ``ending``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.utils import timezone

from gpus_app.models import Gpu, Host
from models_app import broker, dispatch, events, selectors, transitions
from models_app.errors import Conflict, DoesNotFit, InvalidInput
from models_app.models import Instance, Model
from models_app.services import specs
from models_app.services.audit import audit, audited
from models_app.services.lifecycle.ending import restart_at, restart_decision
from models_app.services.lifecycle.host_loss import freeze_sentence, require_thaw
from models_app.services.lifecycle.requeue import requeue
from models_app.services.lifecycle.stop import instance_stop_begin
from models_app.services.locks import instance_locked
from models_app.services.memory import placement
from models_app.services.memory.placement import Placement, Wish
from models_app.services.memory.shares import first_share
from models_app.states import HAS_PROCESS, DesiredState, InstanceState, Stage

log = logging.getLogger(__name__)
S = InstanceState

#: Why cards take nobody: hosts come back, cordons are lifted; an instance waits for that without a limit.
_CLOSED = frozenset({"unreachable", "host_cordoned", "cordoned", "faulty", "other_host"})
#: States in which an instance is on its way out: a launch then waits for its end and starts it again.
_LEAVING = frozenset({S.DRAINING, S.STOPPING})


def model_launch(
    model: Model,
    *,
    actor: str,
    replicas: int | None = None,
    host: Host | str | None = None,
    gpu_uuids: Sequence[str] | None = None,
    anyway: bool = False,
) -> list[Instance]:
    """Make the missing replicas; live ones are returned as they are, so that two clicks make one instance.

    A replica that is being stopped is started again after its end. ``replicas``, when given, becomes the model's wish.
    ``anyway`` starts although the memory does not suffice by our figures. Raises BrokerAway before anything is written,
    DoesNotFit with numbers, Conflict (instance cap, no host, most hosts away), InvalidInput (unknown host or GPUs).
    """
    with audited(actor, "model.launch", model.served_model_name):
        wish = _wish(model, replicas, host, gpu_uuids, anyway)
        require_thaw()
        broker.require()
        try:
            with transaction.atomic():
                return _launch(model, actor, replicas, wish)
        except IntegrityError:  # another launch was first between our look and our write
            with transaction.atomic():
                return _launch(model, actor, replicas, wish)


def _wish(
    model: Model, replicas: int | None, host: Host | str | None, gpu_uuids: Sequence[str] | None, anyway: bool
) -> Wish:
    """Check what was chosen by hand and put it together with what the model says."""
    wrong: dict[str, str] = {}
    if replicas is not None and not 1 <= replicas <= 64:
        wrong["replicas"] = "Use a number of replicas from 1 to 64."
    name = host.name if isinstance(host, Host) else host
    if name and not Host.objects.filter(name=name).exists():
        wrong["host"] = f"There is no host named {name!r}."
    uuids = tuple(gpu_uuids or ())
    if uuids:
        wrong |= specs.gpu_choice_errors(uuids, model.tensor_parallel_size, name)
    if wrong:
        raise InvalidInput(wrong)
    if uuids and not name:
        name = Gpu.objects.select_related("host").get(uuid=uuids[0]).host.name
    asked = {"host": name, "gpu_uuids": list(uuids), "anyway": anyway}
    return Wish.of(model, asked)


def wish_elsewhere(model: Model, *, host: str | None = None, gpu_uuids: Sequence[str] | None = None) -> Wish:
    """Where to, chosen by hand against what the model itself says. Raises InvalidInput."""
    checked = _wish(model, None, host, gpu_uuids, False)
    if gpu_uuids:
        return checked
    return Wish(host=host or checked.host)


def _launch(model: Model, actor: str, replicas: int | None, wish: Wish) -> list[Instance]:
    locked = Model.objects.select_for_update(of=("self",), no_key=True).select_related("host").get(pk=model.pk)
    wanted = replicas or locked.replicas
    rows = selectors.replicas_of(locked)
    rows |= _successors(locked)
    missing = [index for index in range(wanted) if index not in rows or not rows[index].is_live]
    if missing:
        _check_cap(len(missing))
        _check_fit(locked, wish)
    if not locked.deployed or locked.replicas != wanted:
        Model.objects.filter(pk=locked.pk).update(deployed=True, replicas=wanted)
        events.publish_models_on_commit()
    found = []
    for index in range(wanted):
        row = rows.get(index)
        if row is not None and row.is_live:
            _keep(row, actor)
        else:
            row = _make(locked, index, row, actor, wish)
        found.append(row)
    return found


def _successors(model: Model) -> dict[int, Instance]:
    """Replicas whose old instance is gone or on its way out while another takes over: that one is the replica."""
    rows = model.instances.live().exclude(replaces=None).select_related("host", "replaces")
    return {
        row.replica_index: row
        for row in rows
        if row.replaces is not None and (not row.replaces.is_live or _is_leaving(row.replaces))
    }


def _is_leaving(row: Instance) -> bool:
    return row.state in _LEAVING and row.desired_state == DesiredState.STOPPED


def _check_cap(more: int) -> None:
    live = Instance.objects.live().count()
    cap = settings.SARDEENZ_MAX_INSTANCES
    if live + more > cap:
        raise Conflict(
            f"At most {cap} instances may live at once (SARDEENZ_MAX_INSTANCES), and {live} do. Stop one first.",
            cap=cap,
            live=live,
        )


def _check_fit(model: Model, wish: Wish) -> None:
    """Refuse before anything is written when no card has room; ``instance_place`` decides for good."""
    found = placement.place(model, wish, unusable=specs.unusable_hosts(model))
    if not found.decision.gpus:
        raise DoesNotFit(placement.refusal(found), **found.facts)


def _keep(row: Instance, actor: str) -> None:
    """A live replica stays as it is; one that is leaving comes back after its end, a cancelled one goes on."""
    if row.state in _LEAVING and row.desired_state != DesiredState.RUNNING:
        transitions.report(row.pk, desired_state=DesiredState.RUNNING)
        transitions.note(
            row.pk, "launch", "Launched while it is being stopped: it starts again after its end.", actor=actor
        )
        row.desired_state = DesiredState.RUNNING


def _make(model: Model, index: int, row: Instance | None, actor: str, wish: Wish) -> Instance:
    """A new row for the replica, or its old one brought back to pending; placed after the commit."""
    asked = {"host": wish.host, "gpu_uuids": list(wish.gpu_uuids), "anyway": wish.anyway}
    if row is None:
        return replica_make(model, index, actor=actor, asked=asked)
    if requeue(row, reason="Waits to be placed.", actor=actor, created_by=actor[:150], placement_wish=asked):
        row.refresh_from_db()
    return row


def replica_make(model: Model, index: int, *, actor: str, asked: dict[str, Any] | None = None) -> Instance:
    """A new pending instance for a replica that has none, placed after the commit. Call inside a transaction."""
    limit = model.initial_limit_bytes
    row = Instance.objects.create(
        model=model,
        replica_index=index,
        created_by=actor[:150],
        placement_wish=asked or {},
        limit_bytes=limit,
        limit_automatic=not limit,
        limit_revision=1 if limit else 0,
        limit_set_by=actor[:150] if limit else "",
        reason="Waits to be placed.",
    )
    transitions.note(row.pk, "launch", "Launched.", actor=actor, facts=asked)
    dispatch.send_on_commit(dispatch.PLACE, row.pk, queue=dispatch.CONTROL_QUEUE)
    events.publish_instance_on_commit(row.pk, routes=True)
    return row


def instance_place(instance_id: int) -> bool:
    """Choose host and GPUs and reserve the bytes in one transaction: pending → scheduled. Control worker.

    The hosts' rows are locked while the choice is made: two placements at once never sell the same bytes. What does not
    fit stays pending with the reason and is tried again by the reconciler, until PLACE_LIMIT_S.
    """
    with transaction.atomic():
        hosts = {host.name: host for host in Host.objects.select_for_update(no_key=True).order_by("pk")}
        row = Instance.objects.select_related("model__host").filter(pk=instance_id, state=S.PENDING).first()
        if row is None:
            return False
        if row.desired_state == DesiredState.STOPPED:
            return transitions.move(row.pk, S.STOPPED, expected=S.PENDING, reason="Cancelled before it was placed.")
        if frozen := freeze_sentence(list(hosts.values())):
            if row.reason != frozen[:1000]:
                transitions.report(row.pk, expected=S.PENDING, reason=frozen[:1000])
            return False
        wish = Wish.of(row.model, row.placement_wish)
        found = placement.place(row.model, wish, without=row.pk, unusable=specs.unusable_hosts(row.model))
        if not found.decision.gpus:
            return _not_placed(row, found)
        host = hosts[found.decision.gpus[0].host]
        uuids = [gpu.uuid for gpu in found.decision.gpus]
        share = first_share(row, uuids, found.need) if row.limit_automatic else None
        first = {"limit_bytes": share, "limit_revision": row.limit_revision + 1, "limit_set_by": "controller"}
        # Before the move, whose own callbacks tell routers and pages: the engine should not wait for these.
        dispatch.send_on_commit(dispatch.START, row.pk, queue=host.queue)
        # The neighbours' limits come down while it loads, so that they cannot grow into its bytes.
        dispatch.send_on_commit(dispatch.REBALANCE, queue=dispatch.CONTROL_QUEUE)
        return transitions.move(
            row.pk,
            S.SCHEDULED,
            expected=S.PENDING,
            reason=found.decision.reason,
            event_facts={"need_bytes": found.need.total_bytes, "measured": found.need.measured},
            host=host,
            gpu_uuids=uuids,
            reserved_bytes=found.need.total_bytes,
            stage=Stage.QUEUED,
            **(first if share else {"limit_bytes": None} if row.limit_automatic else {}),
        )


def _not_placed(row: Instance, found: Placement) -> bool:
    reason = placement.refusal(found)
    closed = all(one.code in _CLOSED for one in found.decision.rejections)
    if not closed and timezone.now() - row.state_since > timedelta(seconds=settings.PLACE_LIMIT_S):
        sentence = f"No place was found within {settings.PLACE_LIMIT_S:.0f} s. {reason}"
        decision = restart_decision(row, cause_code="no_place", was_ready=False)
        transitions.move(
            row.pk,
            S.FAILED,
            expected=S.PENDING,
            reason=f"{sentence} {decision.sentence}".strip(),
            event_facts=found.facts,
            first_cause=row.first_cause or reason[:1000],
            next_restart_at=restart_at(decision),
        )
        audit(row.created_by, "instance.start", str(row), "failed", reason)
    elif row.reason != reason[:1000]:
        transitions.report(row.pk, expected=S.PENDING, reason=reason[:1000])
    return False


def instance_restart(instance: Instance, *, actor: str, force: bool = False) -> Instance:
    """Drain, stop and start again with the model's saved options; a stopped or failed instance just starts.

    Raises BrokerAway, Conflict (another takes over from it, most hosts away) before anything is written.
    """
    with audited(actor, "instance.restart", str(instance)):
        require_thaw()
        broker.require()
        with transaction.atomic():
            row = instance_locked(instance.pk)
            if Instance.objects.live().filter(replaces=row).exists():
                raise Conflict(f"Another instance is taking over from {row}: wait for it, or cancel that.")
            Model.objects.filter(pk=row.model_id).update(deployed=True)
            state = S(row.state)
            if not row.is_live:
                requeue(row, reason="Started again.", actor=actor)
            elif state in HAS_PROCESS:
                transitions.report(row.pk, desired_state=DesiredState.RUNNING, restart_count=0)
                instance_stop_begin(row, reason="Restart: it stops first.", actor=actor, force=force)
            # pending and scheduled are about to start with the saved options anyway
        instance.refresh_from_db()
    return instance
