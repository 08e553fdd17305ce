"""KV memory among real simulated engines that work: room made on a full card, limits that follow the load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx
import pytest
from django.conf import settings as django_settings

from gpus_app import selectors
from gpus_app.models import Host
from gpus_app.probes.simulated import SimulatedProbe
from gpus_app.sampler.observer import Observer
from models_app import dispatch
from models_app.models import Instance, Model
from models_app.services.lifecycle.launch import model_launch
from models_app.services.memory.cards import Card, cards
from models_app.services.models import model_create
from models_app.services.plans.room import room_judge, room_make
from models_app.states import InstanceState
from tests.builders import GIB
from tests.models_app.pump import Pump

S = InstanceState
CARD = 16 * GIB
pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.slow,
    pytest.mark.parametrize("fleet", [CARD], indirect=True),
]


class Watch:
    """The sampler's look, made whenever somebody asks for a reading and the last one is a moment old."""

    def __init__(self, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
        probe = SimulatedProbe(django_settings.SARDEENZ_SIM_DIR)
        self.observer = Observer(host_name=host.name, probe=probe, run_dir=django_settings.SARDEENZ_RUN_DIR)
        self._record: dict[str, Any] = {}
        monkeypatch.setattr(selectors, "latest_all", self.latest_all)

    def latest_all(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        if not self._record or time.time() - self._record["t"] > 0.3:
            self._record = dict(self.observer.look().record)
        record = self._record | {"age_s": time.time() - self._record["t"], "source": "broker"}
        return {record["host"]: record}


class Load:
    """Clients of one engine that ask without a pause; each prompt is new, so that the cache fills the pool."""

    def __init__(self, row: Instance, clients: int) -> None:
        self.row, self.failures, self.answers = row, list[str](), 0
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        turn = 0
        with httpx.Client(base_url=str(self.row.base_url), timeout=90) as client:
            while not self._end.is_set():
                turn += 1
                words = " ".join(f"w{number}t{turn}n{place}" for place in range(2000))
                body = {"model": self.row.model.served_model_name, "prompt": words, "max_tokens": 4000}
                headers = {"Authorization": f"Bearer {self.row.engine_token}"}
                try:
                    answer = client.post("/v1/completions", json=body | {"ignore_eos": True}, headers=headers)
                    answer.raise_for_status()
                    self.answers += 1
                except httpx.HTTPError as exc:
                    self.failures.append(str(exc))
                    return

    def stop(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(100)


@pytest.fixture
def watch(fleet: Host, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    settings.HOST_HEARTBEAT_LIMIT_S = 3600.0
    found = Watch(fleet, monkeypatch)
    yield found
    found.observer.close()


@pytest.fixture
def loads() -> Iterator[list[Load]]:
    running: list[Load] = []
    yield running
    for load in running:
        load.stop()


def _model(name: str, host: Host, **fields: Any) -> Model:
    uuid = host.gpus.all()[0].uuid
    given = {"served_model_name": name, "source": "catalogue", "model": "Qwen/Qwen3-0.6B", "gpu_uuids": [uuid]}
    return model_create(actor="anna", max_model_len=16384, **(given | fields))


def _ready(pump: Pump, model: Model) -> Instance:
    (row,) = model_launch(model, actor="anna")
    pump.run(lambda: Instance.objects.get(pk=row.pk).state == S.READY)
    row.refresh_from_db()
    return row


def _card(host: Host) -> Card:
    uuid = host.gpus.all()[0].uuid
    return cards([uuid])[uuid]


def _claims(host: Host) -> int:
    card = _card(host)
    return sum(row.held_bytes for row in card.rows) + card.view.kept_bytes


def _limit(host: Host, row: Instance) -> int:
    return next(one.limit_bytes for one in _card(host).rows if one.id == row.pk)


def _controlled(pump: Pump, until: Callable[[], bool], *, limit_s: float = 60.0) -> None:
    """With the controller looking every second."""
    due = [0.0]

    def look() -> bool:
        if time.monotonic() >= due[0]:
            due[0] = time.monotonic() + 1.0
            pump.send(dispatch.REBALANCE, queue=dispatch.CONTROL_QUEUE)
        return until()

    pump.run(look, limit_s=limit_s)


def test_room_is_made_on_a_card_that_is_full_of_a_working_models_cache(
    fleet: Host, pump: Pump, watch: Watch, loads: list[Load]
) -> None:
    first = _ready(pump, _model("first", fleet))
    loads.append(Load(first, 16))
    newcomer = _model("newcomer", fleet)
    pump.run(lambda: room_judge(newcomer).judgement.verdict == "fits_after_making_room", limit_s=60)
    operation = room_make(newcomer, actor="anna")

    def over() -> bool:
        operation.refresh_from_db()
        return not operation.is_open

    _controlled(pump, over, limit_s=120)
    assert operation.state == "succeeded", (operation.message, operation.steps)
    _controlled(pump, lambda: _claims(fleet) <= CARD)
    answered = loads[0].answers
    _controlled(pump, lambda: loads[0].answers > answered or bool(loads[0].failures))
    loads[0].stop()
    assert loads[0].failures == []


def test_limits_follow_the_load_and_fit_the_card_at_every_look(
    fleet: Host, pump: Pump, watch: Watch, loads: list[Load]
) -> None:
    first = _ready(pump, _model("first", fleet))
    second_model = _model("second", fleet)
    (second,) = model_launch(second_model, actor="anna")
    _controlled(pump, lambda: Instance.objects.get(pk=second.pk).state == S.READY)
    second.refresh_from_db()
    # Until the card is divided between the two: before, the first has nearly all of it, and nothing to grow into.
    _controlled(pump, lambda: _claims(fleet) <= CARD and _limit(fleet, second) > 3 * GIB)
    over: list[int] = []

    def grows(row: Instance, above: int) -> bool:
        claims = _claims(fleet)
        if claims > CARD:
            over.append(claims)
        return _limit(fleet, row) > above

    for row, other in ((first, second), (second, first)):
        before = _limit(fleet, row)
        load = Load(row, 8)
        loads.append(load)
        _controlled(pump, lambda row=row, before=before: grows(row, before))  # type: ignore[misc]
        assert _limit(fleet, other) < CARD
        load.stop()
        assert load.failures == []
    assert over == []
