"""Rules about memory that are entered by people: refused, with the numbers, when no card could keep them."""

from __future__ import annotations

from typing import Any

from gpus_app.errors import ImpossiblePolicy
from gpus_app.models import Gpu, GpuPolicy
from gpus_app.policies.claims import Claim, check_card, check_claim
from gpus_app.services import gpu_policy_set
from models_app.errors import InvalidInput
from models_app.models import Model
from models_app.services.cards import Card, cards


def claims_on(card: Card, *, changed: Claim | None = None, model: Model | None = None) -> list[Claim]:
    """What every instance on the card is owed; ``changed`` stands for the instances of ``model``."""
    claims = []
    for row in card.rows:
        instance = card.instances[row.id]
        baseline = row.baseline_bytes or max(row.reserved_bytes - row.floor_bytes, 0)
        if changed is not None and model is not None and instance.model_id == model.pk:
            claims.append(
                Claim(
                    name=row.name,
                    baseline_bytes=baseline,
                    guarantee_bytes=changed.guarantee_bytes,
                    floor_bytes=row.floor_bytes,
                    maximum_bytes=changed.maximum_bytes,
                )
            )
            continue
        claims.append(
            Claim(
                name=row.name,
                baseline_bytes=baseline,
                guarantee_bytes=row.guarantee_bytes,
                floor_bytes=row.floor_bytes,
                maximum_bytes=row.maximum_bytes,
            )
        )
    return claims


def gpu_policy_change(
    gpu: Gpu, *, actor: str, reserve_bytes: int | None = None, rebalance: str | None = None
) -> GpuPolicy:
    """Set reserve and mode of one GPU. Raises InvalidInput when the card cannot keep it."""
    card = cards([gpu.uuid])[gpu.uuid]
    try:
        return gpu_policy_set(
            gpu, actor=actor, reserve_bytes=reserve_bytes, rebalance=rebalance, claims=claims_on(card)
        )
    except ImpossiblePolicy as exc:
        field = "rebalance" if reserve_bytes is None else "reserve_bytes"
        raise InvalidInput({field: str(exc)}) from exc


def memory_policy_check(model: Model, *, guarantee_bytes: int, maximum_bytes: int | None) -> dict[str, list[str]]:
    """What is wrong with a model's guarantee and maximum on the cards where it runs; empty when nothing is."""
    facts: dict[str, Any] = model.facts or {}
    wanted = Claim(
        name=str(model),
        baseline_bytes=0,
        guarantee_bytes=guarantee_bytes,
        floor_bytes=int(facts.get("safety_floor_bytes") or 0),
        maximum_bytes=maximum_bytes,
    )
    try:
        check_claim(wanted)
        if model.pk:
            for card in cards().values():
                if any(row.model_id == model.pk for row in card.instances.values()):
                    claims = claims_on(card, changed=wanted, model=model)
                    check_card(card.gpu.total_bytes, reserve_bytes=card.policy.reserve_bytes, claims=claims)
    except ImpossiblePolicy as exc:
        return {"guarantee_bytes" if guarantee_bytes else "maximum_bytes": [str(exc)]}
    return {}
