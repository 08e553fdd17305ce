"""Steps of plans as pages, scripts and the operations table have them: one step an instance, whatever its GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gpus_app.models import Gpu
from gpus_app.policies.base import Plan, Step, StepKind
from models_app.models import Instance
from models_app.services.memory.cards import Card


def plan_steps(plans: Sequence[Plan], cards: Iterable[Card]) -> list[dict[str, Any]]:
    """The steps of the plans of several cards, in order, each of them once (see ``steps_once``).

    Bytes are per GPU; ``total_bytes`` is what the step frees on all GPUs of its instance together, ``where`` names them
    when there are several.
    """
    instances = {id_: row for card in cards for id_, row in card.instances.items()}
    taken = [instances[step.instance_id] for plan in plans for step in plan.steps]
    places = _places(taken)
    return steps_once(
        [_step_json(step, instances[step.instance_id], plan.gpu_uuid, places) for plan in plans for step in plan.steps]
    )


def _places(instances: Iterable[Instance]) -> dict[str, int]:
    """The index of each GPU of instances over several; nothing is asked where there are none."""
    uuids = {uuid for row in instances if len(row.gpu_uuids) > 1 for uuid in row.gpu_uuids}
    return dict(Gpu.objects.filter(uuid__in=uuids).values_list("uuid", "index")) if uuids else {}


def _step_json(step: Step, row: Instance, planned_on: str, places: dict[str, int]) -> dict[str, Any]:
    uuids = list(row.gpu_uuids) or [planned_on]
    indices = ", ".join(
        str(places[uuid]) for uuid in sorted(uuids, key=lambda one: places.get(one, 0)) if uuid in places
    )
    return {
        "kind": str(step.kind),
        "gpu_uuids": uuids,
        "where": f"on each of GPUs {indices}" if len(uuids) > 1 else "",
        "instance_id": step.instance_id,
        "name": str(row.model),
        "from_bytes": step.from_bytes,
        "to_bytes": step.to_bytes,
        "expected_bytes": step.expected_bytes,
        "total_bytes": step.expected_bytes * len(uuids),
        "reason": step.reason,
        "harm": step.harm.name.lower(),
        "reclaim": step.reclaim,
    }


def steps_once(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Plans of several cards as one: an instance over several GPUs has one limit, and ends once.

    The lowest of its limits counts, with the bytes that this one brings; who is stopped needs no other step, nor who is
    put to sleep a limit.
    """
    kinds: dict[Any, set[str]] = {}
    lowest: dict[Any, dict[str, Any]] = {}
    for step in steps:
        pk = step.get("instance_id")
        kinds.setdefault(pk, set()).add(step["kind"])
        if step["kind"] == StepKind.LOWER and step["to_bytes"] <= lowest.get(pk, step)["to_bytes"]:
            lowest[pk] = step
    kept: list[dict[str, Any]] = []
    seen: set[tuple[str, Any]] = set()
    for step in steps:
        pk, kind = step.get("instance_id"), step["kind"]
        ends = {StepKind.STOP, StepKind.SLEEP} & kinds[pk]
        end = StepKind.STOP if StepKind.STOP in ends else StepKind.SLEEP
        if (kind, pk) in seen or (ends and kind != end):
            continue
        seen.add((kind, pk))
        kept.append(lowest[pk] if kind == StepKind.LOWER else step)
    return kept
