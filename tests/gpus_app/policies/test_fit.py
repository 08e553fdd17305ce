"""What a launch needs, and whether it fits now, after making room, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from gpus_app.policies.base import GIB, MIB, GpuView, Harm, InstanceView, StepKind
from gpus_app.policies.fit import Judgement, LaunchFacts, Need, NeedLine, Profile, Verdict, judge, need
from gpus_app.policies.placement import GpuState, Request
from tests.gpus_app.policies.worlds import NOW, instance

H200 = 150_109_880_320


def facts(**values: Any) -> LaunchFacts:
    """Qwen3-0.6B, as its config says."""
    defaults: dict[str, Any] = {
        "weights_bytes": 1_192_099_840,
        "bundle_bytes": 112 * MIB,
        "floor_bytes": 9 * 112 * MIB,
        "hidden_size": 1024,
        "vocab_size": 151_936,
        "num_layers": 28,
        "enforce_eager": True,
    }
    return LaunchFacts(**(defaults | values))


def flat(total: float) -> Need:
    size = int(total * GIB)
    line = NeedLine(label="all", bytes=size, why="test")
    return Need(total_bytes=size, baseline_bytes=size, kv_bytes=0, measured=False, lines=(line,))


def state(index: int = 0, *, free: float, **values: Any) -> GpuState:
    size = int(free * GIB)
    defaults: dict[str, Any] = {"name": "H100", "total_bytes": 80 * GIB, "host": "host-a", "uuid": f"GPU-{index}"}
    return GpuState(index=index, free_measured_bytes=size, ledger_free_bytes=size, **(defaults | values))


def view(index: int = 0, **values: Any) -> GpuView:
    return GpuView(**({"uuid": f"GPU-{index}", "total_bytes": 80 * GIB} | values))


# -- need --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launch", "measured"),
    [
        (facts(), 4_504_682_496),
        (facts(weights_bytes=2_471_645_608, hidden_size=2048, vocab_size=128_256, num_layers=16), 5_427_429_376),
    ],
    ids=["Qwen3-0.6B", "Llama-3.2-1B"],
)
def test_the_estimate_is_near_what_an_h200_measured(launch: LaunchFacts, measured: int) -> None:
    """Baselines of eager vLLM 0.24.0, bytes by NVML."""
    estimate = need(launch, gpu_total_bytes=H200).baseline_bytes
    assert measured * 0.95 <= estimate <= measured * 1.15


def test_every_term_is_explained_and_they_add_up() -> None:
    found = need(facts(enforce_eager=False), gpu_total_bytes=H200)
    assert [line.label for line in found.lines] == ["weights", "runtime", "activations", "CUDA graphs", "KV cache"]
    assert sum(line.bytes for line in found.lines) == found.total_bytes == found.baseline_bytes + found.kv_bytes
    assert all(line.why for line in found.lines) and not found.measured


def test_weights_are_shared_among_the_gpus_of_a_tensor_parallel_launch() -> None:
    """A6."""
    one, two = (need(facts(tensor_parallel_size=size), gpu_total_bytes=H200).lines[0] for size in (1, 2))
    assert two.bytes == one.bytes // 2 and "over 2 GPUs" in two.why


def test_a_profile_takes_the_place_of_the_estimate() -> None:
    """A8: what was measured counts, not a guess that is too high."""
    found = need(facts(), gpu_total_bytes=H200, profile=Profile(baseline_bytes=4_504_682_496, runs=3))
    assert found.measured and found.baseline_bytes == 4_504_682_496
    assert "3 earlier runs" in found.lines[0].why


def test_the_kv_cache_needs_its_floor_and_what_kvcached_maps_at_start() -> None:
    assert need(facts(), gpu_total_bytes=H200).kv_bytes == 9 * 112 * MIB
    assert need(facts(floor_bytes=0), gpu_total_bytes=H200).kv_bytes == 6 * 112 * MIB
    small = need(facts(floor_bytes=0, initial_limit_bytes=3 * 112 * MIB), gpu_total_bytes=H200)
    assert small.kv_bytes == 3 * 112 * MIB


def test_a_small_card_gets_the_small_defaults_of_vllm() -> None:
    small, large = (need(facts(), gpu_total_bytes=size).lines[2].bytes for size in (24 * GIB, 80 * GIB))
    assert small < large / 3


def test_without_kvcached_a_fixed_part_of_the_card_is_needed() -> None:
    found = need(facts(kvcached=False, gpu_memory_utilization=0.5), gpu_total_bytes=80 * GIB)
    assert found.total_bytes == 40 * GIB and "without kvcached" in found.lines[0].why


# -- verdict -----------------------------------------------------------------------------------------------------------


def ask(
    wanted: Need, gpus: Sequence[GpuState], rows: dict[str, list[InstanceView]] | None = None, **values: Any
) -> Judgement:
    views = {gpu.uuid: (view(gpu.index, **values.pop("view", {})), (rows or {}).get(gpu.uuid, [])) for gpu in gpus}
    request = values.pop("request", Request(need_bytes=0))
    return judge(wanted, request, gpus, views, NOW, **values)


def test_what_fits_now_is_said_to_fit_and_where() -> None:
    found = ask(flat(20), [state(free=30)])
    assert found.verdict is Verdict.FITS and [gpu.uuid for gpu in found.gpus] == ["GPU-0"]
    assert found.sentence.startswith("Fits now on GPU 0 of host-a") and found.plans == ()


def test_a_full_card_fits_after_making_room_and_the_plan_is_given() -> None:
    """The story: A has grown over most of the card; C is to be deployed."""
    grown = instance(1, used_bytes=60 * GIB, limit_bytes=64 * GIB, capacity_bytes=70 * GIB, running=40, waiting=2)
    found = ask(flat(20), [state(free=10)], {"GPU-0": [grown]})
    assert found.verdict is Verdict.AFTER_ROOM
    (plan,) = found.plans
    assert plan.feasible and plan.room_bytes >= 20 * GIB
    assert [step.kind for step in plan.steps][-1] is StepKind.LOWER
    assert plan.harm is Harm.SQUEEZE


def test_the_gpu_where_room_costs_least_is_chosen() -> None:
    busy = instance(1, used_bytes=60 * GIB, limit_bytes=62 * GIB, capacity_bytes=70 * GIB, running=40)
    idle = instance(2, used_bytes=64 * MIB, limit_bytes=62 * GIB, capacity_bytes=70 * GIB)
    found = ask(flat(20), [state(0, free=10), state(1, free=12)], {"GPU-0": [busy], "GPU-1": [idle]})
    assert [gpu.index for gpu in found.gpus] == [1] and found.plans[0].harm is Harm.NONE


def test_what_cannot_fit_is_told_with_the_largest_that_would() -> None:
    pinned = instance(1, pinned=True, baseline_bytes=60 * GIB, limit_bytes=GIB, used_bytes=64 * MIB)
    found = ask(flat(30), [state(free=10)], {"GPU-0": [pinned]})
    assert found.verdict is Verdict.DOES_NOT_FIT and found.gpus == ()
    assert 18 * GIB < found.largest_bytes < 20 * GIB
    assert "at most" in found.sentence


def test_a_larger_tensor_parallel_size_is_suggested() -> None:
    """A6: too few GPUs chosen."""
    big = facts(weights_bytes=140 * GIB)
    gpus = [state(index, free=80) for index in range(4)]
    found = ask(need(big, gpu_total_bytes=80 * GIB), gpus, facts=big)
    assert found.verdict is Verdict.DOES_NOT_FIT
    assert found.suggested_tensor_parallel_size == 2
    assert "It would fit with tensor parallel size 2." in found.sentence


def test_a_wrong_choice_by_hand_is_no_question_of_memory() -> None:
    request = Request(need_bytes=0, tensor_parallel_size=2, gpu_uuids=("GPU-0", "GPU-0"))
    found = ask(flat(1), [state(free=80)], request=request)
    assert found.verdict is Verdict.DOES_NOT_FIT and "chosen twice" in found.sentence


def test_room_is_made_on_the_gpus_that_were_chosen_by_hand() -> None:
    idle = instance(1, limit_bytes=62 * GIB, capacity_bytes=70 * GIB)
    gpus = [state(0, free=10), state(1, free=12)]
    request = Request(need_bytes=0, gpu_uuids=("GPU-0",))
    found = ask(flat(20), gpus, {"GPU-0": [idle], "GPU-1": [idle]}, request=request)
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-0"]


def test_room_for_several_parts_is_made_where_it_costs_least() -> None:
    idle = [instance(index, limit_bytes=62 * GIB, capacity_bytes=70 * GIB) for index in range(3)]
    busy = instance(9, used_bytes=60 * GIB, limit_bytes=62 * GIB, capacity_bytes=70 * GIB, running=4)
    gpus = [state(index, free=10) for index in range(3)]
    rows = {"GPU-0": [idle[0]], "GPU-1": [busy], "GPU-2": [idle[2]]}
    found = ask(flat(20), gpus, rows, request=Request(need_bytes=0, tensor_parallel_size=2))
    assert [gpu.index for gpu in found.gpus] == [0, 2] and len(found.plans) == 2


def test_a_gpu_that_nobody_can_look_at_may_only_fit_as_it_is() -> None:
    found = judge(flat(20), Request(need_bytes=0), [state(free=10)], {}, NOW)
    assert found.verdict is Verdict.DOES_NOT_FIT and found.largest_bytes == 10 * GIB
