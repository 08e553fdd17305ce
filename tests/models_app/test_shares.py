"""The limit with which an instance starts beside others."""

from __future__ import annotations

import pytest

from gpus_app.models import Gpu, GpuPolicy
from gpus_app.policies.fit import Need
from models_app.models import Instance
from models_app.services.lifecycle.launch import instance_place
from models_app.services.memory import placement
from models_app.services.memory.shares import UNKNOWN_NEED_BYTES, first_share, wake_share, wake_share_write
from models_app.states import InstanceState
from tests.builders import GIB, make_gpu, make_instance, make_model
from tests.models_app.readings import Readings, whole

S = InstanceState
pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("sent")]
NEED = Need(total_bytes=6 * GIB, baseline_bytes=5 * GIB, kv_bytes=GIB, measured=True, lines=())
KEPT = 80 * GIB // 20


@pytest.fixture
def gpu() -> Gpu:
    return make_gpu()


def _pending(gpu: Gpu) -> Instance:
    return make_instance(gpus=[gpu], state=S.PENDING)


def _neighbour(gpu: Gpu, limit: int, readings: Readings) -> Instance:
    row = make_instance(gpus=[gpu], effective_limit_bytes=whole(limit))
    readings.part(row, used=0)
    return row


def test_alone_there_is_no_first_limit(gpu: Gpu, readings: Readings) -> None:
    assert first_share(_pending(gpu), [gpu.uuid], NEED) is None


def test_beside_others_it_is_what_nobody_holds(gpu: Gpu, readings: Readings) -> None:
    _neighbour(gpu, 30 * GIB, readings)
    share = first_share(_pending(gpu), [gpu.uuid], NEED)
    assert share == 80 * GIB - KEPT - whole(30 * GIB) - 2 * GIB - 5 * GIB


def test_beside_one_who_may_take_the_card_it_is_the_need(gpu: Gpu, readings: Readings) -> None:
    _neighbour(gpu, 75 * GIB, readings)
    assert first_share(_pending(gpu), [gpu.uuid], NEED) == GIB


def test_memory_of_others_and_the_reserve_are_left_out(gpu: Gpu, readings: Readings) -> None:
    GpuPolicy.objects.update(reserve_bytes=10 * GIB)
    readings.other[gpu.uuid] = 20 * GIB
    _neighbour(gpu, 30 * GIB, readings)
    share = first_share(_pending(gpu), [gpu.uuid], NEED)
    assert share == 80 * GIB - 10 * GIB - 20 * GIB - whole(30 * GIB) - 2 * GIB - 5 * GIB


def test_of_several_cards_the_tightest_counts(gpu: Gpu, readings: Readings) -> None:
    second = make_gpu(index=1)
    _neighbour(gpu, 10 * GIB, readings)
    _neighbour(second, 40 * GIB, readings)
    row = make_instance(model=make_model(tensor_parallel_size=2), gpus=[gpu, second], state=S.PENDING)
    share = first_share(row, [gpu.uuid, second.uuid], NEED)
    assert share == 80 * GIB - KEPT - whole(40 * GIB) - 2 * GIB - 5 * GIB


def test_beside_one_who_starts_at_the_same_time_it_is_the_need(gpu: Gpu, readings: Readings) -> None:
    make_instance(gpus=[gpu], state=S.SCHEDULED)
    assert first_share(_pending(gpu), [gpu.uuid], NEED) == GIB


def test_beside_a_sleeper_its_return_is_left_out(gpu: Gpu, readings: Readings) -> None:
    make_instance(gpus=[gpu], state=S.SLEEPING, reserved_bytes=20 * GIB)
    assert first_share(_pending(gpu), [gpu.uuid], NEED) == 80 * GIB - KEPT - 20 * GIB - 5 * GIB


@pytest.mark.parametrize("mode", ["off", "dry_run"])
def test_where_nobody_divides_there_is_none(gpu: Gpu, readings: Readings, mode: str) -> None:
    GpuPolicy.objects.update(rebalance=mode)
    _neighbour(gpu, 30 * GIB, readings)
    assert first_share(_pending(gpu), [gpu.uuid], NEED) is None


