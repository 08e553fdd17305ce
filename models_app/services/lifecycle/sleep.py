"""Sleep and wake: drain first, then the engine sleeps; before waking, room is checked; a failed wake stays asleep."""

from __future__ import annotations

import logging

from django.conf import settings
from django.db import transaction

from gpus_app.models import Host
from gpus_app.policies.base import gib
from gpus_app.policies.placement import available_bytes
from models_app import broker, dispatch, transitions
from models_app.errors import Conflict, DoesNotFit, InvalidInput
from models_app.models import Instance, InstanceQuerySet
from models_app.services.access import EngineSaidNo, client, here, host_of, start_waiting
from models_app.services.audit import audited
from models_app.services.lifecycle.known_answer import answer_keep
from models_app.services.lifecycle.ready import awake_record
from models_app.services.memory.limit_apply import limit_tell
from models_app.services.memory.placement import gpu_states
from models_app.services.memory.shares import wake_share_write
from models_app.services.memory.sleep_ram import ram_refusal
from models_app.states import DesiredState, InstanceState, Stage

log = logging.getLogger(__name__)
S = InstanceState


def _locked(instance: Instance) -> Instance:
    rows: InstanceQuerySet = Instance.objects.select_for_update(of=("self",))
    return rows.select_related("model", "host").get(pk=instance.pk)


def instance_sleep(instance: Instance, *, actor: str, level: int | None = None, force: bool = False) -> Instance:
    """Put a ready instance to sleep (level 1: weights to host memory; 2: weights dropped). Idempotent.

    Requests in flight finish first; when they do not within the drain limit, it stays ready, unless ``force``.
    Raises Conflict (no sleep mode, pinned, not ready), DoesNotFit (no host memory for its weights, with numbers),
    BrokerAway before anything is written.
    """
    if level is not None and level not in (1, 2):
        raise InvalidInput({"level": "Use level 1 (weights to host memory) or 2 (weights dropped)."})
    with audited(actor, "instance.sleep", str(instance)):
        broker.require()
        with transaction.atomic():
            row = _locked(instance)
            if row.desired_state == DesiredState.SLEEPING and row.state in (S.SLEEPING, S.DRAINING):
                return row
            if not row.model.enable_sleep_mode:
                raise Conflict(f"{row.model} was not launched with sleep mode; switch it on and restart it.")
            if row.model.pinned:
                raise Conflict(f"{row.model} is pinned: it never sleeps. Unpin it first.")
            if row.state != S.READY:
                raise Conflict(f"It is {row.state}: only a ready instance can be put to sleep.")
            level = level or row.model.sleep_level
            Host.objects.select_for_update(no_key=True).get(pk=host_of(row).pk)  # two at once do not share the memory
            if short := ram_refusal(row, level):
                raise DoesNotFit(short)
            transitions.move(
                row.pk,
                S.DRAINING,
                expected=S.READY,
                reason="Going to sleep: requests in flight finish first.",
                actor=actor,
                desired_state=DesiredState.SLEEPING,
                sleep_level=level,
                stop_force=force,
            )
            dispatch.send_on_commit(dispatch.STOP, row.pk, queue=host_of(row).queue)
        instance.refresh_from_db()
    return instance


def sleep_again(instance_id: int) -> bool:
    """ready → draining for one that is wanted asleep: it came up anew after its process or its host was lost.

    Whoever refuses from here on (requests in flight, the engine) makes *running* what is wanted, so this is no loop.
    """
    with transaction.atomic():
        row = _locked(Instance(pk=instance_id))
        if row.state != S.READY or row.desired_state != DesiredState.SLEEPING:
            return False
        level = row.sleep_level or row.model.sleep_level
        why = "" if row.model.enable_sleep_mode else "Its model has no sleep mode any more."
        why = "It is pinned." if row.model.pinned else why or ram_refusal(row, level)
        if why:
            reason = f"It stays awake. {why}"
            transitions.report(row.pk, expected=S.READY, desired_state=DesiredState.RUNNING, reason=reason)
            return False
        moved = transitions.move(
            row.pk,
            S.DRAINING,
            expected=S.READY,
            reason="It was asleep before it had to start anew: it goes back to sleep.",
            sleep_level=level,
            stop_force=False,
        )
        dispatch.send_on_commit(dispatch.STOP, row.pk, queue=host_of(row).queue)
    return moved


