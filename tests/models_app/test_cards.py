"""The cards as the policies see them, from rows and readings."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from gpus_app.models import Gpu
from models_app.models import Instance, MemoryPolicy
from models_app.services.memory.cards import Card, cards
from models_app.services.memory.placement import WAIVED
from models_app.states import InstanceState, Stage
from tests.builders import GIB, make_attempt, make_gpu, make_instance, make_model
from tests.models_app.readings import BUNDLE, Readings, whole

S = InstanceState
pytestmark = pytest.mark.django_db


@pytest.fixture
def gpu() -> Gpu:
    return make_gpu()


def _ready(gpu: Gpu, limit: int = 40 * GIB, **fields: Any) -> Instance:
    return make_instance(gpus=[gpu], effective_limit_bytes=whole(limit), **fields)


def _view(row: Instance) -> Any:
    (card,) = cards(row.gpu_uuids[:1]).values()
    return next(one for one in card.rows if one.id == row.pk)


def _card(gpu: Gpu) -> Card:
    return cards([gpu.uuid])[gpu.uuid]


def test_ready_instance_is_seen_with_its_figures_and_rules(gpu: Gpu, readings: Readings) -> None:
    row = _ready(gpu)
    MemoryPolicy.objects.filter(model=row.model).update(guarantee_bytes=3 * GIB, priority=70)
    readings.part(row, used=5 * GIB, prealloc=GIB, running=4, waiting=1)
    view = _view(row)
    assert view.elastic
    assert (view.used_bytes, view.prealloc_bytes, view.baseline_bytes) == (5 * GIB, GIB, 2 * GIB)
    assert (view.limit_bytes, view.running, view.waiting) == (whole(40 * GIB), 4, 1)
    assert (view.guarantee_bytes, view.priority, view.idle_since) == (3 * GIB, 70, None)


def test_tensor_parallel_instance_is_on_both_cards_with_each_cards_figures(gpu: Gpu, readings: Readings) -> None:
    other = make_gpu(index=1)
    row = make_instance(model=make_model(tensor_parallel_size=2), gpus=[gpu, other])
    readings.part(row, [gpu.uuid], baseline=3 * GIB)
    readings.part(row, [other.uuid], baseline=4 * GIB)
    found = cards()
    assert [found[uuid].rows[0].baseline_bytes for uuid in (gpu.uuid, other.uuid)] == [3 * GIB, 4 * GIB]
    assert found[gpu.uuid].rows[0].tensor_parallel_size == 2


@pytest.mark.parametrize("blind", ["old", "error"])
def test_card_without_a_usable_reading_is_not_fresh_and_nothing_on_it_can_be_moved(
    gpu: Gpu, readings: Readings, blind: str
) -> None:
    row = _ready(gpu)
    readings.part(row)
    if blind == "old":
        readings.age_s = 11.0
    else:
        readings.error[gpu.uuid] = "GPU is lost"
    card = _card(gpu)
    assert (card.fresh, card.view.free_bytes, card.rows[0].elastic) == (False, None, False)


def test_memory_of_others_is_named(gpu: Gpu, readings: Readings) -> None:
    readings.other[gpu.uuid] = 30 * GIB
    readings.processes[gpu.uuid] = [{"pid": 7, "name": "ollama", "bytes": 30 * GIB}]
    view = _card(gpu).view
    assert (view.foreign_bytes, view.free_bytes, view.foreign_names) == (30 * GIB, 50 * GIB, ("ollama (pid 7)",))


def test_memory_of_an_engine_that_is_over_counts_as_nobodys(gpu: Gpu, readings: Readings) -> None:
    row = _ready(gpu)
    readings.leftover[gpu.uuid] = [
        {"id": row.pk, "ipc": "sz-earlier", "resident": 9 * GIB, "state": "stale"},
        {"id": 999_999, "ipc": "sz-gone", "resident": GIB, "state": "stale"},
    ]
    readings.part(row, used=GIB)
    card = _card(gpu)
    assert card.view.foreign_bytes == 10 * GIB
    assert card.rows[0].used_bytes == GIB


def test_engine_that_does_not_tell_its_requests_is_not_idle(gpu: Gpu, readings: Readings) -> None:
    row = _ready(gpu)
    readings.part(row, used=20 * GIB, running=None, waiting=None)
    view = _view(row)
    assert not view.idle
    assert (view.evictable_bytes, view.idle_since) == (0, None)


def test_use_of_an_idle_engine_is_its_cache_but_for_one_bundle(gpu: Gpu, readings: Readings) -> None:
    row = _ready(gpu)
    readings.part(row, used=20 * GIB)
    assert _view(row).evictable_bytes == 20 * GIB - BUNDLE


def test_kvcached_keeps_a_part_of_the_card_only_where_it_is_used(gpu: Gpu, readings: Readings) -> None:
    make_instance(model=make_model(kvcached=False), gpus=[gpu])
    assert _card(gpu).view.kv_headroom_bytes == 0
    _ready(gpu)
    assert _card(gpu).view.kv_headroom_bytes == 80 * GIB // 20


def test_instance_without_kvcached_is_fixed(gpu: Gpu, readings: Readings) -> None:
    row = make_instance(model=make_model(kvcached=False), gpus=[gpu], reserved_bytes=60 * GIB, provider="none")
    readings.part(row, baseline=70 * GIB, limit=None)
    assert (_view(row).elastic, _view(row).held_bytes) == (False, 70 * GIB)


def test_starting_instance_holds_its_reservation(gpu: Gpu, readings: Readings) -> None:
    row = make_instance(gpus=[gpu], state=S.SCHEDULED, reserved_bytes=30 * GIB)
    assert (_view(row).elastic, _view(row).held_bytes) == (False, 30 * GIB)


def test_first_limit_of_a_starting_instance_is_not_handed_to_anybody_else(gpu: Gpu, readings: Readings) -> None:
    row = make_instance(gpus=[gpu], state=S.SCHEDULED, reserved_bytes=6 * GIB, limit_bytes=20 * GIB)
    assert _view(row).held_bytes > 20 * GIB


def test_segment_of_a_starting_engine_that_holds_the_whole_capacity_says_nothing(gpu: Gpu, readings: Readings) -> None:
    row = make_instance(gpus=[gpu], state=S.STARTING, reserved_bytes=6 * GIB, limit_bytes=GIB)
    readings.part(row, limit=70 * GIB, baseline=GIB)
    assert _view(row).held_bytes < 10 * GIB


def test_waking_instance_comes_back_to_its_limit(gpu: Gpu, readings: Readings) -> None:
    row = make_instance(gpus=[gpu], state=S.STARTING, stage=Stage.WAKING, reserved_bytes=4 * GIB, limit_bytes=20 * GIB)
    row.attempts.update(memory={"baseline_bytes": 3 * GIB})
    assert _view(row).held_bytes == 23 * GIB


@pytest.mark.parametrize("state", [S.DRAINING, S.UNREACHABLE])
def test_limit_that_cannot_be_moved_now_counts_whole(gpu: Gpu, readings: Readings, state: InstanceState) -> None:
    row = make_instance(gpus=[gpu], state=state, effective_limit_bytes=30 * GIB, provider="addon")
    readings.part(row, used=GIB, running=1)
    assert (_view(row).elastic, _view(row).held_bytes) == (False, 32 * GIB)


def test_sleeper_holds_what_it_comes_back_to(gpu: Gpu, readings: Readings) -> None:
    row = make_instance(gpus=[gpu], state=S.SLEEPING, reserved_bytes=20 * GIB)
    readings.part(row, baseline=GIB, limit=None)
    assert (_view(row).asleep, _view(row).held_bytes) == (True, 20 * GIB)


def test_sleeper_that_made_room_holds_only_what_it_has_until_it_wakes(gpu: Gpu, readings: Readings) -> None:
    row = make_instance(gpus=[gpu], state=S.SLEEPING, reserved_bytes=20 * GIB, state_version=5)
    row.attempts.update(memory={WAIVED: 5})
    readings.part(row, baseline=GIB, limit=None)
    assert _view(row).held_bytes == GIB
    Instance.objects.filter(pk=row.pk).update(state_version=6)
    assert _view(row).held_bytes == 20 * GIB


def test_raise_counts_before_the_reading_shows_it(gpu: Gpu, readings: Readings) -> None:
    row = _ready(gpu, 30 * GIB)
    readings.part(row, limit=whole(10 * GIB))
    assert _view(row).limit_bytes == whole(30 * GIB)


def test_limit_set_by_hand_is_held_in_whole_bundles(gpu: Gpu, readings: Readings) -> None:
    row = _ready(gpu, 10 * GIB, limit_automatic=False, limit_bytes=10 * GIB)
    readings.part(row)
    (held,) = _card(gpu).for_rebalance()
    assert held.lowest_bytes == held.highest_bytes == whole(10 * GIB)


def test_limit_forced_below_the_floor_is_held_too(gpu: Gpu, readings: Readings) -> None:
    row = _ready(gpu, 3 * BUNDLE, limit_automatic=False, limit_bytes=3 * BUNDLE)
    readings.part(row)
    (held,) = _card(gpu).for_rebalance()
    assert held.lowest_bytes == held.highest_bytes == 3 * BUNDLE


def test_idle_time_begins_when_it_became_ready(gpu: Gpu, readings: Readings) -> None:
    ready = timezone.now() - timedelta(seconds=100)
    row = _ready(gpu, ready_at=ready)
    readings.part(row)
    assert _view(row).idle_since == ready.timestamp()


def test_last_work_is_remembered(gpu: Gpu, readings: Readings, valkey: str) -> None:
    row = _ready(gpu, ready_at=timezone.now() - timedelta(seconds=100))
    readings.part(row, running=1)
    before = time.time()
    assert _view(row).idle_since is None
    readings.part(row, running=0)
    assert before <= _view(row).idle_since <= time.time()


def test_request_between_two_looks_is_work_too(gpu: Gpu, readings: Readings, valkey: str) -> None:
    row = _ready(gpu, ready_at=timezone.now() - timedelta(seconds=100))
    readings.part(row, gen_tokens=10)
    assert _view(row).idle_since < time.time() - 50
    readings.part(row, gen_tokens=17)
    before = time.time()
    assert _view(row).idle_since >= before
    assert _view(row).idle_since >= before, "and it is remembered"


def test_any_number_of_cards_and_instances_costs_as_many_queries_as_one(
    gpu: Gpu, readings: Readings, django_assert_max_num_queries: Any
) -> None:
    for index in range(1, 4):
        one = make_gpu(index=index)
        for _ in range(3):
            row = make_instance(gpus=[one])
            make_attempt(instance=row, number=2)
            readings.part(row)
    with django_assert_max_num_queries(4):  # two of them by the fake readings
        cards()
