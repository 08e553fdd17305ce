"""Sleep and wake: drained first, checked before, asleep with a reason when waking fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import orjson
import pytest
from redis import Redis

from gpus_app.broker import host_latest_key
from gpus_app.models import Host
from gpus_app.probes.segments import read_segment
from models_app import dispatch, transitions
from models_app.engines.client import EngineClient
from models_app.errors import Conflict, DoesNotFit, EngineUnavailable
from models_app.models import Instance
from models_app.services.lifecycle.launch import model_launch
from models_app.services.lifecycle.sleep import instance_sleep, instance_wake
from models_app.services.lifecycle.stop import instance_stop
from models_app.services.memory import shares
from models_app.services.memory.kvcache import LimitAnswer, kvcache_limit_set
from models_app.services.models import model_create
from models_app.services.plans.reconcile import reconcile_host
from models_app.states import DesiredState, InstanceState, LimitStatus, Stage
from tests.builders import GIB, make_gpu, make_host, make_instance, make_model, make_record
from tests.models_app.pump import Pump

S = InstanceState


def _now(row: Instance) -> Instance:
    return Instance.objects.select_related("attempt", "host", "model").get(pk=row.pk)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    messages: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dispatch, "send", lambda name, *args, **_: messages.append((name, *args)))
    return messages


# --- rows only ---------------------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.parametrize("state", [S.PENDING, S.STARTING, S.STOPPING, S.STOPPED, S.UNREACHABLE])
def test_only_a_ready_instance_goes_to_sleep(sent: list[Any], state: InstanceState) -> None:
    row = make_instance(model=make_model(enable_sleep_mode=True), state=state)
    with pytest.raises(Conflict, match=state):
        instance_sleep(row, actor="anna")


@pytest.mark.django_db
def test_falling_asleep_twice_is_once(sent: list[Any]) -> None:
    row = make_instance(model=make_model(enable_sleep_mode=True))
    instance_sleep(row, actor="anna", level=2)
    assert (row.state, row.sleep_level, row.desired_state) == (S.DRAINING, 2, DesiredState.SLEEPING)
    assert instance_sleep(row, actor="anna").state == S.DRAINING
    assert row.events.filter(to_state="draining").count() == 1


@pytest.mark.django_db
def test_waking_needs_room_and_says_how_much(sent: list[Any], valkey: str) -> None:
    host = make_host()
    gpu = make_gpu(host=host)
    row = make_instance(host=host, state=S.SLEEPING, desired_state=DesiredState.SLEEPING, reserved_bytes=20 * GIB)
    record = make_record(host, used={gpu.uuid: 70 * GIB}, instances=[row])
    with Redis.from_url(valkey) as client:
        client.set(host_latest_key(host.name), orjson.dumps(record))
    with pytest.raises(DoesNotFit, match=r"waking needs 20\.0 GiB"):
        instance_wake(row, actor="anna")
    assert _now(row).desired_state == DesiredState.SLEEPING
    make = _now(row).attempt
    assert make is not None
    make.memory = {"asleep_bytes": 14 * GIB}
    make.save()
    assert instance_wake(row, actor="anna").desired_state == DesiredState.RUNNING, "what it holds already is not needed"


@pytest.mark.django_db
def test_waking_twice_is_once(sent: list[Any]) -> None:
    row = make_instance(state=S.STARTING, stage=Stage.WAKING)
    assert instance_wake(row, actor="anna").state == S.STARTING
    assert sent == []


@pytest.mark.django_db
def test_waking_what_does_not_sleep_is_refused(sent: list[Any]) -> None:
    with pytest.raises(Conflict, match="sleeping"):
        instance_wake(make_instance(state=S.DRAINING), actor="anna")


# --- over a real simulated engine ----------------------------------------------------------------------


@pytest.fixture
def ready(fleet: Host, pump: Pump, settings: Any) -> Instance:
    settings.SARDEENZ_SIM_SPEED = 20.0  # a long answer must outlast the drain, however fast the machine is
    model = model_create(
        actor="anna", served_model_name="a", source="catalogue", model="Qwen/Qwen3-0.6B", enable_sleep_mode=True
    )
    (row,) = model_launch(model, actor="anna")
    pump.run(lambda: _now(row).state == S.READY)
    return _now(row)


@contextmanager
def _stream(row: Instance) -> Iterator[list[str]]:
    """A long answer under way; its pieces so far."""
    pieces: list[str] = []
    leave = threading.Event()
    begun = threading.Event()

    def read() -> None:
        body = {"model": "a", "prompt": "tell me", "max_tokens": 20_000, "stream": True, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {row.engine_token}"}
        with httpx.stream("POST", f"{row.base_url}/v1/completions", headers=headers, json=body, timeout=30) as answer:
            for line in answer.iter_lines():
                pieces.append(line)
                begun.set()
                if leave.is_set():
                    return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert begun.wait(20)
        yield pieces
    finally:
        leave.set()
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_request_that_does_not_end_in_time_keeps_it_awake(ready: Instance, pump: Pump, settings: Any) -> None:
    settings.DRAIN_LIMIT_S = 1.0
    with _stream(ready):
        instance_sleep(ready, actor="anna")
        pump.run(lambda: _now(ready).state == S.READY)
    row = _now(ready)
    assert "1 request in flight" in row.reason
    assert row.desired_state == DesiredState.RUNNING


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_stop_waits_for_requests_and_cuts_them_at_the_limit(ready: Instance, pump: Pump, settings: Any) -> None:
    settings.DRAIN_LIMIT_S = 1.0
    with _stream(ready) as pieces:
        instance_stop(ready, actor="anna")
        before = len(pieces)
        pump.run(lambda: _now(ready).state == S.STOPPING)
        assert len(pieces) > before, "it went on during the drain"
        assert "1 request cut" in _now(ready).reason
        pump.run(lambda: _now(ready).state == S.STOPPED)


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_failed_wake_stays_asleep_with_its_reason(ready: Instance, pump: Pump, monkeypatch: pytest.MonkeyPatch) -> None:
    instance_sleep(ready, actor="anna")
    pump.run(lambda: _now(ready).state == S.SLEEPING)

    def refuse(*_: Any, **__: Any) -> None:
        raise EngineUnavailable("The engine did not answer /kvcache/wake within 45 s.")

    with monkeypatch.context() as patch:
        patch.setattr(EngineClient, "wake", refuse)
        instance_wake(ready, actor="anna")
        pump.run(lambda: _now(ready).events.filter(to_state="starting").count() == 2)
        pump.run(lambda: _now(ready).state == S.SLEEPING)
    assert "Still asleep" in _now(ready).reason
    instance_wake(ready, actor="anna")
    pump.run(lambda: _now(ready).state == S.READY)


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_lost_wake_is_made_good(ready: Instance, fleet: Host, pump: Pump) -> None:
    instance_sleep(ready, actor="anna")
    pump.run(lambda: _now(ready).state == S.SLEEPING)
    pump.lose.add(dispatch.WAKE)
    instance_wake(ready, actor="anna")
    pump.settle(0.3)
    assert _now(ready).state == S.SLEEPING
    pump.lose.clear()
    reconcile_host(fleet.name)
    pump.run(lambda: _now(ready).state == S.READY)


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_sleeper_is_not_taken_for_awake(ready: Instance, fleet: Host, pump: Pump) -> None:
    instance_sleep(ready, actor="anna")
    pump.run(lambda: _now(ready).state == S.SLEEPING)
    transitions.move(ready.pk, S.STARTING, expected=S.SLEEPING, reason="as if woken", stage=Stage.WAKING)
    pump.send(dispatch.PROBE, ready.pk, queue="")
    pump.settle(1.5)
    assert _now(ready).state == S.STARTING


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_back_from_unreachable_is_what_the_engine_says(ready: Instance, fleet: Host, pump: Pump) -> None:
    transitions.move(ready.pk, S.UNREACHABLE, expected=S.READY, reason="silent")
    reconcile_host(fleet.name)
    assert _now(ready).state == S.READY
    instance_sleep(ready, actor="anna")
    pump.run(lambda: _now(ready).state == S.SLEEPING)
    transitions.move(ready.pk, S.UNREACHABLE, expected=S.SLEEPING, reason="silent")
    reconcile_host(fleet.name)
    assert _now(ready).state == S.SLEEPING


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_engine_hears_its_share_before_it_wakes(
    ready: Instance, fleet: Host, pump: Pump, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its limit from before the sleep was made for a card that others have divided since."""
    instance_sleep(ready, actor="anna")
    pump.run(lambda: _now(ready).state == S.SLEEPING)
    heard: list[int] = []
    wake = EngineClient.wake

    def woken(self: EngineClient, *args: Any, **kwargs: Any) -> Any:
        heard.append(read_segment(_now(ready).ipc_name).limit_bytes)
        return wake(self, *args, **kwargs)

    monkeypatch.setattr(EngineClient, "wake", woken)
    bundle = _now(ready).bundle_bytes or 0
    monkeypatch.setattr(shares, "wake_share", lambda row: 40 * bundle)
    instance_wake(ready, actor="anna")
    pump.run(lambda: _now(ready).state == S.READY)
    pump.run(lambda: _now(ready).limit_status == LimitStatus.APPLIED)
    row = _now(ready)
    assert heard == [40 * bundle]
    assert (row.limit_bytes, row.effective_limit_bytes) == (40 * bundle, 40 * bundle)
    assert row.limit_acked_revision == row.limit_revision


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("when", ["asleep", "waking"])
def test_limit_set_while_it_cannot_be_told_is_in_force_when_it_is_ready(
    ready: Instance, pump: Pump, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Queued with a sentence, never lost, and not half-way: asleep it is heard before the wake, waking right after."""
    instance_sleep(ready, actor="anna")
    pump.run(lambda: _now(ready).state == S.SLEEPING)
    wanted = 50 * (_now(ready).bundle_bytes or 0)
    answers: list[LimitAnswer] = []
    wake = EngineClient.wake

    def woken(self: EngineClient, *args: Any, **kwargs: Any) -> Any:
        if when == "waking":
            answers.append(kvcache_limit_set(_now(ready), size=wanted, actor="bert", wait_s=0))
        else:
            assert read_segment(_now(ready).ipc_name).limit_bytes == wanted
        return wake(self, *args, **kwargs)

    monkeypatch.setattr(EngineClient, "wake", woken)
    if when == "asleep":
        answers.append(kvcache_limit_set(ready, size=wanted, actor="bert", wait_s=0))
    instance_wake(ready, actor="anna")
    pump.run(lambda: _now(ready).state == S.READY and _now(ready).limit_status == LimitStatus.APPLIED)
    (answer,) = answers
    assert answer.status == "pending" and "applied as soon as it is" in answer.message
    assert _now(ready).effective_limit_bytes == read_segment(_now(ready).ipc_name).limit_bytes == wanted


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_limit_set_while_it_stops_is_refused_and_while_it_drains_is_told(
    ready: Instance, pump: Pump, settings: Any
) -> None:
    settings.DRAIN_LIMIT_S = 20.0
    wanted = 50 * (ready.bundle_bytes or 0)
    with _stream(ready):
        instance_stop(ready, actor="anna")
        assert _now(ready).state == S.DRAINING
        kvcache_limit_set(_now(ready), size=wanted, actor="bert", wait_s=0)
        pump.run(lambda: _now(ready).limit_acked_revision == 1)
        assert read_segment(_now(ready).ipc_name).limit_bytes == wanted
    pump.run(lambda: _now(ready).state in (S.STOPPING, S.STOPPED))
    with pytest.raises(Conflict, match="a limit can be set while it runs, starts or sleeps"):
        kvcache_limit_set(_now(ready), size=wanted, actor="bert", wait_s=0)
