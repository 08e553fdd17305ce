"""Laws and examples of ``make_room``, ``trim_all`` and ``shrink_idle``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gpus_app.policies.base import GIB, MIB, GpuView, Harm, InstanceView, Plan, Step, StepKind
from gpus_app.policies.make_room import make_room, shrink_idle, trim_all
from tests.gpus_app.policies.worlds import NOW, gpu, instance, worlds

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
def test_limits_stay_within_the_capacity_and_the_card_within_its_size(world: World, need: int) -> None:
    """What a plan leaves fits: limits, baselines, what others hold, foreign memory, what is kept, and the newcomer."""
    card, rows = world
    plan = make_room(card, rows, need, NOW)
    by_id = {row.id: row for row in rows}
    for id_, limit in plan.targets.items():
        assert limit <= max(by_id[id_].capacity_bytes, by_id[id_].limit_bytes)
    for step in plan.steps:
        if step.kind is StepKind.LOWER:
            assert step.to_bytes <= by_id[step.instance_id].capacity_bytes
    if plan.feasible:
        by_claims, _ = carried_out(card, rows, plan.steps)
        assert by_claims - need >= 0


@given(worlds(), needs)
def test_a_plan_only_lowers_trims_and_ends(world: World, need: int) -> None:
    """Lowers before raises: there is no raise at all, so nobody can grow into what is made free."""
    assert StepKind.RAISE not in {step.kind for step in make_room(*world, need, NOW).steps}


@given(worlds(), needs)
def test_a_plan_that_was_carried_out_leaves_nothing_to_do(world: World, need: int) -> None:
    """It converges in one round: once the bytes are there, the same wish takes no further step."""
    card, rows = world
    plan = make_room(card, rows, need, NOW)
    if not plan.feasible:
        return
    after, freed = [], 0
    for row in rows:
        mine = [step for step in plan.steps if step.instance_id == row.id]
        freed += sum(step.expected_bytes for step in mine)
        kinds = {step.kind: step for step in mine}
        if StepKind.STOP in kinds:
            continue
        if StepKind.SLEEP in kinds:
            left = kinds[StepKind.SLEEP].to_bytes
            nothing = dict.fromkeys(("used_bytes", "prealloc_bytes", "evictable_bytes"), 0)
            sleeper = replace(row, asleep=True, adjustable=False, baseline_bytes=left, reserved_bytes=left, **nothing)
            after.append(sleeper)
            continue
        footprint = row.footprint_bytes - sum(step.expected_bytes for step in mine)
        lower = kinds.get(StepKind.LOWER)
        used = min(row.used_bytes, footprint)
        after.append(
            replace(
                row,
                limit_bytes=lower.to_bytes if lower else row.limit_bytes,
                used_bytes=used,
                prealloc_bytes=footprint - used,
                evictable_bytes=min(row.evictable_bytes, used),
            )
        )
    free = card.free_bytes
    if free is None:
        free = card.total_bytes - card.foreign_bytes - sum(row.resident_bytes for row in rows)
    assert make_room(replace(card, free_bytes=free + freed), after, need, NOW).steps == ()


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


# -- examples ----------------------------------------------------------------------------------------------------------


def kinds(plan: Plan) -> list[tuple[StepKind, int]]:
    return [(step.kind, step.instance_id) for step in plan.steps]


def test_room_that_is_there_takes_no_steps() -> None:
    plan = make_room(gpu(), [instance(1, limit_bytes=10 * GIB)], 20 * GIB, NOW)
    assert plan.feasible and plan.steps == () and "are free and nobody else may take them" in plan.sentence


def test_a_limit_that_nobody_uses_goes_first() -> None:
    idle = instance(1, limit_bytes=60 * GIB)
    busy = instance(2, limit_bytes=20 * GIB, used_bytes=8 * GIB, running=4)
    plan = make_room(gpu(), [idle, busy], 30 * GIB, NOW)
    assert kinds(plan) == [(StepKind.LOWER, 1)] and plan.harm is Harm.NONE
    assert plan.steps[0].expected_bytes == 0 and plan.steps[0].to_bytes >= idle.lowest_bytes


def test_no_more_is_taken_than_is_needed() -> None:
    plan = make_room(gpu(), [instance(1, limit_bytes=60 * GIB)], 30 * GIB, NOW)
    assert 30 * GIB <= plan.room_bytes < 30 * GIB + 64 * MIB


def test_caches_of_an_idle_instance_go_before_a_busy_one_is_touched() -> None:
    idle = instance(
        1, limit_bytes=30 * GIB, used_bytes=30 * GIB, evictable_bytes=30 * GIB - 64 * MIB, idle_since=NOW - 9
    )
    busy = instance(2, limit_bytes=30 * GIB, used_bytes=28 * GIB, running=4)
    plan = make_room(gpu(), [idle, busy], 25 * GIB, NOW)
    assert kinds(plan) == [(StepKind.TRIM, 1), (StepKind.LOWER, 1)]
    trim, lower = plan.steps
    assert trim.expected_bytes > 25 * GIB and trim.harm is Harm.IDLE_CACHE
    assert lower.expected_bytes == 0 and "does not take again" in lower.reason


def test_the_low_priority_is_squeezed_and_the_high_one_left_alone() -> None:
    low = instance(1, priority=10, limit_bytes=30 * GIB, used_bytes=30 * GIB, running=9, reclaim="preempt")
    high = instance(2, priority=90, limit_bytes=30 * GIB, used_bytes=30 * GIB, running=9)
    plan = make_room(gpu(), [low, high], 20 * GIB, NOW)
    assert {step.instance_id for step in plan.steps} == {1}
    squeeze = plan.steps[-1]
    assert squeeze.harm is Harm.SQUEEZE and squeeze.reclaim == "preempt" and "priority 10" in squeeze.reason


def test_an_idle_sleepable_instance_is_put_to_sleep_before_anything_is_stopped() -> None:
    sleeper = instance(1, baseline_bytes=30 * GIB, limit_bytes=2 * GIB, sleepable=True, idle_since=NOW - 600)
    other = instance(2, baseline_bytes=30 * GIB, limit_bytes=2 * GIB)
    plan = make_room(gpu(), [sleeper, other], 40 * GIB, NOW)
    assert (StepKind.SLEEP, 1) in kinds(plan) and StepKind.STOP not in {step.kind for step in plan.steps}
    step = next(step for step in plan.steps if step.kind is StepKind.SLEEP)
    assert 28 * GIB < step.expected_bytes < 31 * GIB and "has been idle for 600 s" in step.reason


def test_what_a_sleep_left_before_is_reckoned_with() -> None:
    """E3: measured last time, not assumed."""
    sleeper = instance(1, baseline_bytes=60 * GIB, limit_bytes=2 * GIB, sleepable=True, asleep_bytes=30 * GIB)
    plan = make_room(gpu(), [sleeper], 45 * GIB, NOW, max_harm=Harm.SLEEP)
    assert plan.feasible and plan.steps[-1].to_bytes == 30 * GIB
    assert not make_room(gpu(), [sleeper], 55 * GIB, NOW, max_harm=Harm.SLEEP).feasible


def test_the_smallest_victim_that_is_enough_is_stopped() -> None:
    """E14: memory counts, not order."""
    small, middle, large = (
        instance(id, baseline_bytes=size * GIB, limit_bytes=GIB) for id, size in ((1, 5), (2, 20), (3, 40))
    )
    plan = make_room(gpu(), [small, middle, large], 25 * GIB, NOW)
    assert kinds(plan) == [(StepKind.STOP, 2)]


def test_when_everyone_is_pinned_the_newcomer_is_refused_with_that_reason() -> None:
    """E8."""
    rows = [instance(id, pinned=True, baseline_bytes=38 * GIB, limit_bytes=GIB, floor_bytes=GIB) for id in (1, 2)]
    plan = make_room(gpu(), rows, 20 * GIB, NOW)
    assert not plan.feasible and plan.sentence.count("(pinned)") == 2
    assert plan.largest_bytes < 4 * GIB


def test_one_that_was_just_loaded_is_not_thrown_out_again() -> None:
    """E9: two models must not evict one another at every request."""
    fresh = instance(1, baseline_bytes=60 * GIB, limit_bytes=GIB, ready_since=NOW - 20)
    plan = make_room(gpu(), [fresh], 40 * GIB, NOW)
    assert not plan.feasible and "ready for only 20 s" in plan.sentence
    assert make_room(gpu(), [fresh], 40 * GIB, NOW + 60).feasible


def test_starting_instances_keep_what_they_were_promised() -> None:
    """Sum of promises, not of what is resident yet."""
    starting = instance(
        1, adjustable=False, baseline_bytes=0, used_bytes=0, prealloc_bytes=0, reserved_bytes=50 * GIB, ready_since=None
    )
    plan = make_room(gpu(), [starting], 40 * GIB, NOW)
    assert not plan.feasible and plan.largest_bytes == 30 * GIB and "(starting)" in plan.sentence


def test_memory_of_strangers_is_named_as_what_stands_in_the_way() -> None:
    card = gpu(foreign_bytes=70 * GIB, foreign_names=("ollama (pid 7)",))
    plan = make_room(card, [], 20 * GIB, NOW)
    assert "70.0 GiB by processes that are not ours (ollama (pid 7))" in plan.sentence


def test_the_reserve_is_not_given_to_a_newcomer() -> None:
    assert make_room(gpu(reserve_bytes=8 * GIB), [], 73 * GIB, NOW).feasible is False
    assert make_room(gpu(reserve_bytes=8 * GIB), [], 72 * GIB, NOW).feasible


def test_nvml_counts_where_it_shows_less_than_our_book() -> None:
    idle = instance(1, limit_bytes=10 * GIB, used_bytes=6 * GIB, baseline_bytes=4 * GIB)
    assert not make_room(gpu(free_bytes=5 * GIB), [idle], 30 * GIB, NOW, max_harm=Harm.CACHE).feasible


def test_an_overdue_limit_is_enforced_rather_than_lowered() -> None:
    """A6: told to shrink and still above it."""
    over = instance(1, limit_bytes=20 * GIB, used_bytes=50 * GIB, prealloc_bytes=0, running=9, reclaim="preempt")
    plan = make_room(gpu(), [over], 50 * GIB, NOW)
    (step,) = plan.steps
    assert step.kind is StepKind.LOWER and step.to_bytes == step.from_bytes == 20 * GIB
    assert step.expected_bytes == 30 * GIB and "over its limit" in step.reason


def test_trim_all_gives_back_caches_and_reserved_pages_and_leaves_limits() -> None:
    idle = instance(1, used_bytes=5 * GIB, prealloc_bytes=640 * MIB)
    busy = instance(2, used_bytes=9 * GIB, evictable_bytes=2 * GIB, prealloc_bytes=320 * MIB, running=1)
    bare = instance(3, used_bytes=64 * MIB, prealloc_bytes=0)
    plan = trim_all(gpu(), [idle, busy, bare])
    assert kinds(plan) == [(StepKind.TRIM, 1), (StepKind.TRIM, 2)]
    assert [step.expected_bytes for step in plan.steps] == [5 * GIB + 640 * MIB - 64 * MIB, 2 * GIB + 320 * MIB]
    assert plan.targets == {1: 20 * GIB, 2: 20 * GIB, 3: 20 * GIB}
    assert trim_all(gpu(), [bare]).sentence == "There is nothing to trim."


def test_shrink_idle_lowers_the_idle_to_their_lowest_limit() -> None:
    idle = instance(1, guarantee_bytes=3 * GIB)
    busy = instance(2, running=1)
    low = instance(3, limit_bytes=GIB)
    plan = shrink_idle(gpu(), [idle, busy, low], NOW)
    assert kinds(plan) == [(StepKind.LOWER, 1)] and plan.steps[0].to_bytes == 3 * GIB
    assert shrink_idle(gpu(), [busy, low], NOW).steps == ()


def test_an_engine_that_would_die_of_it_is_not_squeezed_below_its_use() -> None:
    """A7, A8."""
    frail = instance(1, limit_bytes=60 * GIB, used_bytes=40 * GIB, running=9, dies_below_use=True, pinned=True)
    plan = make_room(gpu(), [frail], 30 * GIB, NOW)
    assert plan.feasible and plan.steps[-1].to_bytes >= 40 * GIB
    assert not make_room(gpu(), [frail], 40 * GIB, NOW).feasible