def instance_wake(instance: Instance, *, actor: str) -> Instance:
    """Wake a sleeping instance. Idempotent. Raises DoesNotFit with numbers, Conflict, BrokerAway."""
    with audited(actor, "instance.wake", str(instance)):
        broker.require()
        with transaction.atomic():
            row = _locked(instance)
            if row.state in (S.READY, S.STARTING):
                return row
            if row.state != S.SLEEPING:
                raise Conflict(f"It is {row.state}: only a sleeping instance can be woken.")
            short = room_to_wake(row)
            if short:
                raise DoesNotFit(short)
            transitions.report(row.pk, desired_state=DesiredState.RUNNING, reason=f"Wake asked by {actor}.")
            dispatch.send_on_commit(dispatch.WAKE, row.pk, queue=host_of(row).queue)
        instance.refresh_from_db()
    return instance


def room_to_wake(row: Instance) -> str:
    """Empty when the card has the bytes that the weights need; else a sentence with the numbers.

    What the sleeper still holds is in the reading already, so only the rest of its reservation has to be free.
    """
    for state in gpu_states(row.model, without=row.pk):
        if state.uuid not in row.gpu_uuids or state.free_measured_bytes is None:
            continue
        missing = row.reserved_bytes - asleep_bytes(row)
        have = available_bytes(state)
        if have < missing:
            return (
                f"GPU {state.index} of {state.host} has {gib(max(have, 0))} to give, waking needs {gib(missing)}. "
                "Make room first; it stays asleep."
            )
    return ""


def asleep_bytes(row: Instance) -> int:
    """What it still holds on each GPU while asleep, as measured when it fell asleep; 0 when that is not known."""
    if row.attempt is None:
        return 0
    return int(row.attempt.memory.get("asleep_bytes") or 0)


# --- on the host worker ------------------------------------------------------------------------------


def sleep_apply(instance_id: int) -> None:
    """A drained instance goes to sleep: draining → sleeping, on the engine's word. Host worker.

    An engine that refuses, or does not answer, stays awake: back to ready with the reason.
    """
    row = here(instance_id)
    if row is None or row.state != S.DRAINING or row.desired_state != DesiredState.SLEEPING:
        return
    level = row.sleep_level or 1
    if not row.stop_force:  # else requests run still, and nothing is waited for
        answer_keep(row)
    awake_record(row)
    try:
        client(row).sleep(level, mode="abort" if row.stop_force else None)
    except EngineSaidNo as exc:
        transitions.move(
            row.pk,
            S.READY,
            expected=S.DRAINING,
            reason=f"Not put to sleep: {exc.message}",
            desired_state=DesiredState.RUNNING,
            sleep_level=None,
            stop_force=False,
        )
        return
    with transaction.atomic():
        transitions.move(
            row.pk,
            S.SLEEPING,
            expected=S.DRAINING,
            reason=f"Asleep, level {level}: {'weights in host memory' if level == 1 else 'weights dropped'}.",
            stop_force=False,
        )
        start_waiting(host_of(row).name)


def wake_apply(instance_id: int) -> None:
    """Check the room, divide it anew, claim (sleeping → starting), wake; readiness is then probed. Host worker."""
    row = here(instance_id)
    if row is None or row.state != S.SLEEPING or row.desired_state != DesiredState.RUNNING:
        return
    short = room_to_wake(row)
    if short:
        transitions.report(row.pk, expected=S.SLEEPING, reason=short, desired_state=DesiredState.SLEEPING)
        return
    if wake_share_write(row) or row.limit_acked_revision < row.limit_revision:
        limit_tell(here(row.pk) or row)
    older = row.spec_revision < row.model.spec_revision
    options = f" With the options of revision {row.spec_revision}; saved is {row.model.spec_revision}." if older else ""
    if not transitions.move(
        row.pk, S.STARTING, expected=S.SLEEPING, reason=f"Waking.{options}", stage=Stage.WAKING, stage_progress=None
    ):
        return
    # The neighbours' limits come down while it wakes, so that they cannot grow into its bytes.
    dispatch.send(dispatch.REBALANCE, queue=dispatch.CONTROL_QUEUE)
    try:
        client(row, limit_s=settings.WAKE_CALL_LIMIT_S).wake()
    except EngineSaidNo as exc:
        wake_failed(row, exc.message)
        return
    dispatch.send(dispatch.PROBE, row.pk, queue=host_of(row).queue)


def wake_failed(row: Instance, why: str) -> None:
    """A failed wake stays asleep with its reason; an engine that died of it is found by the next look."""
    transitions.move(
        row.pk,
        S.SLEEPING,
        expected=S.STARTING,
        reason=f"Still asleep: waking failed. {why}",
        desired_state=DesiredState.SLEEPING,
    )
    dispatch.send(dispatch.PROBE, row.pk, queue=host_of(row).queue)
