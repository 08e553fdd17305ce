"""What the placer is told: ledger and live readings, the worse of the two; and what comes of it."""

from __future__ import annotations

import time
from typing import Any

import orjson
import pytest
from redis import Redis

from gpus_app.broker import LATEST_EXPIRES_S, host_latest_key
from gpus_app.models import Gpu, GpuPolicy, Host
from gpus_app.policies.make_room import make_room
from gpus_app.policies.placement import available_bytes
from models_app.models import MemoryProfile, Model
from models_app.services.memory.cards import cards
from models_app.services.memory.placement import Wish, gpu_states, need_on, place, profile_key, refusal
from models_app.states import InstanceState
from tests.builders import GIB, make_gpu, make_host, make_instance, make_model, make_record

S = InstanceState
pytestmark = pytest.mark.django_db

NEWCOMER = Model(served_model_name="newcomer")
#: What kvcached leaves free of a card of 80 GiB.
HEADROOM = 4 * GIB


@pytest.fixture
def host() -> Host:
    host = make_host()
    make_gpu(host=host, index=0)
    make_gpu(host=host, index=1)
    return host


def _tell(url: str, record: dict[str, Any]) -> None:
    """Leave a record as the sampler does."""
    with Redis.from_url(url) as client:
        client.set(host_latest_key(record["host"]), orjson.dumps(record), ex=LATEST_EXPIRES_S)


def _uuids(host: Host) -> list[str]:
    return [gpu.uuid for gpu in host.gpus.all()]


def test_scheduled_instance_holds_its_reservation(host: Host) -> None:
    make_instance(state=S.SCHEDULED, reserved_bytes=30 * GIB)
    first, second = gpu_states(NEWCOMER)
    assert first.ledger_free_bytes == 50 * GIB - HEADROOM
    assert second.ledger_free_bytes == 80 * GIB - HEADROOM


@pytest.mark.parametrize("state", [S.PENDING, S.STOPPED, S.FAILED])
def test_instance_without_a_place_holds_nothing(host: Host, state: InstanceState) -> None:
    make_instance(state=state, reserved_bytes=30 * GIB)
    assert gpu_states(NEWCOMER)[0].ledger_free_bytes == 80 * GIB - HEADROOM


def test_running_instance_holds_what_it_really_has_when_that_is_more(host: Host, valkey: str) -> None:
    row = make_instance(reserved_bytes=4 * GIB)
    record = make_record(host, used={_uuids(host)[0]: 60 * GIB}, instances=[row])
    record["gpus"][0]["instances"][0]["resident"] = 60 * GIB
    record["gpus"][0]["other"] = 0
    _tell(valkey, record)
    state = gpu_states(NEWCOMER)[0]
    assert state.ledger_free_bytes == 20 * GIB - HEADROOM
    assert state.free_measured_bytes == 20 * GIB


def test_measured_instance_is_owed_its_floor_of_now(host: Host) -> None:
    """Of a busy hour it was larger: what a plan has lowered it to since is what the book keeps for it."""
    row = make_instance(reserved_bytes=30 * GIB, safety_floor_bytes=GIB)
    assert row.attempt is not None
    row.attempt.memory = {"baseline_bytes": 4 * GIB}
    row.attempt.save()
    assert gpu_states(NEWCOMER)[0].ledger_free_bytes == 75 * GIB - HEADROOM
    row.model.memory_policy.guarantee_bytes = 3 * GIB
    row.model.memory_policy.save()
    assert gpu_states(NEWCOMER)[0].ledger_free_bytes == 73 * GIB - HEADROOM


def test_foreign_memory_counts_and_is_named(host: Host, valkey: str) -> None:
    record = make_record(host, used={_uuids(host)[0]: 70 * GIB, _uuids(host)[1]: 70 * GIB})
    for gpu in record["gpus"]:
        gpu["other_processes"] = [{"pid": 4711, "name": "ollama", "bytes": 70 * GIB}]
    _tell(valkey, record)
    facts = {"weights_bytes": 15 * GIB}
    found = place(make_model(facts=facts), Wish())
    assert not found.decision.gpus
    assert "ollama (pid 4711)" in refusal(found)


def test_old_reading_is_not_believed(host: Host, valkey: str) -> None:
    record = make_record(host, used={_uuids(host)[0]: 70 * GIB})
    record["t"] = time.time() - 60
    _tell(valkey, record)
    assert gpu_states(NEWCOMER)[0].free_measured_bytes is None


def test_reserve_is_not_handed_out(host: Host) -> None:
    GpuPolicy.objects.filter(gpu__host=host).update(reserve_bytes=10 * GIB)
    assert gpu_states(NEWCOMER)[0].ledger_free_bytes == 70 * GIB


def test_headroom_of_kvcached_is_kept_only_where_it_is_used(host: Host) -> None:
    fixed = Model(served_model_name="fixed", kvcached=False)
    make_instance(state=S.SCHEDULED, reserved_bytes=0, gpus=[Gpu.objects.get(uuid=_uuids(host)[1])])
    assert [state.kept_bytes for state in gpu_states(fixed)] == [0, HEADROOM]
    assert [state.kept_bytes for state in gpu_states(NEWCOMER)] == [HEADROOM, HEADROOM]


def test_reserve_and_headroom_are_the_same_bytes(host: Host) -> None:
    GpuPolicy.objects.filter(gpu__host=host).update(reserve_bytes=3 * GIB)
    assert gpu_states(NEWCOMER)[0].ledger_free_bytes == 80 * GIB - HEADROOM
    GpuPolicy.objects.filter(gpu__host=host).update(reserve_bytes=9 * GIB)
    assert gpu_states(NEWCOMER)[0].ledger_free_bytes == 71 * GIB


