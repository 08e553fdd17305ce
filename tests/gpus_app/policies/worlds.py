"""Random cards and instances for the laws of the policies, and plain builders for the examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from gpus_app.policies.base import GIB, MIB, GpuView, InstanceView, Plan, StepKind

NOW = 1_800_000_000.0
#: Bundles of Qwen3-0.6B, Llama-3.2-1B, Qwen2.5-0.5B, Qwen3-8B (2 MiB x layers x 2).
BUNDLES = [112 * MIB, 64 * MIB, 96 * MIB, 144 * MIB]


def gpu(**values: Any) -> GpuView:
    return GpuView(**({"uuid": "GPU-0", "total_bytes": 80 * GIB} | values))


def instance(id: int = 1, **values: Any) -> InstanceView:
    """A ready instance with a bundle of 64 MiB, 4 GiB of weights, a capacity of 60 GiB and a floor of 1 GiB."""
    defaults: dict[str, Any] = {
        "name": f"m{id}",
        "baseline_bytes": 4 * GIB,
        "used_bytes": 64 * MIB,
        "prealloc_bytes": 5 * 64 * MIB,
        "limit_bytes": 20 * GIB,
        "capacity_bytes": 60 * GIB,
        "bundle_bytes": 64 * MIB,
        "floor_bytes": GIB,
        "ready_since": NOW - 3600,
    }
    return InstanceView(id=id, **(defaults | values))


@st.composite
def instances(draw: st.DrawFn, id: int) -> InstanceView:
    bundle = draw(st.sampled_from(BUNDLES))
    # Real capacities are no whole number of bundles.
    capacity = draw(st.integers(4, 600)) * bundle + draw(st.integers(0, bundle - 1))
    limit = draw(st.integers(1, capacity))
    used = draw(st.integers(1, max(1, capacity // bundle))) * bundle
    evictable = draw(st.integers(0, used // bundle - 1)) * bundle
    running = draw(st.sampled_from([0, 0, 1, 7, 64]))
    waiting = draw(st.sampled_from([0, 0, 0, 3, 200]))
    kind = draw(st.sampled_from(["ready"] * 5 + ["sleeper", "starting", "static"]))
    elastic = kind == "ready"
    if kind == "starting":  # nothing is mapped yet: what counts is what it was promised
        used, evictable, running, waiting = 0, 0, 0, 0
    return InstanceView(
        id=id,
        name=f"m{id}",
        adjustable=elastic,
        asleep=kind == "sleeper",
        baseline_bytes=draw(st.integers(0, 20 * GIB)),
        used_bytes=used,
        prealloc_bytes=0 if kind == "starting" else draw(st.integers(0, 10)) * bundle,
        evictable_bytes=evictable,
        limit_bytes=limit,
        capacity_bytes=capacity,
        bundle_bytes=bundle,
        floor_bytes=draw(st.integers(0, 12)) * bundle,
        full_context_bytes=draw(st.sampled_from([0, 40])) * bundle,
        reserved_bytes=draw(st.integers(0 if elastic else GIB, 30 * GIB)),
        running=running,
        waiting=waiting,
        guarantee_bytes=draw(st.sampled_from([0, 0, 512 * MIB, 3 * GIB + 1, 200 * GIB])),
        maximum_bytes=draw(st.sampled_from([None, None, 0, 2 * GIB, 10 * GIB + 7])),
        priority=draw(st.sampled_from([0, 10, 50, 50, 90])),
        idle_shrink_after_s=draw(st.sampled_from([None, None, 60.0])),
        reclaim=draw(st.sampled_from(["wait", "preempt"])),
        pinned=draw(st.booleans()),
        sleepable=elastic and draw(st.booleans()),
        asleep_bytes=draw(st.sampled_from([None, GIB])) if kind in ("ready", "sleeper") else None,
        tensor_parallel_size=draw(st.sampled_from([1, 1, 2])),
        idle_since=draw(st.sampled_from([None, NOW - 10, NOW - 500])) if running + waiting == 0 else None,
        ready_since=None if kind == "starting" else draw(st.sampled_from([NOW - 5, NOW - 5000, NOW - 5000])),
        limit_set_at=draw(st.sampled_from([None, NOW - 3, NOW - 300])),
    )


@st.composite
def worlds(draw: st.DrawFn, most: int = 6) -> tuple[GpuView, list[InstanceView]]:
    count = draw(st.integers(0, most))
    rows = [draw(instances(id)) for id in range(1, count + 1)]
    total = draw(st.sampled_from([24, 80, 141, 400])) * GIB
    foreign = draw(st.sampled_from([0, 0, GIB, 12 * GIB + 5]))
    card = gpu(
        total_bytes=total,
        reserve_bytes=draw(st.sampled_from([0, 0, 8 * GIB, 8 * GIB + 3])),
        foreign_bytes=foreign,
        kv_headroom_bytes=draw(st.sampled_from([0, total // 20])),
        free_bytes=draw(
            st.sampled_from([None, max(0, total - foreign - sum(row.resident_bytes for row in rows)), 3 * GIB])
        ),
    )
    return card, draw(st.permutations(rows))


@st.composite
def clusters(draw: st.DrawFn) -> list[tuple[GpuView, list[InstanceView]]]:
    """Two or three cards with neighbours of their own and one or two instances that lie on several of them.

    A tensor-parallel instance has one limit and one set of rules; what else is on its cards differs.
    """
    count = draw(st.integers(2, 3))
    cards = []
    for index in range(count):
        card, rows = draw(worlds(3))
        own = [replace(row, id=row.id + 100 * (index + 1), tensor_parallel_size=1) for row in rows]
        cards.append((replace(card, uuid=f"GPU-{index}"), own))
    for id_ in range(1, draw(st.integers(1, 2)) + 1):
        shared = draw(instances(id_))
        on = draw(st.sets(st.integers(0, count - 1), min_size=2, max_size=count))
        for index in on:
            cards[index][1].append(replace(shared, tensor_parallel_size=len(on)))
    return cards


def apply(plan: Plan, rows: Sequence[InstanceView]) -> list[InstanceView]:
    """The instances once the plan's limits are in force and what lies above them was given back."""
    after = {row.id: row for row in rows}
    for step in plan.steps:
        row = after[step.instance_id]
        if step.kind in (StepKind.LOWER, StepKind.RAISE):
            after[row.id] = replace(row, limit_bytes=step.to_bytes)
    return [after[row.id] for row in rows]


def claims(card: GpuView, rows: Sequence[InstanceView]) -> int:
    """Everything that is promised on the card: limits + baselines + what others hold + foreign + kept."""
    held = sum(row.baseline_bytes + row.limit_bytes if row.elastic else row.held_bytes for row in rows)
    return held + card.foreign_bytes + card.kept_bytes
