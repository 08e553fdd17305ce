"""Laws and examples of ``make_room``, ``trim_all`` and ``shrink_idle``."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from gpus_app.policies.base import GIB, MIB, GpuView, Harm, InstanceView, Step, StepKind
from gpus_app.policies.make_room import make_room
from tests.gpus_app.policies.worlds import NOW, worlds

World = tuple[GpuView, list[InstanceView]]
needs = st.sampled_from([1, 100 * MIB, GIB, 7 * GIB + 13, 30 * GIB, 70 * GIB, 300 * GIB])


def carried_out(card: GpuView, rows: Sequence[InstanceView], steps: Sequence[Step]) -> tuple[int, int]:
    """Bytes free by claims and by NVML, kept bytes taken off, after the steps: reckoned here, not by the planner."""
    free = card.free_bytes
    if free is None:
        free = card.total_bytes - card.foreign_bytes - sum(row.resident_bytes for row in rows)
    claims = 0
    for row in rows:
        mine = [step for step in steps if step.instance_id == row.id]
        footprint, limit, gone = row.footprint_bytes, row.limit_bytes, None
        for step in mine:
            if step.kind is StepKind.TRIM:
                footprint = step.to_bytes
            elif step.kind is StepKind.LOWER:
                limit, footprint = step.to_bytes, min(footprint, step.to_bytes)
            else:
                gone = step.to_bytes
        if gone is not None:
            claims += gone
        else:
            claims += row.baseline_bytes + max(limit, footprint) if row.elastic else row.held_bytes
        free += sum(step.expected_bytes for step in mine)
    kept = card.kept_bytes
    return card.total_bytes - card.foreign_bytes - kept - claims, free - kept


@given(worlds(), needs)
def test_a_plan_leaves_the_bytes_free_by_claims_and_by_nvml(world: World, need: int) -> None:
    card, rows = world
    plan = make_room(card, rows, need, NOW)
    if plan.feasible:
        by_claims, by_nvml = carried_out(card, rows, plan.steps)
        assert min(by_claims, by_nvml) >= need
        assert plan.room_bytes == min(by_claims, by_nvml)
    else:
        assert not plan.steps
        assert plan.largest_bytes < need
        assert "at most" in plan.sentence


@given(worlds(), needs)
def test_pinned_instances_are_never_put_to_sleep_or_stopped(world: World, need: int) -> None:
    card, rows = world
    pinned = {row.id for row in rows if row.pinned}
    for step in make_room(card, rows, need, NOW).steps:
        assert step.kind in (StepKind.TRIM, StepKind.LOWER) or step.instance_id not in pinned


@given(worlds(), needs)
def test_nobody_who_just_became_ready_is_put_to_sleep_or_stopped(world: World, need: int) -> None:
    card, rows = world
    fresh = {row.id for row in rows if not row.asleep and (row.ready_since is None or NOW - row.ready_since < 60)}
    for step in make_room(card, rows, need, NOW, minimum_residence_s=60).steps:
        assert step.kind in (StepKind.TRIM, StepKind.LOWER) or step.instance_id not in fresh


@given(worlds(), needs)
def test_limits_stay_at_or_above_guarantee_and_floor_and_move_down_only(world: World, need: int) -> None:
    card, rows = world
    by_id = {row.id: row for row in rows}
    for step in make_room(card, rows, need, NOW).steps:
        row = by_id[step.instance_id]
        if step.kind is StepKind.LOWER:
            lowest = min(max(row.guarantee_bytes, row.floor_bytes), row.capacity_bytes)
            # The same limit again means: in force now, since the instance is over it.
            overdue = step.to_bytes == row.limit_bytes < row.footprint_bytes
            assert lowest <= step.to_bytes < row.limit_bytes or overdue
            assert row.elastic


@given(worlds(), needs)
def test_only_those_of_no_higher_priority_lose_what_they_use(world: World, need: int) -> None:
    card, rows = world
    higher = {row.id for row in rows if row.priority > 50 and not row.idle}
    for step in make_room(card, rows, need, NOW, priority=50).steps:
        assert step.harm <= Harm.ALLOWANCE or step.instance_id not in higher


@given(worlds(), needs)
def test_no_milder_measures_would_have_been_enough(world: World, need: int) -> None:
    card, rows = world
    plan = make_room(card, rows, need, NOW)
    if plan.feasible and plan.steps and plan.harm > Harm.NONE:
        assert not make_room(card, rows, need, NOW, max_harm=Harm(plan.harm - 1)).feasible


@given(worlds(), needs)
def test_every_instance_in_a_plan_is_needed_in_it(world: World, need: int) -> None:
    card, rows = world
    plan = make_room(card, rows, need, NOW)
    for id_ in {step.instance_id for step in plan.steps}:
        rest = [step for step in plan.steps if step.instance_id != id_]
        assert min(carried_out(card, rows, rest)) < need


@given(worlds(), needs)
def test_steps_come_in_the_order_of_their_harm(world: World, need: int) -> None:
    harms = [step.harm for step in make_room(*world, need, NOW).steps]
    assert harms == sorted(harms)


@given(worlds(), needs)
def test_the_largest_is_possible_and_one_byte_more_is_not(world: World, need: int) -> None:
    card, rows = world
    largest = make_room(card, rows, need, NOW).largest_bytes
    if largest > 0:
        assert make_room(card, rows, largest, NOW).feasible
    assert not make_room(card, rows, largest + 1, NOW).feasible


@given(worlds(), needs, st.randoms(use_true_random=False))
def test_the_order_of_the_input_changes_nothing(world: World, need: int, random) -> None:
    card, rows = world
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert make_room(card, rows, need, NOW) == make_room(card, shuffled, need, NOW)


@given(worlds(), needs)
def test_expected_bytes_are_never_more_than_what_is_resident(world: World, need: int) -> None:
    card, rows = world
    by_id = {row.id: row for row in rows}
    freed: dict[int, int] = {}
    for step in make_room(card, rows, need, NOW).steps:
        assert step.expected_bytes >= 0
        freed[step.instance_id] = freed.get(step.instance_id, 0) + step.expected_bytes
    assert all(amount <= by_id[id_].resident_bytes for id_, amount in freed.items())
