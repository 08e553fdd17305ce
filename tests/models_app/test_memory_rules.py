"""Rules that no card could keep are refused when they are entered, at their field, with the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from gpus_app.models import Gpu, GpuPolicy
from models_app.errors import InvalidInput
from models_app.models import MemoryPolicy, Model
from models_app.services.memory.cards import cards
from models_app.services.memory.memory_rules import claims_on, gpu_policy_change, memory_policy_check
from models_app.services.models import model_create, model_update
from models_app.states import InstanceState
from tests.builders import GIB, SMALL_FACTS, make_gpu, make_instance, make_model
from tests.models_app.readings import BUNDLE, Readings

S = InstanceState
pytestmark = pytest.mark.django_db
GOOD: dict[str, Any] = {"served_model_name": "a", "source": "catalogue", "model": "Qwen/Qwen3-0.6B"}


@pytest.fixture
def gpu() -> Gpu:
    return make_gpu()


def test_guarantee_below_the_floor_is_refused_with_both(gpu: Gpu) -> None:
    with pytest.raises(InvalidInput, match=r"guarantee_bytes.*0\.5 GiB") as caught:
        model_create(actor="anna", guarantee_bytes="512M", **GOOD)
    assert "safety floor" in caught.value.message
    assert not Model.objects.exists()


def test_maximum_below_the_floor_is_refused_at_the_maximum() -> None:
    model = make_model(facts=SMALL_FACTS | {"safety_floor_bytes": GIB})
    wrong = memory_policy_check(model, guarantee_bytes=0, maximum_bytes=GIB - 1)
    assert list(wrong) == ["maximum_bytes"]
    assert memory_policy_check(model, guarantee_bytes=0, maximum_bytes=GIB) == {}


def test_guarantee_that_no_card_has_beside_the_weights_is_refused(gpu: Gpu) -> None:
    with pytest.raises(InvalidInput, match=r"guarantee_bytes.*80\.0 GiB"):
        model_create(actor="anna", guarantee_bytes="79G", **GOOD)


def test_reserve_of_the_card_counts_against_a_guarantee(gpu: Gpu) -> None:
    model_create(actor="anna", guarantee_bytes="40G", **GOOD)
    GpuPolicy.objects.update(reserve_bytes=50 * GIB)
    with pytest.raises(InvalidInput, match="guarantee_bytes"):
        model_create(actor="anna", guarantee_bytes="40G", **(GOOD | {"served_model_name": "b"}))


def test_without_cards_nothing_is_known_to_be_impossible() -> None:
    model_create(actor="anna", guarantee_bytes="500G", **GOOD)


def test_guarantees_of_neighbours_count_where_the_model_runs(gpu: Gpu, readings: Readings) -> None:
    rows = [make_instance(gpus=[gpu]) for _ in range(2)]
    for row in rows:
        readings.part(row, baseline=5 * GIB)
    MemoryPolicy.objects.filter(model=rows[0].model).update(guarantee_bytes=40 * GIB)
    with pytest.raises(InvalidInput) as caught:
        model_update(rows[1].model, actor="anna", guarantee_bytes=27 * GIB)
    assert "guarantee_bytes" in caught.value.message
    assert "1.0 GiB more than the card's 80.0 GiB" in caught.value.message
    model_update(rows[1].model, actor="anna", guarantee_bytes=26 * GIB)
    assert MemoryPolicy.objects.get(model=rows[1].model).guarantee_bytes == 26 * GIB


def test_other_changes_are_not_held_up_by_what_was_impossible_before(gpu: Gpu, readings: Readings) -> None:
    row = make_instance(gpus=[gpu])
    MemoryPolicy.objects.update(guarantee_bytes=200 * GIB)
    model_update(row.model, actor="anna", priority=80)
    model_update(row.model, actor="anna", guarantee_bytes=0)


def test_reserve_that_leaves_too_little_is_refused_at_its_field(gpu: Gpu, readings: Readings) -> None:
    row = make_instance(gpus=[gpu])
    readings.part(row, baseline=5 * GIB)
    MemoryPolicy.objects.update(guarantee_bytes=40 * GIB)
    with pytest.raises(InvalidInput, match=r"reserve_bytes.*1\.0 GiB more"):
        gpu_policy_change(gpu, actor="anna", reserve_bytes=36 * GIB)
    assert gpu_policy_change(gpu, actor="anna", reserve_bytes=35 * GIB).reserve_bytes == 35 * GIB


def test_mode_is_changed_whatever_is_owed(gpu: Gpu, readings: Readings) -> None:
    make_instance(gpus=[gpu])
    MemoryPolicy.objects.update(guarantee_bytes=200 * GIB)
    assert gpu_policy_change(gpu, actor="anna", rebalance="off").rebalance == "off"


def test_starting_instance_claims_its_reservation_once(gpu: Gpu, readings: Readings) -> None:
    row = make_instance(gpus=[gpu], state=S.SCHEDULED, reserved_bytes=20 * GIB, safety_floor_bytes=GIB)
    MemoryPolicy.objects.filter(model=row.model).update(guarantee_bytes=10 * GIB)
    (claim,) = claims_on(cards()[gpu.uuid])
    assert claim.owed_bytes == 20 * GIB


def test_sleeper_claims_what_it_comes_back_to(gpu: Gpu, readings: Readings) -> None:
    row = make_instance(gpus=[gpu], state=S.SLEEPING, reserved_bytes=20 * GIB, safety_floor_bytes=9 * BUNDLE)
    readings.part(row, baseline=GIB, limit=None)
    (claim,) = claims_on(cards()[gpu.uuid])
    assert claim.owed_bytes == 20 * GIB
