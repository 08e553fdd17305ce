"""Rules about memory that are entered by people: refused, with the numbers, when no card could keep them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpus_app.errors import ImpossiblePolicy
from gpus_app.models import Gpu, GpuPolicy
from gpus_app.policies.base import gib, kept_bytes, kv_headroom_bytes
from gpus_app.policies.claims import Claim, check_card, check_claim
from gpus_app.services import gpu_policy_set
from models_app.errors import InvalidInput
from models_app.models import Model
from models_app.services.memory import placement
from models_app.services.memory.cards import Card, cards, policy_of


def claims_on(card: Card, *, changed: Claim | None = None, model: Model | None = None) -> list[Claim]:
    """What every instance on the card is owed; ``changed`` stands for the instances of ``model``."""
    claims = []
    for row in card.rows:
        instance = card.instances[row.id]
        ours = changed is not None and model is not None and instance.model_id == model.pk
        rules = changed if ours and changed is not None else row
        # A sleeper has given back most of its baseline and comes back to all of it: its reservation tells.
        booked = max(instance.reserved_bytes - max(row.floor_bytes, row.guarantee_bytes), 0)
        claims.append(
            Claim(
                name=row.name,
                baseline_bytes=max(booked, row.baseline_bytes) if row.asleep else row.baseline_bytes or booked,
                guarantee_bytes=rules.guarantee_bytes,
                floor_bytes=row.floor_bytes,
                maximum_bytes=rules.maximum_bytes,
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
            gpu,
            actor=actor,
            reserve_bytes=reserve_bytes,
            rebalance=rebalance,
            claims=claims_on(card),
            headroom_bytes=card.view.kv_headroom_bytes,
        )
    except ImpossiblePolicy as exc:
        field = "rebalance" if reserve_bytes is None else "reserve_bytes"
        raise InvalidInput({field: str(exc)}) from exc


def memory_policy_check(model: Model, *, guarantee_bytes: int, maximum_bytes: int | None) -> dict[str, list[str]]:
    """What is wrong with a model's guarantee and maximum, by field; empty when nothing is.

    By themselves (floor, guarantee and maximum in their order), on the cards where the model runs, and, before it runs
    anywhere, on an empty card.
    """
    facts: dict[str, Any] = model.facts or {}
    floor = int(facts.get("safety_floor_bytes") or 0)
    wanted = Claim(
        name=str(model),
        baseline_bytes=0,
        guarantee_bytes=guarantee_bytes,
        floor_bytes=floor,
        maximum_bytes=maximum_bytes,
    )
    wrong: dict[str, list[str]] = {}
    for name, claim in {
        "guarantee_bytes": replace(wanted, maximum_bytes=None),
        "maximum_bytes": replace(wanted, guarantee_bytes=guarantee_bytes if guarantee_bytes >= floor else 0),
    }.items():
        try:
            check_claim(claim)
        except ImpossiblePolicy as exc:
            wrong[name] = [str(exc)]
    if guarantee_bytes and not wrong:
        sentence = _on_cards(model, wanted) or _on_an_empty_card(model, guarantee_bytes)
        if sentence:
            wrong["guarantee_bytes"] = [sentence]
    return wrong


def _on_cards(model: Model, wanted: Claim) -> str:
    """Why the guarantee cannot be kept where the model runs; empty when it can."""
    if not model.pk or not model.instances.live().exists():
        return ""
    for card in cards().values():
        if not any(row.model_id == model.pk for row in card.instances.values()):
            continue
        try:
            claims = claims_on(card, changed=wanted, model=model)
            check_card(
                card.gpu.total_bytes,
                reserve_bytes=card.policy.reserve_bytes,
                headroom_bytes=card.view.kv_headroom_bytes,
                claims=claims,
            )
        except ImpossiblePolicy as exc:
            return f"On GPU {card.gpu.index} of {card.gpu.host.name}: {exc}"
    return ""


def _on_an_empty_card(model: Model, guarantee_bytes: int) -> str:
    """Why no card could keep the guarantee beside the model's own weights, even without a neighbour."""
    if not model.kvcached:
        return ""
    gpus = Gpu.objects.select_related("policy")
    chosen = gpus.filter(uuid__in=model.gpu_uuids) if model.gpu_uuids else gpus
    chosen = chosen.filter(host=model.host) if model.host else chosen
    best: tuple[int, int, int] | None = None
    for gpu in chosen:
        baseline = placement.need_on(model, gpu_name=gpu.name, gpu_total_bytes=gpu.total_bytes).baseline_bytes
        headroom = kv_headroom_bytes(gpu.total_bytes, elastic=model.kvcached)
        left = gpu.total_bytes - kept_bytes(policy_of(gpu).reserve_bytes, headroom) - baseline
        if left >= guarantee_bytes:
            return ""
        best = max(best or (left, 0, 0), (left, baseline, gpu.total_bytes))
    if best is None:
        return ""
    left, baseline, total = best
    return (
        f"A guarantee of {gib(guarantee_bytes)} does not fit beside {gib(baseline)} of weights and workspaces: "
        f"of {gib(total)}, the most that a GPU here has, {gib(max(left, 0))} are left for KV memory."
    )