def test_neighbour_with_fixed_memory_needs_none(gpu: Gpu, readings: Readings) -> None:
    make_instance(model=make_model(kvcached=False), gpus=[gpu])
    assert first_share(_pending(gpu), [gpu.uuid], NEED) is None


def test_without_kvcached_there_is_no_limit_at_all(gpu: Gpu, readings: Readings) -> None:
    _neighbour(gpu, 30 * GIB, readings)
    row = make_instance(model=make_model(kvcached=False), gpus=[gpu], state=S.PENDING)
    assert first_share(row, [gpu.uuid], NEED) is None


def test_two_who_are_placed_together_do_not_both_get_the_card(gpu: Gpu, readings: Readings) -> None:
    _neighbour(gpu, 20 * GIB, readings)
    rows = [_pending(gpu) for _ in range(2)]
    for row in rows:
        assert instance_place(row.pk)
        row.refresh_from_db()
    limits = [row.limit_bytes or 0 for row in rows]
    assert all(limits)
    assert sum(limits) + whole(20 * GIB) < 80 * GIB


def test_placed_instance_carries_its_first_limit_with_a_revision(gpu: Gpu, readings: Readings) -> None:
    _neighbour(gpu, 30 * GIB, readings)
    row = _pending(gpu)
    instance_place(row.pk)
    row.refresh_from_db()
    assert (row.limit_revision, row.limit_set_by, row.limit_automatic) == (1, "controller", True)
    assert row.limit_bytes


def test_limit_wished_for_by_hand_is_not_replaced(gpu: Gpu, readings: Readings) -> None:
    _neighbour(gpu, 30 * GIB, readings)
    row = make_instance(gpus=[gpu], state=S.PENDING, limit_bytes=3 * GIB, limit_automatic=False)
    instance_place(row.pk)
    row.refresh_from_db()
    assert row.limit_bytes == 3 * GIB


def test_unknown_floor_is_no_reason_to_start_without_a_limit(gpu: Gpu, readings: Readings) -> None:
    _neighbour(gpu, 75 * GIB, readings)
    need = Need(total_bytes=5 * GIB, baseline_bytes=5 * GIB, kv_bytes=0, measured=False, lines=())
    assert first_share(_pending(gpu), [gpu.uuid], need) == UNKNOWN_NEED_BYTES


def _sleeper(gpu: Gpu, **fields: object) -> Instance:
    """As one that was ready with a limit of 40 GiB fell asleep."""
    known = {"capacity_bytes": whole(60 * GIB), "safety_floor_bytes": whole(GIB), "provider": "addon"}
    return make_instance(
        gpus=[gpu], state=S.SLEEPING, limit_bytes=whole(40 * GIB), limit_revision=3, **(known | fields)
    )


def test_sleeper_that_wakes_gets_what_nobody_holds_by_then(gpu: Gpu, readings: Readings) -> None:
    row = _sleeper(gpu)
    _neighbour(gpu, 60 * GIB, readings)
    assert wake_share_write(row)
    row.refresh_from_db()
    need = placement.need_on(row.model, gpu_name=gpu.name, gpu_total_bytes=gpu.total_bytes)
    assert row.limit_bytes == 80 * GIB - KEPT - whole(60 * GIB) - 2 * GIB - need.baseline_bytes
    assert (row.limit_revision, row.limit_set_by, row.limit_automatic) == (4, "controller", True)
    assert "divided since it fell asleep" in row.events.latest("pk").reason


def test_sleeper_that_wakes_into_a_full_card_gets_what_it_needs(gpu: Gpu, readings: Readings) -> None:
    row = _sleeper(gpu)
    _neighbour(gpu, 75 * GIB, readings)
    assert wake_share_write(row)
    row.refresh_from_db()
    assert row.limit_bytes == whole(GIB)


def test_sleeper_alone_keeps_its_limit(gpu: Gpu, readings: Readings) -> None:
    assert not wake_share_write(_sleeper(gpu))


def test_limit_set_by_hand_is_what_a_sleeper_wakes_with(gpu: Gpu, readings: Readings) -> None:
    _neighbour(gpu, 60 * GIB, readings)
    assert wake_share(_sleeper(gpu, limit_automatic=False)) is None
