"""A plan in the hands of real workers, one of which is killed in the middle: it ends somehow, and says how."""

from __future__ import annotations

import time

import httpx
import pytest

from gpus_app.models import Gpu, GpuPolicy
from models_app.models import Instance, Model, Operation
from models_app.services.memory.cards import cards
from models_app.services.memory.placement import need_on
from models_app.services.models import model_create
from models_app.services.plans.room import room_judge, room_make
from models_app.states import InstanceState
from tests.builders import GIB
from tests.models_app.test_stack import Stack, _now, _ready, _until, stack  # noqa: F401 - the fixture

S = InstanceState
pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.slow]


def _short_card(stack: Stack, row: Instance) -> Model:  # noqa: F811
    """A newcomer for which the neighbour's card is short of a few hundred MiB, which its prefix cache would give."""
    for number in range(3):
        answer = httpx.post(
            f"{row.base_url}/v1/completions",
            headers={"Authorization": f"Bearer {row.engine_token}"},
            json={"model": "old", "prompt": [number * 10 + place % 7 for place in range(5000)], "max_tokens": 4},
            timeout=60,
        )
        answer.raise_for_status()
    # Its need is known from here on; before, the newcomer's would be an estimate that shrinks meanwhile.
    _until(lambda: (attempt := _now(row).attempt) and attempt.memory.get("baseline_bytes"), stack, 60)
    gpu = Gpu.objects.get(uuid=row.gpu_uuids[0])
    newcomer = model_create(
        actor="anna", served_model_name="newcomer", source="catalogue", model="Qwen/Qwen3-0.6B", gpu_uuids=[gpu.uuid]
    )
    need = need_on(newcomer, gpu_name=gpu.name, gpu_total_bytes=gpu.total_bytes).total_bytes
    time.sleep(3)  # readings are of the second before
    free = cards([gpu.uuid])[gpu.uuid].view.free_bytes or 0
    GpuPolicy.objects.update_or_create(
        gpu=gpu, defaults={"reserve_bytes": free - need + GIB // 4, "rebalance": GpuPolicy.Rebalance.OFF}
    )
    _until(lambda: room_judge(newcomer).judgement.verdict == "fits_after_making_room", stack, 30)
    return newcomer


@pytest.mark.parametrize("name", ["host", "control", "valkey"])
def test_plan_survives_the_death_of_a_worker_or_is_undone_and_says_which(stack: Stack, name: str) -> None:  # noqa: F811
    row = _ready(stack, "old", gpu_uuids=None)
    before = _now(row).limit_bytes
    newcomer = _short_card(stack, row)
    if name == "host":
        stack.kill(name)  # so that the first step is under way, and nobody carries it out
    operation = room_make(newcomer, actor="anna")

    def begun() -> bool:
        operation.refresh_from_db()
        return any(step["state"] != "waiting" for step in operation.steps)

    _until(begun, stack, 30)
    if name != "host":
        stack.kill(name)
    time.sleep(2)
    stack.start(name)

    def over() -> bool:
        for died in [one for one, child in stack.running.items() if child.poll() is not None]:
            print(f"{died} ended by itself and is started again, as the launcher does")
            stack.start(died)
        operation.refresh_from_db()
        return not operation.is_open

    _until(over, stack, 240)
    assert operation.message, operation.steps
    print(f"{name}: {operation.state} {operation.message}")
    born = Instance.objects.filter(model=newcomer).first()
    if operation.state == Operation.State.SUCCEEDED:
        assert born is not None and born.state == S.READY
        assert all(step["state"] in ("verified", "short", "skipped") for step in operation.steps)
    else:
        assert operation.state == Operation.State.FAILED
        assert born is None or not born.is_live
        assert _now(row).limit_bytes == before, "what was lowered is put back"
    _until(lambda: _now(row).state == S.READY, stack, 60)
