"""The controller's hand on the limits: every few seconds, what the rules ask for, in small verified steps.

The plan is made anew from readings each time, so a crash in the middle leaves nothing to repair: the next look starts
from what is. Raises wait until every lowered limit is in force, since the plan hands out only what nobody holds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from django.utils import timezone

from gpus_app.events import publish_gpus_on_commit
from gpus_app.models import GpuPolicy
from gpus_app.policies.base import InstanceView, Plan, StepKind, gib
from gpus_app.policies.rebalance import awake_limits, rebalance_cards
from models_app import broker, transitions
from models_app.errors import BrokerAway, SardeenzError
from models_app.events import publish_instance_on_commit
from models_app.services.memory.cards import Card, cards
from models_app.services.memory.kvcache import limit_write
from models_app.services.plans.plan_steps import plan_steps
from models_app.services.plans.room import cards_in_use

log = logging.getLogger(__name__)

ACTOR = "controller"
#: A limit that the engine has not taken within this time is asked for again.
_ASK_AGAIN_S = 15.0


def rebalance_all(*, now: float | None = None) -> list[Plan]:
    """One look at every card; the plans, in effect where the policy says *on*."""
    now = time.time() if now is None else now
    if not broker.once_in("rebalance", 1.0):
        return []
    found = cards(now=now)
    reserved = cards_in_use()
    plans = []
    for group in _groups(found.values()):
        mode = _mode(group, reserved)
        if mode == GpuPolicy.Rebalance.OFF:
            _remember(group, None, mode)
            _promise(group, {})
            continue
        views = [(card.view, card.for_rebalance()) for card in group]
        plan = rebalance_cards(views, now)
        plans.append(plan)
        if mode == GpuPolicy.Rebalance.ON:
            _carry_out(group, plan)
        _promise(group, awake_limits(views, now) if mode == GpuPolicy.Rebalance.ON else {})
        _remember(group, plan, mode)
    return plans


def _groups(found: Iterable[Card]) -> list[list[Card]]:
    """Cards that share a tensor-parallel instance are divided together."""
    groups: list[list[Card]] = []
    for card in found:
        ids = set(card.instances)
        touching = [group for group in groups if any(ids & set(other.instances) for other in group)]
        groups = [group for group in groups if group not in touching]
        groups.append([card, *(other for group in touching for other in group)])
    return groups


def _mode(group: list[Card], reserved: frozenset[str]) -> str:
    """The most careful mode of the group; off while a reading is missing or room is being made here."""
    held = any(card.policy.held_until and card.policy.held_until > timezone.now() for card in group)
    blind = any(not card.fresh for card in group)
    if blind or any(card.gpu.uuid in reserved for card in group):
        return str(GpuPolicy.Rebalance.OFF)
    modes = {card.policy.rebalance for card in group}
    if GpuPolicy.Rebalance.OFF in modes:
        return str(GpuPolicy.Rebalance.OFF)
    return str(GpuPolicy.Rebalance.DRY_RUN if held or GpuPolicy.Rebalance.DRY_RUN in modes else GpuPolicy.Rebalance.ON)


def _carry_out(group: list[Card], plan: Plan) -> None:
    lowers = [step for step in plan.steps if step.kind is StepKind.LOWER]
    untold = any(_untold(card, row) for card in group for row in card.rows)
    for step in plan.steps:
        if step.kind is StepKind.RAISE and (lowers or untold):
            continue  # the next look raises what these have really given back
        instance = next(card.instances[step.instance_id] for card in group if step.instance_id in card.instances)
        if not instance.limit_automatic:
            continue  # an operator's limit is told by its own message; rounding it to bundles would be a change of it
        asked = instance.limit_set_at and (timezone.now() - instance.limit_set_at).total_seconds() < _ASK_AGAIN_S
        if instance.limit_bytes == step.to_bytes and asked:
            continue
        try:
            limit_write(
                instance,
                step.to_bytes,
                actor=ACTOR,
                reclaim=step.reclaim,
                reason=step.reason,
                automatic=None,
                expected_revision=instance.limit_revision,
            )
        except BrokerAway:
            raise
        except SardeenzError as exc:
            log.info("%s keeps its limit: %s", instance, exc.message)


def _untold(card: Card, row: InstanceView) -> bool:
    """Whether it was asked for a limit that it has not answered. What is over a limit in force, the plan counts."""
    instance = card.instances[row.id]
    return row.elastic and instance.limit_acked_revision < instance.limit_revision


def _promise(group: list[Card], limits: Mapping[int, int]) -> None:
    """Tell the routers how far the limit of a resting instance goes as soon as a request needs it."""
    for instance in {pk: one for card in group for pk, one in card.instances.items()}.values():
        promised = limits.get(instance.pk) if instance.limit_automatic else None
        if promised != instance.awake_limit_bytes:
            transitions.report(instance.pk, awake_limit_bytes=promised)
            publish_instance_on_commit(instance.pk, routes=True)


def plan_json(plan: Plan, group: Iterable[Card]) -> dict[str, Any]:
    """A plan for pages and scripts; bytes."""
    return {
        "feasible": plan.feasible,
        "sentence": plan.sentence,
        "room_bytes": plan.room_bytes,
        "targets": {str(id_): limit for id_, limit in plan.targets.items()},
        "steps": plan_steps([plan], group),
    }


def _remember(group: list[Card], plan: Plan | None, mode: str) -> None:
    """Keep the newest plan beside the policy, for the pages; written only when it says something new."""
    for card in group:
        saved = {} if plan is None else plan_json(plan, group) | {"mode": mode}
        if card.policy._state.adding and not saved.get("steps"):
            continue
        if _essence(card.policy.plan) == _essence(saved):
            continue
        GpuPolicy.objects.update_or_create(gpu=card.gpu, defaults={"plan": saved, "planned_at": timezone.now()})
        publish_gpus_on_commit(card.gpu.host.name)


def _essence(plan: dict[str, Any]) -> Any:
    """What makes a plan worth showing anew: bytes wander every second, kinds and targets do not."""
    steps = [(step["kind"], step["instance_id"], step["to_bytes"]) for step in plan.get("steps", ())]
    return plan.get("mode"), plan.get("feasible"), steps


def hand_back(instance: Any, *, actor: str) -> None:
    """Give a limit that was set by hand back to the controller."""
    if transitions.report(instance.pk, limit_automatic=True):
        transitions.note(
            instance.pk,
            "limit",
            f"The limit is automatic again (it was {gib(instance.limit_bytes or 0)}, set by {instance.limit_set_by}).",
            actor=actor,
        )
