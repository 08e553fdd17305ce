"""The controller's look at the limits: what it does, what it leaves alone, what it remembers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from gpus_app.models import Gpu, GpuPolicy
from models_app import dispatch, transitions
from models_app.models import Instance, InstanceEvent, MemoryPolicy, Operation
from models_app.services.lifecycle.launch import instance_place
from models_app.services.memory.kvcache import kvcache_limit_set
from models_app.services.plans import rebalancing
from models_app.services.plans.rebalancing import hand_back, rebalance_all
from models_app.states import InstanceState
from tests.builders import GIB, make_gpu, make_instance, make_model
from tests.models_app.readings import BUNDLE, Readings, whole

S = InstanceState
pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("sent")]


@pytest.fixture
def gpu() -> Gpu:
    return make_gpu()


def _ready(gpu: Gpu, limit: int, readings: Readings, **part: Any) -> Instance:
    row = make_instance(gpus=[gpu], effective_limit_bytes=whole(limit), capacity_bytes=70 * GIB)
    readings.part(row, **part)
    return row


def _wish(row: Instance) -> int | None:
    return Instance.objects.values_list("limit_bytes", flat=True).get(pk=row.pk)


def _answer(readings: Readings, *rows: Instance) -> None:
    """What is wanted is in force and read."""
    for row in rows:
        row.refresh_from_db()
        if row.limit_bytes is None:
            continue
        transitions.report(
            row.pk,
            limit_acked_revision=row.limit_revision,
            limit_status="applied",
            effective_limit_bytes=whole(row.limit_bytes),
        )
        readings.part(row, limit=whole(row.limit_bytes))


def _policy(gpu: Gpu) -> GpuPolicy:
    return GpuPolicy.objects.get(gpu=gpu)


def _fits(gpu: Gpu, readings: Readings) -> bool:
    parts = [part for (uuid, _), part in readings.parts.items() if uuid == gpu.uuid]
    return sum(part["baseline"] + part["limit"] for part in parts) <= gpu.total_bytes * 0.95


def test_two_neighbours_who_each_may_take_the_card_are_lowered(gpu: Gpu, readings: Readings) -> None:
    rows = [_ready(gpu, 70 * GIB, readings) for _ in range(2)]
    rebalance_all()
    _answer(readings, *rows)
    assert _fits(gpu, readings)
    rows[0].refresh_from_db()
    assert rows[0].limit_set_by == "controller"
    assert rows[0].limit_automatic
    assert InstanceEvent.objects.filter(instance=rows[0], kind="limit").get().reason


def test_lowers_come_before_raises(gpu: Gpu, readings: Readings) -> None:
    idle = _ready(gpu, 60 * GIB, readings)
    busy = _ready(gpu, 10 * GIB, readings, used=whole(10 * GIB), running=8, waiting=50)
    rebalance_all()
    assert (_wish(idle) or 0) < whole(60 * GIB)
    assert _wish(busy) is None, "the bytes are not back yet"
    _answer(readings, idle)
    rebalance_all()
    assert (_wish(busy) or 0) > whole(10 * GIB)
    _answer(readings, busy)
    assert _fits(gpu, readings)


def test_no_raise_while_a_lowered_limit_is_not_answered(gpu: Gpu, readings: Readings) -> None:
    idle = _ready(gpu, 20 * GIB, readings)
    busy = _ready(gpu, 10 * GIB, readings, used=whole(10 * GIB), running=8, waiting=50)
    Instance.objects.filter(pk=idle.pk).update(limit_revision=1, limit_bytes=whole(20 * GIB))
    rebalance_all()
    assert _wish(busy) is None
    Instance.objects.filter(pk=idle.pk).update(limit_acked_revision=1)
    rebalance_all()
    assert _wish(busy)


def test_slow_neighbour_over_its_limit_keeps_its_bytes_and_holds_up_nobody(gpu: Gpu, readings: Readings) -> None:
    _ready(gpu, 10 * GIB, readings, used=whole(30 * GIB), running=4)  # limit in force, requests still end
    busy = _ready(gpu, 10 * GIB, readings, used=whole(10 * GIB), running=8, waiting=50)
    rebalance_all()
    raised = _wish(busy)
    assert raised
    assert whole(10 * GIB) < raised <= 76 * GIB - 2 * 2 * GIB - whole(30 * GIB)


def test_same_limit_is_not_asked_again_within_a_quarter_minute(gpu: Gpu, readings: Readings) -> None:
    rows = [_ready(gpu, 70 * GIB, readings) for _ in range(2)]
    rebalance_all()
    rebalance_all()
    assert [Instance.objects.get(pk=row.pk).limit_revision for row in rows] == [1, 1]
    Instance.objects.update(limit_set_at=timezone.now() - timedelta(seconds=16))
    rebalance_all()
    assert [Instance.objects.get(pk=row.pk).limit_revision for row in rows] == [2, 2]


def test_dry_run_shows_and_does_nothing(gpu: Gpu, readings: Readings) -> None:
    GpuPolicy.objects.update(rebalance="dry_run")
    row = _ready(gpu, 70 * GIB, readings)
    _ready(gpu, 70 * GIB, readings)
    rebalance_all()
    assert _wish(row) is None
    plan = _policy(gpu).plan
    assert plan["mode"] == "dry_run"
    assert {step["kind"] for step in plan["steps"]} == {"lower"}
    assert all(step["reason"] for step in plan["steps"])


def test_off_means_no_plan(gpu: Gpu, readings: Readings) -> None:
    GpuPolicy.objects.update(rebalance="off", plan={"mode": "on", "steps": [], "feasible": True})
    row = _ready(gpu, 70 * GIB, readings)
    _ready(gpu, 70 * GIB, readings)
    assert rebalance_all() == []
    assert _wish(row) is None
    assert _policy(gpu).plan == {}


def test_held_card_is_only_looked_at(gpu: Gpu, readings: Readings) -> None:
    GpuPolicy.objects.update(held_until=timezone.now() + timedelta(minutes=5))
    row = _ready(gpu, 70 * GIB, readings)
    _ready(gpu, 70 * GIB, readings)
    rebalance_all()
    assert _wish(row) is None
    assert _policy(gpu).plan["mode"] == "dry_run"
    GpuPolicy.objects.update(held_until=timezone.now() - timedelta(seconds=1))
    rebalance_all()
    assert _wish(row)


def test_nothing_is_done_by_an_old_reading(gpu: Gpu, readings: Readings) -> None:
    row = _ready(gpu, 70 * GIB, readings)
    _ready(gpu, 70 * GIB, readings)
    readings.age_s = 20.0
    rebalance_all()
    assert _wish(row) is None


def test_card_is_left_alone_while_room_is_made_on_it(gpu: Gpu, readings: Readings) -> None:
    row = _ready(gpu, 70 * GIB, readings)
    _ready(gpu, 70 * GIB, readings)
    operation = Operation.objects.create(kind="make_room", title="x", facts={"gpu_uuids": [gpu.uuid]})
    rebalance_all()
    assert _wish(row) is None
    Operation.objects.filter(pk=operation.pk).update(state="succeeded", ended_at=timezone.now())
    rebalance_all()
    assert _wish(row)


def test_limit_set_by_hand_stays_and_the_others_share_the_rest(gpu: Gpu, readings: Readings) -> None:
    by_hand = _ready(gpu, 30 * GIB, readings)
    kvcache_limit_set(by_hand, size="30G", actor="anna", wait_s=0)
    _answer(readings, by_hand)
    other = _ready(gpu, 70 * GIB, readings)
    rebalance_all()
    by_hand.refresh_from_db()
    assert (by_hand.limit_bytes, by_hand.limit_set_by, by_hand.limit_revision) == (30 * GIB, "anna", 1)
    _answer(readings, other)
    assert _fits(gpu, readings)
    assert all(step["instance_id"] != by_hand.pk for step in _policy(gpu).plan["steps"])


def test_limit_handed_back_is_moved_again(gpu: Gpu, readings: Readings) -> None:
    row = _ready(gpu, 5 * GIB, readings, used=whole(5 * GIB), running=9, waiting=9)
    kvcache_limit_set(row, size=whole(5 * GIB), actor="anna", wait_s=0)
    _answer(readings, row)
    rebalance_all()
    assert _wish(row) == whole(5 * GIB)
    row.refresh_from_db()
    hand_back(row, actor="bert")
    assert "set by anna" in InstanceEvent.objects.filter(instance=row, actor="bert").get().reason
    rebalance_all()
    assert (_wish(row) or 0) > whole(5 * GIB)


def test_limit_set_by_an_operator_during_the_look_counts(
    gpu: Gpu, readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [_ready(gpu, 70 * GIB, readings) for _ in range(2)]
    plan_of = rebalancing.rebalance_cards

    def slow(*args: Any) -> Any:
        kvcache_limit_set(rows[0], size="50G", actor="anna", wait_s=0)
        return plan_of(*args)

    monkeypatch.setattr(rebalancing, "rebalance_cards", slow)
    rebalance_all()
    assert _wish(rows[0]) == 50 * GIB


def test_guarantee_and_floor_are_never_gone_under(gpu: Gpu, readings: Readings) -> None:
    owed = _ready(gpu, 70 * GIB, readings)
    MemoryPolicy.objects.filter(model=owed.model).update(guarantee_bytes=50 * GIB)
    other = _ready(gpu, 70 * GIB, readings, used=whole(60 * GIB), running=50, waiting=50)
    rebalance_all()
    assert (_wish(owed) or 0) >= 50 * GIB
    assert 9 * BUNDLE <= (_wish(other) or 0) <= 22 * GIB


def test_more_urgent_model_gets_what_both_want(gpu: Gpu, readings: Readings) -> None:
    rows = [_ready(gpu, 35 * GIB, readings, used=whole(34 * GIB), running=9, waiting=99) for _ in range(2)]
    MemoryPolicy.objects.filter(model=rows[1].model).update(priority=90)
    for _ in range(3):
        rebalance_all()
        _answer(readings, *rows)
    first, second = (readings.parts[gpu.uuid, row.pk]["limit"] for row in rows)
    assert second > first
    assert _fits(gpu, readings)


def test_starting_newcomer_has_its_bytes_at_the_first_look(gpu: Gpu, readings: Readings) -> None:
    neighbour = _ready(gpu, 70 * GIB, readings, used=whole(10 * GIB), running=4)
    newcomer = make_instance(gpus=[gpu], state=S.SCHEDULED, reserved_bytes=30 * GIB)
    rebalance_all()
    assert (_wish(neighbour) or 0) <= 76 * GIB - 30 * GIB - 2 * GIB
    assert _wish(newcomer) is None


def test_placing_asks_the_controller_to_look_at_once(
    gpu: Gpu, readings: Readings, sent: list[Any], on_commit: Any
) -> None:
    row = make_instance(gpus=[gpu], state=S.PENDING)
    with on_commit():
        assert instance_place(row.pk)
    assert (dispatch.REBALANCE,) in sent


def test_tensor_parallel_instance_keeps_one_limit_that_fits_both_cards(gpu: Gpu, readings: Readings) -> None:
    second = make_gpu(index=1)
    wide = make_instance(
        model=make_model(tensor_parallel_size=2),
        gpus=[gpu, second],
        effective_limit_bytes=whole(70 * GIB),
        capacity_bytes=70 * GIB,
    )
    readings.part(wide)
    neighbour = _ready(second, 70 * GIB, readings, used=whole(40 * GIB), running=9)
    assert len(rebalance_all()) == 1, "one plan for both"
    _answer(readings, wide, neighbour)
    assert _fits(gpu, readings)
    assert _fits(second, readings)
    assert _policy(gpu).plan["steps"] == _policy(second).plan["steps"]


def test_routers_are_told_how_far_a_resting_instance_grows(gpu: Gpu, readings: Readings) -> None:
    row = make_instance(
        gpus=[gpu],
        effective_limit_bytes=whole(8 * GIB),
        capacity_bytes=70 * GIB,
        safety_floor_bytes=GIB,
        full_context_floor_bytes=6 * GIB,
        ready_at=timezone.now() - timedelta(hours=1),
    )
    MemoryPolicy.objects.filter(model=row.model).update(idle_shrink_after_s=60)
    readings.part(row)

    def promised() -> int | None:
        return Instance.objects.values_list("awake_limit_bytes", flat=True).get(pk=row.pk)

    rebalance_all()
    assert _wish(row) == whole(GIB) + BUNDLE
    assert promised() == 6 * GIB
    readings.part(row, waiting=1)
    rebalance_all()
    assert promised() is None
    readings.part(row, waiting=0)
    GpuPolicy.objects.filter(gpu=gpu).update(rebalance=GpuPolicy.Rebalance.OFF)
    Instance.objects.filter(pk=row.pk).update(awake_limit_bytes=6 * GIB)
    rebalance_all()
    assert promised() is None


def test_most_careful_mode_of_cards_that_share_an_instance_counts(gpu: Gpu, readings: Readings) -> None:
    second = make_gpu(index=1)
    GpuPolicy.objects.filter(gpu=second).update(rebalance="off")
    wide = make_instance(
        model=make_model(tensor_parallel_size=2), gpus=[gpu, second], effective_limit_bytes=whole(70 * GIB)
    )
    readings.part(wide)
    neighbour = _ready(gpu, 70 * GIB, readings)
    rebalance_all()
    assert _wish(neighbour) is None


def test_cards_without_a_common_instance_are_divided_apart(gpu: Gpu, readings: Readings) -> None:
    second = make_gpu(index=1)
    _ready(gpu, 30 * GIB, readings)
    _ready(second, 30 * GIB, readings)
    assert len(rebalance_all()) == 2


def test_plan_is_written_only_when_it_says_something_new(gpu: Gpu, readings: Readings) -> None:
    GpuPolicy.objects.update(rebalance="dry_run")
    row = _ready(gpu, 70 * GIB, readings)
    _ready(gpu, 70 * GIB, readings)
    rebalance_all()
    at = _policy(gpu).planned_at
    readings.part(row, used=BUNDLE // 2)
    rebalance_all()
    assert _policy(gpu).planned_at == at
    MemoryPolicy.objects.filter(model=row.model).update(guarantee_bytes=60 * GIB)
    rebalance_all()
    assert _policy(gpu).planned_at != at


def test_impossible_guarantees_are_told_with_the_numbers(gpu: Gpu, readings: Readings) -> None:
    rows = [_ready(gpu, 35 * GIB, readings) for _ in range(2)]
    MemoryPolicy.objects.update(guarantee_bytes=50 * GIB)
    (plan,) = rebalance_all()
    assert not plan.feasible
    assert "too little" in _policy(gpu).plan["sentence"]
    assert all(_wish(row) is None for row in rows)


def test_constant_load_comes_to_rest(gpu: Gpu, readings: Readings) -> None:
    idle = _ready(gpu, 70 * GIB, readings)
    busy = _ready(gpu, 70 * GIB, readings, used=whole(20 * GIB), running=9)
    for _ in range(3):
        rebalance_all()
        _answer(readings, idle, busy)
    revisions = list(Instance.objects.values_list("limit_revision", flat=True))
    Instance.objects.update(limit_set_at=timezone.now() - timedelta(minutes=5))
    for _ in range(3):
        rebalance_all()
        _answer(readings, idle, busy)
    assert list(Instance.objects.values_list("limit_revision", flat=True)) == revisions


def test_only_one_of_two_workers_looks(gpu: Gpu, readings: Readings, valkey: str) -> None:
    _ready(gpu, 30 * GIB, readings)
    assert len(rebalance_all()) == 1
    assert rebalance_all() == []
