"""Laws and examples of ``rebalance``."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from gpus_app.policies.base import GIB, MIB, GpuView, Harm, InstanceView, Plan, StepKind, gib, round_up
from gpus_app.policies.rebalance import awake_limits, rebalance, rebalance_cards
from tests.gpus_app.policies.worlds import BUNDLES, NOW, apply, claims, clusters, gpu, instance, worlds

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


@given(loads())
def test_a_constant_load_converges_and_does_not_oscillate(case) -> None:
    card, rows, wants = case
    quiet = 0
    history = []
    for tick in range(45):
        rows = run_load(rows, wants)
        plan = rebalance(card, rows, NOW + tick * 30)
        history.append(plan.sentence)
        rows = apply(plan, rows)
        quiet = 0 if plan.steps else quiet + 1
    assert quiet >= 15, history


@given(loads())
def test_where_limits_start_does_not_matter_where_they_end(case) -> None:
    card, rows, wants = case
    ends = []
    for start in (rows, [replace(row, limit_bytes=row.lowest_bytes) for row in rows]):
        now_rows = start
        for tick in range(45):
            now_rows = run_load(now_rows, wants)
            now_rows = apply(rebalance(card, now_rows, NOW + tick * 30), now_rows)
        ends.append(now_rows)
    for one, two in zip(*ends, strict=True):
        # The same within the hysteresis of both runs.
        assert (
            abs(one.limit_bytes - two.limit_bytes) <= 0.3 * max(one.limit_bytes, two.limit_bytes) + 4 * one.bundle_bytes
        )


# -- examples ----------------------------------------------------------------------------------------------------------


def moves(plan: Plan) -> dict[int, tuple[str, int]]:
    return {step.instance_id: (str(step.kind), step.to_bytes) for step in plan.steps}


def test_a_hungry_instance_gets_what_an_idle_one_does_not_use() -> None:
    """The story: A has waiting requests, B sits on a limit."""
    hungry = instance(1, limit_bytes=30 * GIB, used_bytes=30 * GIB, running=30, waiting=20)
    idle = instance(2, limit_bytes=40 * GIB)
    plan = rebalance(gpu(), [hungry, idle], NOW)
    assert [step.kind for step in plan.steps] == [StepKind.LOWER, StepKind.RAISE]
    lower, rise = plan.steps
    assert lower.instance_id == 2 and "m1 needs more: 20 requests wait" in lower.reason
    assert rise.instance_id == 1 and rise.to_bytes > 45 * GIB and "20 requests wait" in rise.reason


def test_limits_at_start_that_promise_the_card_twice_are_lowered() -> None:
    """aibrix 2770: each engine believes that it owns most of the card."""
    rows = [instance(id, limit_bytes=60 * GIB) for id in (1, 2, 3)]
    plan = rebalance(gpu(), rows, NOW)
    assert all(step.kind is StepKind.LOWER for step in plan.steps) and len(plan.steps) == 3
    assert claims(gpu(), apply(plan, rows)) <= 80 * GIB
    assert "more than the card has" in plan.steps[0].reason


def test_priority_decides_whose_demand_is_met_first() -> None:
    high = instance(1, priority=90, limit_bytes=10 * GIB, used_bytes=10 * GIB, running=10, waiting=100)
    low = instance(2, priority=10, limit_bytes=60 * GIB, used_bytes=60 * GIB, running=60, waiting=100)
    targets = rebalance(gpu(), [high, low], NOW).targets
    lowest = low.lowest_bytes
    assert targets[2] < 60 * GIB and targets[2] >= lowest


def test_idle_neighbour_of_a_hungry_one_keeps_room_for_its_longest_request() -> None:
    """Else the router refuses such requests, and no demand for more is ever seen."""
    hungry = instance(
        1, limit_bytes=70 * GIB, used_bytes=70 * GIB, running=60, waiting=500, capacity_bytes=74 * GIB, prealloc_bytes=0
    )
    idle = instance(2, limit_bytes=GIB, full_context_bytes=5 * GIB)
    plan = rebalance(gpu(), [hungry, idle], NOW)
    assert moves(plan)[1][0] == "lower" and plan.targets[1] <= 67 * GIB
    squeezed = replace(hungry, limit_bytes=plan.targets[1], used_bytes=plan.targets[1])
    assert rebalance(gpu(), [squeezed, idle], NOW + 30).targets[2] >= 5 * GIB
    resting = replace(idle, idle_shrink_after_s=60.0, idle_since=NOW - 500, limit_bytes=6 * GIB)
    assert rebalance(gpu(), [hungry, resting], NOW).targets[2] == idle.lowest_bytes


def test_resting_instance_is_promised_what_its_longest_request_needs_and_gets_it() -> None:
    resting = instance(
        1, limit_bytes=GIB, full_context_bytes=5 * GIB, floor_bytes=GIB, idle_shrink_after_s=60.0, idle_since=NOW - 500
    )
    neighbour = instance(2, limit_bytes=60 * GIB, used_bytes=GIB)
    assert rebalance(gpu(), [resting, neighbour], NOW).targets[1] == GIB
    promised = awake_limits([(gpu(), [resting, neighbour])], NOW)
    assert promised == {1: 5 * GIB}
    # The long request is inside and waits: what was promised is the least that is given.
    rows = [replace(resting, idle_since=None, waiting=1), neighbour]
    for tick in range(3):
        rows = apply(rebalance(gpu(), rows, NOW + 3 * tick), rows)
    assert rows[0].limit_bytes >= promised[1]


def test_no_more_is_promised_than_the_card_has_left() -> None:
    resting = instance(
        1, limit_bytes=GIB, full_context_bytes=50 * GIB, floor_bytes=GIB, idle_shrink_after_s=60.0, idle_since=NOW - 500
    )
    urgent = instance(2, priority=90, limit_bytes=60 * GIB, used_bytes=60 * GIB, running=60, waiting=60)
    promised = awake_limits([(gpu(), [resting, urgent])], NOW)[1]
    assert GIB <= promised < 20 * GIB
    assert awake_limits([(gpu(), [replace(resting, idle_since=NOW - 1), urgent])], NOW) == {}


def test_equals_meet_in_the_middle() -> None:
    rows = [
        instance(1, limit_bytes=60 * GIB, used_bytes=60 * GIB, running=60, waiting=60),
        instance(2, limit_bytes=10 * GIB, used_bytes=10 * GIB, running=10, waiting=60),
    ]
    wants = {1: (300, GIB), 2: (300, GIB)}
    for tick in range(10):
        rows = run_load(rows, wants)
        rows = apply(rebalance(gpu(), rows, NOW + 30 * tick), rows)
    assert abs(rows[0].limit_bytes - rows[1].limit_bytes) <= 0.1 * rows[0].limit_bytes


def test_an_idle_instance_shrinks_to_its_floor_by_its_rule_and_grows_again() -> None:
    resting = instance(1, idle_shrink_after_s=300.0, idle_since=NOW - 301, floor_bytes=GIB)
    plan = rebalance(gpu(), [resting], NOW)
    assert moves(plan) == {1: ("lower", GIB)} and "idle for 301 s" in plan.steps[0].reason
    awake = replace(resting, limit_bytes=GIB, idle_since=None, running=1, used_bytes=GIB)
    assert moves(rebalance(gpu(), [awake], NOW))[1][0] == "raise"
    assert rebalance(gpu(), [replace(resting, idle_since=NOW - 200)], NOW).targets[1] > GIB


def test_a_guarantee_holds_against_idleness_and_neighbours() -> None:
    resting = instance(1, idle_shrink_after_s=10.0, idle_since=NOW - 99, guarantee_bytes=12 * GIB)
    hungry = instance(2, priority=100, used_bytes=30 * GIB, limit_bytes=30 * GIB, running=9, waiting=900)
    assert rebalance(gpu(), [resting, hungry], NOW).targets[1] == 12 * GIB


def test_a_small_difference_is_left_alone() -> None:
    rows = [instance(1, limit_bytes=36 * GIB, used_bytes=9 * GIB, running=3), instance(2, limit_bytes=35 * GIB)]
    calm = rebalance(gpu(), rows, NOW)
    rows = apply(calm, rows)
    nudged = [replace(rows[0], used_bytes=rows[0].used_bytes + GIB // 2), rows[1]]
    assert rebalance(gpu(), nudged, NOW + 60).steps == ()


def test_a_limit_just_set_is_left_alone_unless_the_bytes_are_needed() -> None:
    rows = [
        instance(1, limit_bytes=10 * GIB, limit_set_at=NOW - 3),
        instance(2, limit_bytes=40 * GIB, limit_set_at=NOW - 3),
    ]
    assert rebalance(gpu(), rows, NOW).steps == ()
    hungry = [replace(rows[0], used_bytes=10 * GIB, running=5, waiting=50), rows[1]]
    assert moves(rebalance(gpu(), hungry, NOW))[1][0] == "raise"


def test_bytes_not_given_back_yet_are_not_given_twice() -> None:
    """F2: a deferred limit still holds its footprint."""
    over = instance(1, limit_bytes=10 * GIB, used_bytes=50 * GIB, prealloc_bytes=0, running=50, limit_set_at=NOW - 1)
    hungry = instance(2, limit_bytes=16 * GIB, used_bytes=16 * GIB, running=9, waiting=90, prealloc_bytes=0)
    for step in rebalance(gpu(), [over, hungry], NOW).steps:
        if step.kind is StepKind.RAISE and step.instance_id == 2:
            assert 50 * GIB + step.to_bytes + 8 * GIB <= 80 * GIB


def test_a_limit_above_capacity_is_brought_down() -> None:
    """A3."""
    wild = instance(1, limit_bytes=70 * GIB, capacity_bytes=60 * GIB)
    plan = rebalance(gpu(total_bytes=141 * GIB), [wild], NOW)
    assert moves(plan)[1] == ("lower", 60 * GIB) and "capacity" in plan.steps[0].reason


def test_a_starving_instance_gets_room_for_its_longest_request() -> None:
    """A5: requests wait and none runs; the first one is longer than the limit allows."""
    stuck = instance(1, limit_bytes=2 * GIB, waiting=1, full_context_bytes=12 * GIB, floor_bytes=GIB)
    neighbour = instance(2, limit_bytes=60 * GIB, used_bytes=58 * GIB, running=50)
    steps = moves(rebalance(gpu(), [stuck, neighbour], NOW))
    assert steps[2][0] == "lower" and steps[1] == ("raise", 13 * GIB + GIB // 2)


def test_the_top_of_the_card_that_kvcached_never_maps_is_not_promised() -> None:
    rows = [instance(1, limit_bytes=GIB, capacity_bytes=80 * GIB, used_bytes=GIB, running=1, waiting=9)]
    plan = rebalance(gpu(kv_headroom_bytes=4 * GIB), rows, NOW)
    assert plan.targets[1] <= 72 * GIB


def test_squeezing_a_busy_instance_uses_its_own_way_of_reclaiming() -> None:
    busy = instance(1, priority=10, limit_bytes=60 * GIB, used_bytes=60 * GIB, running=60, reclaim="preempt")
    high = instance(2, priority=90, limit_bytes=10 * GIB, used_bytes=10 * GIB, running=10, waiting=500)
    lower = next(step for step in rebalance(gpu(), [busy, high], NOW).steps if step.instance_id == 1)
    assert lower.reclaim == "preempt" and lower.harm is Harm.SQUEEZE and lower.expected_bytes > 0


def test_a_tensor_parallel_instance_has_one_limit_for_all_its_cards() -> None:
    split = instance(1, tensor_parallel_size=2, limit_bytes=50 * GIB, used_bytes=20 * GIB, running=5)
    alone = instance(2, limit_bytes=30 * GIB, used_bytes=29 * GIB, running=29, waiting=60, priority=90)
    cards = [(gpu(uuid="GPU-0"), [split, alone]), (gpu(uuid="GPU-1"), [split])]
    plan = rebalance_cards(cards, NOW)
    rows = {row.id: row for row in apply(plan, [split, alone])}
    for card, instances in cards:
        assert claims(card, [rows[row.id] for row in instances]) <= card.total_bytes
    assert len([step for step in plan.steps if step.instance_id == 1]) <= 1
    again = rebalance_cards([(card, [rows[row.id] for row in instances]) for card, instances in cards], NOW + 60)
    assert not any(step.kind is StepKind.LOWER for step in again.steps)


@given(clusters())
def test_the_laws_hold_on_every_card_of_a_tensor_parallel_instance(cards: list[World]) -> None:
    """Sum, capacity, guarantee and floor, lowers first, one step an instance, whole bundles, the same twice."""
    plan = rebalance_cards(cards, NOW)
    rows = {row.id: row for _, here in cards for row in here}
    kinds = [step.kind for step in plan.steps]
    assert kinds == sorted(kinds, key=lambda kind: kind is StepKind.RAISE)
    assert len({step.instance_id for step in plan.steps}) == len(plan.steps)
    for step in plan.steps:
        row = rows[step.instance_id]
        assert row.elastic and step.to_bytes <= row.capacity_bytes
        assert step.to_bytes % row.bundle_bytes == 0 or step.to_bytes == row.lowest_bytes == row.capacity_bytes
        if step.kind is StepKind.LOWER:
            assert step.to_bytes >= min(max(row.guarantee_bytes, row.floor_bytes), row.capacity_bytes)
    if plan.feasible:
        after = {row.id: row for row in apply(plan, list(rows.values()))}
        for card, here in cards:
            assert claims(card, [after[row.id] for row in here]) <= card.total_bytes
    assert rebalance_cards(cards, NOW) == plan
    assert rebalance_cards(list(reversed(cards)), NOW).targets == plan.targets


@settings(max_examples=60)
@given(clusters())
def test_cards_with_tensor_parallel_instances_settle_and_stay(cards: list[World]) -> None:
    """Readings that do not change: no limit moves for ever, whatever lies across the cards."""
    rows = {
        row.id: replace(row, prealloc_bytes=0, used_bytes=min(row.used_bytes, row.lowest_bytes))
        for _, here in cards
        for row in here
    }
    sentences = []
    for tick in range(24):
        now_cards = [(card, [rows[row.id] for row in here]) for card, here in cards]
        plan = rebalance_cards(now_cards, NOW + 60 * tick)
        rows = {row.id: row for row in apply(plan, list(rows.values()))}
        sentences.append(plan.sentence if plan.steps else "")
    assert not any(sentences[14:]), sentences


@given(worlds(4), worlds(3))
def test_cards_that_share_an_instance_keep_their_laws(one: World, two: World) -> None:
    first, second = replace(one[0], uuid="GPU-0"), replace(two[0], uuid="GPU-1")
    others = [replace(row, id=row.id + 100) for row in two[1]]
    shared = one[1][:1]
    cards = [(first, one[1]), (second, [*others, *shared])]
    plan = rebalance_cards(cards, NOW)
    rows = {row.id: row for row in apply(plan, [*one[1], *others])}
    kinds = [step.kind for step in plan.steps]
    assert kinds == sorted(kinds, key=lambda kind: kind is StepKind.RAISE)
    if plan.feasible:
        for card, instances in cards:
            assert claims(card, [rows[row.id] for row in instances]) <= card.total_bytes


def test_bytes_in_sentences_are_readable() -> None:
    assert (gib(1536 * MIB), gib(64 * MIB), gib(0)) == ("1.5 GiB", "64 MiB", "0 MiB")
