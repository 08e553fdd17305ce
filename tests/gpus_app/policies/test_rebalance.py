"""Laws and examples of ``rebalance``."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from gpus_app.policies.base import GIB, GpuView, InstanceView, StepKind, round_up
from gpus_app.policies.rebalance import rebalance
from tests.gpus_app.policies.worlds import BUNDLES, NOW, apply, claims, gpu, instance, worlds

World = tuple[GpuView, list[InstanceView]]


# -- laws --------------------------------------------------------------------------------------------------------------


@given(worlds())
def test_limits_baselines_foreign_and_reserve_fit_on_the_card(world: World) -> None:
    card, rows = world
    plan = rebalance(card, rows, NOW)
    if plan.feasible:
        assert claims(card, apply(plan, rows)) <= card.total_bytes


@given(worlds())
def test_no_limit_goes_below_guarantee_or_floor(world: World) -> None:
    card, rows = world
    by_id = {row.id: row for row in rows}
    for step in rebalance(card, rows, NOW).steps:
        row = by_id[step.instance_id]
        if step.kind is StepKind.LOWER:
            assert step.to_bytes >= min(max(row.guarantee_bytes, row.floor_bytes), row.capacity_bytes)


@given(worlds())
def test_no_limit_goes_above_capacity_or_maximum(world: World) -> None:
    card, rows = world
    by_id = {row.id: row for row in rows}
    for step in rebalance(card, rows, NOW).steps:
        row = by_id[step.instance_id]
        assert step.to_bytes <= row.capacity_bytes
        if row.maximum_bytes is not None and step.kind is StepKind.RAISE:
            assert step.to_bytes <= max(row.maximum_bytes, row.lowest_bytes)


@given(worlds())
def test_limits_move_in_whole_bundles(world: World) -> None:
    card, rows = world
    by_id = {row.id: row for row in rows}
    for step in rebalance(card, rows, NOW).steps:
        row = by_id[step.instance_id]
        assert step.to_bytes % row.bundle_bytes == 0 or step.to_bytes == row.lowest_bytes == row.capacity_bytes


@given(worlds())
def test_every_lower_comes_before_every_raise(world: World) -> None:
    kinds = [step.kind for step in rebalance(*world, NOW).steps]
    assert kinds == sorted(kinds, key=lambda kind: kind is StepKind.RAISE)
    assert set(kinds) <= {StepKind.LOWER, StepKind.RAISE}


@given(worlds())
def test_a_raise_never_gets_what_someone_still_holds(world: World) -> None:
    card, rows = world
    plan = rebalance(card, rows, NOW)
    raised = {step.instance_id for step in plan.steps if step.kind is StepKind.RAISE}
    lowered = {step.instance_id for step in plan.steps if step.kind is StepKind.LOWER}
    if not raised:
        return

    def held(all_rows: list[InstanceView]) -> int:
        # A lower counts once it is in force; any other footprint above its limit is still mapped.
        total = card.foreign_bytes + card.kept_bytes
        for row in all_rows:
            mapped = 0 if row.id in lowered else row.footprint_bytes
            total += row.baseline_bytes + max(row.limit_bytes, mapped) if row.elastic else row.held_bytes
        return total

    lowers_only = replace(plan, steps=tuple(step for step in plan.steps if step.kind is StepKind.LOWER))
    assert held(apply(plan, rows)) <= max(card.total_bytes, held(apply(lowers_only, rows)))


@given(worlds(), st.randoms(use_true_random=False))
def test_the_order_of_the_input_changes_nothing(world: World, random) -> None:
    card, rows = world
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert rebalance(card, rows, NOW) == rebalance(card, shuffled, NOW)


@given(worlds())
def test_only_elastic_instances_are_touched(world: World) -> None:
    card, rows = world
    elastic = {row.id for row in rows if row.elastic}
    assert {step.instance_id for step in rebalance(card, rows, NOW).steps} <= elastic


@given(worlds())
def test_the_same_readings_settle_in_one_round_and_stay(world: World) -> None:
    card, rows = world
    # Nobody is over his limit for long: what a plan lowers is given back before the next look. And the longest request
    # is known: without that, an instance that cannot begin asks for twice its limit, round after round.
    rows = [
        replace(
            row,
            prealloc_bytes=0,
            used_bytes=min(row.used_bytes, row.lowest_bytes),
            full_context_bytes=row.full_context_bytes or 20 * row.bundle_bytes,
        )
        for row in rows
    ]
    first = rebalance(card, rows, NOW)
    rows = apply(first, rows)
    second = rebalance(card, rows, NOW + 60)
    rows = apply(second, rows)
    third = rebalance(card, rows, NOW + 120)
    assert not third.steps, (first.sentence, second.sentence, third.sentence)


@given(worlds())
def test_readings_that_never_change_settle_within_a_dozen_rounds_and_stay(world: World) -> None:
    card, rows = world
    rows = [replace(row, prealloc_bytes=0, used_bytes=min(row.used_bytes, row.lowest_bytes)) for row in rows]
    sentences = []
    for tick in range(24):
        plan = rebalance(card, rows, NOW + 60 * tick)
        rows = apply(plan, rows)
        sentences.append(plan.sentence if plan.steps else "")
    assert not any(sentences[12:]), sentences


@given(worlds())
def test_a_card_too_small_for_what_is_owed_only_loses(world: World) -> None:
    card, rows = world
    plan = rebalance(card, rows, NOW)
    if not plan.feasible:
        assert "too little" in plan.sentence
        assert all(step.kind is StepKind.LOWER for step in plan.steps)


@st.composite
def loads(draw: st.DrawFn) -> tuple[GpuView, list[InstanceView], dict[int, tuple[int, int]]]:
    """Instances under a load that never changes: bytes wanted, bytes of one request."""
    rows, wants = [], {}
    for id in range(1, draw(st.integers(1, 5)) + 1):
        bundle = draw(st.sampled_from(BUNDLES))
        capacity = draw(st.integers(100, 1200)) * bundle
        rows.append(
            instance(
                id,
                bundle_bytes=bundle,
                capacity_bytes=capacity,
                limit_bytes=draw(st.integers(2, capacity // bundle)) * bundle,
                baseline_bytes=draw(st.integers(1, 8)) * GIB,
                floor_bytes=2 * bundle,
                priority=draw(st.sampled_from([10, 50, 50, 90])),
                guarantee_bytes=draw(st.sampled_from([0, 2 * GIB])),
            )
        )
        each = draw(st.integers(1, 40)) * bundle
        rows[-1] = replace(rows[-1], full_context_bytes=draw(st.sampled_from([0, 41 * bundle])))
        wants[id] = (draw(st.sampled_from([0, 1, 5, 50, 400])), each)
    return gpu(total_bytes=141 * GIB, reserve_bytes=draw(st.sampled_from([0, 8 * GIB]))), rows, wants


def run_load(rows: list[InstanceView], wants: dict[int, tuple[int, int]]) -> list[InstanceView]:
    """What the engines show under that load with the limits that they have: as many requests run as there is room."""
    after = []
    for row in rows:
        requests, each = wants[row.id]
        room = max(0, row.limit_bytes // row.bundle_bytes - 1)
        running = min(requests, room * row.bundle_bytes // each)
        used = row.bundle_bytes + round_up(running * each, row.bundle_bytes)
        after.append(
            replace(
                row, used_bytes=used, prealloc_bytes=0, running=running, waiting=requests - running, idle_since=None
            )
        )
    return after


@settings(max_examples=150)
@given(loads())
def test_a_constant_load_converges_and_does_not_oscillate(case) -> None:
    card, rows, wants = case
    quiet = 0
    history = []
    for tick in range(60):
        rows = run_load(rows, wants)
        plan = rebalance(card, rows, NOW + tick * 30)
        history.append(plan.sentence)
        rows = apply(plan, rows)
        quiet = 0 if plan.steps else quiet + 1
    assert quiet >= 20, history


@settings(max_examples=60)
@given(loads())
def test_where_limits_start_does_not_matter_where_they_end(case) -> None:
    card, rows, wants = case
    ends = []
    for start in (rows, [replace(row, limit_bytes=row.lowest_bytes) for row in rows]):
        now_rows = start
        for tick in range(60):
            now_rows = run_load(now_rows, wants)
            now_rows = apply(rebalance(card, now_rows, NOW + tick * 30), now_rows)
        ends.append(now_rows)
    for one, two in zip(*ends, strict=True):
        # The same within the hysteresis of both runs.
        assert (
            abs(one.limit_bytes - two.limit_bytes) <= 0.3 * max(one.limit_bytes, two.limit_bytes) + 4 * one.bundle_bytes
        )
