"""Cordon, drain and maintenance of a host: what each does to what runs, by every door."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from gpus_app.models import Host
from models_app import dispatch
from models_app.errors import Conflict
from models_app.models import Instance, Operation
from models_app.services.lifecycle.launch import instance_place
from models_app.services.plans.host_drain import host_drain
from models_app.services.plans.operations import operation_cancel, operation_step
from models_app.states import InstanceState
from tests.builders import GIB, make_gpu, make_host, make_instance, make_key, make_model, make_user
from tests.models_app.pages import client_of

S = InstanceState
pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    messages: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dispatch, "send", lambda name, *args, **_: messages.append((name, *args)))
    return messages


@pytest.fixture
def hosts(settings: Any, tmp_path: Path) -> list[Host]:
    settings.SARDEENZ_HOME = tmp_path
    found = [make_host(name=name) for name in ("ha", "hb")]
    for host in found:
        make_gpu(host=host)
    return found


def _on(host: Host, **fields: Any) -> Instance:
    model = fields.pop("model", None) or make_model(deployed=True)
    return make_instance(model=model, host=host, **fields)


def _now(row: Instance) -> Instance:
    return Instance.objects.select_related("host").get(pk=row.pk)


def _set(row: Instance, state: InstanceState, **fields: Any) -> None:
    Instance.objects.filter(pk=row.pk).update(state=state, spec_revision=row.model.spec_revision, **fields)


def _look(operation: Operation, times: int = 1) -> Operation:
    for _ in range(times):
        operation_step(operation.pk)
    operation.refresh_from_db()
    return operation


def _move_through(row: Instance) -> Instance:
    """The successor is placed, comes up and takes over; the old one ends."""
    move = Operation.objects.get(kind="replace", state__in=("pending", "running"))
    _look(move)
    new = Instance.objects.get(replaces=row)
    assert instance_place(new.pk)
    _set(new, S.READY)
    _look(move, 2)
    _set(row, S.STOPPED)
    _look(move, 2)
    return _now(new)


def test_drain_cordons_and_moves_one_after_the_other(hosts: list[Host]) -> None:
    rows = [_on(hosts[0]) for _ in range(2)]
    kept = _on(hosts[1])
    operation = _look(host_drain(hosts[0], actor="anna", note="new fan"))
    hosts[0].refresh_from_db()
    assert (hosts[0].cordoned, hosts[0].note) == (True, "new fan")
    assert Operation.objects.filter(kind="replace").count() == 1
    for row in rows:
        new = _move_through(row)
        assert new.host == hosts[1]
        _look(operation, 2)
    assert (operation.state, operation.message) == ("succeeded", "Host ha is empty and cordoned.")
    assert _now(kept).state == S.READY


def test_what_fits_nowhere_else_stays_and_is_named(hosts: list[Host]) -> None:
    row = _on(hosts[0])
    _on(hosts[1], reserved_bytes=79 * GIB)
    operation = _look(host_drain(hosts[0], actor="anna"), 2)
    assert operation.state == "failed"
    assert operation.message.startswith(f"Not empty. {row}: ")
    assert _now(row).state == S.READY


def test_what_fits_nowhere_else_is_stopped_and_waits_when_asked(hosts: list[Host]) -> None:
    row = _on(hosts[0])
    _on(hosts[1], reserved_bytes=79 * GIB)
    operation = _look(host_drain(hosts[0], actor="anna", stop=True), 2)
    assert (_now(row).state, _now(row).desired_state) == (S.DRAINING, "running")
    assert operation.is_open
    _set(row, S.PENDING, host=None, gpu_uuids=[])
    assert _look(operation).state == "succeeded"


def test_what_is_bound_to_the_host_stays(hosts: list[Host]) -> None:
    row = _on(hosts[0], model=make_model(deployed=True, host=hosts[0]))
    operation = _look(host_drain(hosts[0], actor="anna"), 2)
    assert (operation.state, _now(row).state) == ("failed", S.READY)


def test_what_is_scheduled_there_is_placed_elsewhere_and_what_starts_is_waited_for(hosts: list[Host]) -> None:
    scheduled, starting = _on(hosts[0], state=S.SCHEDULED), _on(hosts[0], state=S.STARTING)
    operation = _look(host_drain(hosts[0], actor="anna"), 3)
    assert (_now(scheduled).state, _now(scheduled).host) == (S.PENDING, None)
    assert (operation.is_open, Operation.objects.filter(kind="replace").count()) == (True, 0)
    _set(starting, S.READY)
    _look(operation)
    assert Operation.objects.filter(kind="replace").count() == 1


def test_move_that_fails_is_told_and_the_instance_serves_on(hosts: list[Host]) -> None:
    row = _on(hosts[0])
    operation = _look(host_drain(hosts[0], actor="anna"))
    Operation.objects.filter(kind="replace").update(state="failed", message="The successor did not come up.")
    _look(operation, 2)
    assert (operation.state, _now(row).state) == ("failed", S.READY)
    assert "did not come up" in operation.message


def test_cancelled_drain_cancels_its_move_and_leaves_the_cordon(hosts: list[Host]) -> None:
    _on(hosts[0])
    operation = _look(host_drain(hosts[0], actor="anna"))
    operation_cancel(operation, actor="anna")
    _look(operation)
    assert operation.state == "cancelled"
    assert Operation.objects.get(kind="replace").cancel_requested
    hosts[0].refresh_from_db()
    assert hosts[0].cordoned


def test_second_drain_at_the_same_time_is_refused(hosts: list[Host]) -> None:
    _on(hosts[0])
    host_drain(hosts[0], actor="anna")
    with pytest.raises(Conflict, match="being drained already"):
        host_drain(hosts[0], actor="bob")


def test_empty_host_is_drained_at_once(hosts: list[Host]) -> None:
    assert _look(host_drain(hosts[0], actor="anna")).state == "succeeded"


# --- doors -----------------------------------------------------------------------------------------


def test_drain_by_rest(hosts: list[Host], client: Client) -> None:
    headers = {"Authorization": f"Bearer {make_key()[1]}"}
    address = "/api/v1/hosts/ha/drain"
    answer = client.post(address, {"note": "new fan", "stop": True}, content_type="application/json", headers=headers)
    assert (answer.status_code, answer.json()["kind"]) == (202, "drain_host")
    assert Operation.objects.get().facts == {"host": "ha", "stop": True}
    missing = client.post("/api/v1/hosts/hx/drain", {}, content_type="application/json", headers=headers)
    assert missing.status_code == 404
    viewer = {"Authorization": f"Bearer {make_key(role='viewer')[1]}"}
    assert client.post(address, {}, content_type="application/json", headers=viewer).status_code == 403


@pytest.mark.parametrize("how", ["cordon", "drain", "maintenance"])
def test_each_way_of_closing_a_host_by_the_pages(hosts: list[Host], how: str) -> None:
    client = client_of()
    page = client.get(f"/hosts/{hosts[0].pk}/cordon/").content.decode()
    assert f'value="{how}"' in page
    answer = client.post(f"/hosts/{hosts[0].pk}/cordon/", {"how": how, "note": "fan"})
    hosts[0].refresh_from_db()
    assert (hosts[0].cordoned, hosts[0].maintenance, hosts[0].note) == (True, how == "maintenance", "fan")
    assert Operation.objects.filter(kind="drain_host").exists() is (how == "drain")
    if how == "drain":
        assert answer["Location"] == f"/operations/{Operation.objects.get().pk}/"
        assert "Drain host ha" in client.get(answer["Location"]).content.decode()
    client.post(f"/hosts/{hosts[0].pk}/uncordon/")
    hosts[0].refresh_from_db()
    assert not (hosts[0].cordoned or hosts[0].maintenance)


@pytest.mark.parametrize(
    ("action", "cordoned", "maintenance", "drained"),
    [("cordon", True, False, False), ("maintenance", True, True, False), ("drain", True, False, True)],
)
def test_each_way_of_closing_a_host_in_the_admin(
    hosts: list[Host], client: Client, action: str, cordoned: bool, maintenance: bool, drained: bool
) -> None:
    client.force_login(make_user(role="admin", is_staff=True, is_superuser=True))
    client.post("/admin/gpus_app/host/", {"action": action, "_selected_action": [hosts[0].pk]})
    hosts[0].refresh_from_db()
    assert (hosts[0].cordoned, hosts[0].maintenance) == (cordoned, maintenance)
    assert Operation.objects.filter(kind="drain_host").exists() is drained
    client.post("/admin/gpus_app/host/", {"action": "end_maintenance", "_selected_action": [hosts[0].pk]})
    hosts[0].refresh_from_db()
    assert (hosts[0].cordoned, hosts[0].maintenance) == (True, False)