def test_placement_and_plan_draw_the_same_line(host: Host, valkey: str) -> None:
    """To the byte: what placement takes, make_room has nothing to do for; one byte more, and both see it."""
    row = make_instance(reserved_bytes=40 * GIB, state=S.SCHEDULED)
    record = make_record(host, used={_uuids(host)[0]: 0})
    _tell(valkey, record)
    model = make_model()
    uuid = _uuids(host)[0]
    state = next(one for one in gpu_states(model) if one.uuid == uuid)
    card = cards([uuid], newcomer=model)[uuid]
    most = available_bytes(state)
    assert most == 80 * GIB - row.reserved_bytes - HEADROOM
    assert make_room(card.view, card.rows, most, time.time()).steps == ()
    assert not make_room(card.view, card.rows, most + 1, time.time()).feasible


def test_second_launch_goes_to_the_other_of_two_equal_cards(host: Host) -> None:
    first = place(make_model(), Wish()).decision.gpus[0]
    make_instance(state=S.SCHEDULED, gpus=[Gpu.objects.get(uuid=first.uuid)])
    assert place(make_model(), Wish()).decision.gpus[0].uuid != first.uuid


def test_gaps_in_gpu_numbers_are_no_trouble() -> None:
    host = make_host()
    make_gpu(host=host, index=0, cordoned=True)
    made = [make_gpu(host=host, index=index) for index in (2, 3)]
    found = place(make_model(tensor_parallel_size=2), Wish())
    assert [gpu.uuid for gpu in found.decision.gpus] == [gpu.uuid for gpu in made]


def test_need_that_no_card_has_free_is_refused_with_numbers(host: Host) -> None:
    make_instance(state=S.SCHEDULED, reserved_bytes=70 * GIB)
    make_instance(state=S.SCHEDULED, gpus=[host.gpus.get(index=1)], reserved_bytes=70 * GIB)
    found = place(make_model(facts={"weights_bytes": 20 * GIB}), Wish())
    assert not found.decision.gpus
    assert "GiB" in refusal(found)
    assert found.facts["largest_bytes"] == 10 * GIB - HEADROOM
    assert {row["code"] for row in found.facts["gpus"]} == {"short"}


def test_anyway_takes_the_roomiest_card_all_the_same(host: Host) -> None:
    make_instance(state=S.SCHEDULED, reserved_bytes=79 * GIB)
    make_instance(state=S.SCHEDULED, gpus=[host.gpus.get(index=1)], reserved_bytes=78 * GIB)
    found = place(make_model(facts={"weights_bytes": 20 * GIB}), Wish(anyway=True))
    assert [gpu.index for gpu in found.decision.gpus] == [1]


def test_choice_by_hand_wins(host: Host) -> None:
    make_instance(state=S.SCHEDULED, gpus=[host.gpus.get(index=1)])
    found = place(make_model(), Wish(gpu_uuids=(_uuids(host)[1],)))
    assert found.decision.gpus[0].index == 1


def test_model_says_where_unless_the_launch_does(host: Host) -> None:
    model = make_model(gpu_uuids=_uuids(host)[:1])
    assert Wish.of(model).gpu_uuids == (_uuids(host)[0],)
    assert Wish.of(model, {"gpu_uuids": [_uuids(host)[1]]}).gpu_uuids == (_uuids(host)[1],)


def test_replicas_spread(host: Host) -> None:
    model = make_model()
    make_instance(model=model)
    assert place(model, Wish()).decision.gpus[0].index == 1


def test_host_that_cannot_run_it_is_out_with_the_reason(host: Host) -> None:
    found = place(make_model(), Wish(), unusable={host.name: "kvcached 0.1.5 is too old."})
    assert "kvcached 0.1.5 is too old." in refusal(found)


def test_silent_host_is_out(host: Host) -> None:
    Host.objects.update(worker_seen_at=None, sampler_seen_at=None)
    assert not place(make_model(), Wish()).decision.gpus


def test_no_gpu_at_all_says_what_to_do() -> None:
    assert "start a host worker" in refusal(place(make_model(), Wish()))


def test_measured_footprint_replaces_the_estimate(host: Host) -> None:
    model = make_model()
    gpu = host.gpus.all()[0]
    estimate = need_on(model, gpu_name=gpu.name, gpu_total_bytes=gpu.total_bytes)
    MemoryProfile.objects.create(
        key=profile_key(model, gpu.name), model=model.model, gpu_name=gpu.name, baseline_bytes=9 * GIB
    )
    measured = need_on(model, gpu_name=gpu.name, gpu_total_bytes=gpu.total_bytes)
    assert not estimate.measured
    assert measured.measured
    assert measured.baseline_bytes == 9 * GIB


@pytest.mark.parametrize(("extra_args", "share"), [("", 0.9), ("--max-num-seqs 8 --gpu_memory_utilization=0.2", 0.2)])
def test_share_of_an_engine_without_kvcached_is_what_its_arguments_say(
    host: Host, extra_args: str, share: float
) -> None:
    model = make_model(kvcached=False, extra_args=extra_args)
    assert place(model, Wish.of(model)).need.total_bytes == int(host.gpus.get(index=0).total_bytes * share)


def test_other_options_are_another_footprint() -> None:
    model = make_model()
    before = profile_key(model, "H100")
    model.enforce_eager = True
    assert profile_key(model, "H100") != before


def test_states_cost_the_same_queries_for_many_cards(valkey: str, django_assert_max_num_queries: Any) -> None:
    for number in range(4):
        host = make_host(name=f"host-{number}")
        gpus = [make_gpu(host=host, index=index) for index in range(4)]
        for gpu in gpus:
            make_instance(host=host, gpus=[gpu])
    with django_assert_max_num_queries(8):
        assert len(gpu_states(NEWCOMER)) == 16
