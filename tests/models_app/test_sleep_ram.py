"""Host memory of sleepers is counted and capped; pins hold; a wake is believed by its answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from gpus_app.models import Host
from models_app import dispatch
from models_app.engines.client import EngineClient
from models_app.errors import Conflict, DoesNotFit, EngineUnavailable
from models_app.models import Instance, LaunchAttempt
from models_app.services.lifecycle import idle, sleep
from models_app.services.lifecycle.known_answer import answer_differs, answer_keep
from models_app.services.lifecycle.sleep import instance_sleep, sleep_again
from models_app.services.memory.sleep_ram import sleep_ram
from models_app.states import InstanceState
from tests.builders import GIB, make_gpu, make_host, make_instance, make_key, make_model
from tests.models_app.pages import client_of

S = InstanceState
pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    messages: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dispatch, "send", lambda name, *args, **_: messages.append((name, *args)))
    return messages


@pytest.fixture
def host(settings: Any) -> Host:
    host = make_host(
        name=settings.SARDEENZ_HOST_NAME, engine_kind="vllm", total_ram_bytes=64 * GIB, available_ram_bytes=60 * GIB
    )
    make_gpu(host=host)
    return host


def _ready(host: Host, weights_gib: int = 10, **fields: Any) -> Instance:
    given: dict[str, Any] = {"enable_sleep_mode": True, "facts": {"weights_bytes": weights_gib * GIB}}
    return make_instance(host=host, model=make_model(**(given | fields)))


def _now(row: Instance) -> Instance:
    return Instance.objects.select_related("model", "host", "attempt").get(pk=row.pk)


# --- host memory -----------------------------------------------------------------------------------


def test_sleepers_may_keep_half_of_the_hosts_memory_and_are_refused_with_the_numbers(host: Host) -> None:
    """E4: counted from the decision on, not only once they sleep."""
    for _ in range(3):
        instance_sleep(_ready(host), actor="anna")
    last = _ready(host)
    with pytest.raises(DoesNotFit) as refused:
        instance_sleep(last, actor="anna")
    assert "keeps 30.0 GiB of at most 32.0 GiB" in refused.value.message
    assert "take 10.0 GiB more" in refused.value.message
    assert _now(last).state == S.READY
    instance_sleep(last, actor="anna", level=2)
    assert sleep_ram([host])[host.name].held_bytes == 30 * GIB


def test_cap_is_a_setting(host: Host, settings: Any) -> None:
    settings.SLEEP_RAM_BYTES = 12 * GIB
    instance_sleep(_ready(host), actor="anna")
    with pytest.raises(DoesNotFit, match=r"at most 12\.0 GiB"):
        instance_sleep(_ready(host, 3), actor="anna")


def test_weights_that_the_host_has_no_memory_for_do_not_go_there(host: Host) -> None:
    Host.objects.update(available_ram_bytes=8 * GIB)
    with pytest.raises(DoesNotFit, match=r"has 8\.0 GiB of memory free, these weights take 10\.0 GiB"):
        instance_sleep(_ready(host), actor="anna")


def test_measured_weights_count_on_all_gpus(host: Host) -> None:
    row = _ready(host, tensor_parallel_size=2)
    assert row.attempt is not None
    LaunchAttempt.objects.filter(pk=row.attempt.pk).update(memory={"weights_bytes": 7 * GIB})
    instance_sleep(row, actor="anna")
    assert sleep_ram([host])[host.name].held_bytes == 14 * GIB


def test_simulated_engines_keep_nothing_and_are_capped_only_by_the_setting(host: Host, settings: Any) -> None:
    Host.objects.update(engine_kind="simulated", total_ram_bytes=GIB, available_ram_bytes=GIB)
    instance_sleep(_ready(host), actor="anna")
    settings.SLEEP_RAM_BYTES = 15 * GIB
    with pytest.raises(DoesNotFit):
        instance_sleep(_ready(host), actor="anna")


def test_one_that_shall_sleep_again_stays_awake_when_there_is_no_memory(host: Host, settings: Any) -> None:
    settings.SLEEP_RAM_BYTES = GIB
    row = _ready(host)
    Instance.objects.filter(pk=row.pk).update(desired_state="sleeping")
    assert not sleep_again(row.pk)
    assert (_now(row).state, _now(row).desired_state) == (S.READY, "running")
    assert _now(row).reason.startswith("It stays awake. Host testhost keeps")


def test_memory_of_sleepers_is_shown_per_host(host: Host, client: Client, valkey: str) -> None:
    instance_sleep(_ready(host), actor="anna")
    text = client_of().get("/gpus/").content.decode()
    assert "1 sleeper keeps <b>10.0</b> of at most 32.0 GiB there" in text
    headers = {"Authorization": f"Bearer {make_key()[1]}"}
    assert client.get(f"/api/v1/hosts/{host.name}/sleepers", headers=headers).json() == {
        "host": host.name,
        "sleepers": 1,
        "held_bytes": 10 * GIB,
        "cap_bytes": 32 * GIB,
        "total_bytes": 64 * GIB,
        "available_bytes": 60 * GIB,
    }
    metrics = client.get("/metrics", headers=headers).content.decode()
    line = next(one for one in metrics.splitlines() if one.startswith("sardeenz_host_sleep_ram_bytes{"))
    assert (host.name in line, float(line.split()[-1])) == (True, 10 * GIB)
    Host.objects.update(available_ram_bytes=2 * GIB)
    assert f"The memory of host {host.name} is nearly full" in client_of().get("/").content.decode()


def test_shared_memory_is_shown_and_told_when_it_runs_out(host: Host, client: Client) -> None:
    Host.objects.update(total_shm_bytes=64 * GIB, available_shm_bytes=40 * GIB, available_ram_bytes=60 * GIB)
    assert "/dev/shm free <b>40.0 GiB</b> of 64.0 GiB" in client_of().get("/gpus/").content.decode()
    headers = {"Authorization": f"Bearer {make_key()[1]}"}
    (told,) = client.get("/api/v1/hosts", headers=headers).json()
    assert (told["total_shm_bytes"], told["available_shm_bytes"]) == (64 * GIB, 40 * GIB)
    title = f"Shared memory of host {host.name} is nearly full"
    assert title not in client_of().get("/").content.decode()
    Host.objects.update(available_shm_bytes=0)
    assert title in client_of().get("/").content.decode()


def test_what_a_sleep_freed_is_shown(host: Host) -> None:
    row = make_instance(host=host, model=make_model(enable_sleep_mode=True), state=S.SLEEPING, sleep_level=1)
    assert row.attempt is not None
    LaunchAttempt.objects.filter(pk=row.attempt.pk).update(memory={"awake_bytes": 9 * GIB, "asleep_bytes": GIB})
    text = client_of().get(f"/instances/{row.pk}/").content.decode()
    assert "holds 1.0 GiB, the sleep freed 8.0 GiB" in text


# --- pins ------------------------------------------------------------------------------------------


def test_pinned_model_never_sleeps(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    row = _ready(host, pinned=True, idle_sleep_after_s=10)
    with pytest.raises(Conflict, match="pinned"):
        instance_sleep(row, actor="anna")
    monkeypatch.setattr("models_app.broker.once_in", lambda *_: True)
    idle.idle_check(now=1e12)
    Instance.objects.filter(pk=row.pk).update(desired_state="sleeping")
    assert not sleep_again(row.pk)
    assert (_now(row).state, _now(row).desired_state) == (S.READY, "running")


# --- a known answer --------------------------------------------------------------------------------


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What the engine answers next; the last one for ever. None: nothing."""
    answers: list[str | None] = ["4"]

    def probe(self: EngineClient, model: str | None = None) -> str:
        said = answers.pop(0) if len(answers) > 1 else answers[0]
        if said is None:
            raise EngineUnavailable("no answer")
        return said

    monkeypatch.setattr(EngineClient, "probe_token", probe)
    return answers


def test_answer_is_taken_once_before_the_sleep_and_compared_after(host: Host, says: list[str | None]) -> None:
    row = _ready(host)
    answer_keep(row)
    says[:] = ["9"]
    answer_keep(row)
    assert answer_differs(_now(row)) == "It answers '9' where it answered '4' before its sleep."
    says[:] = ["9", "4"]
    assert answer_differs(_now(row)) == ""
    says[:] = [None]
    assert answer_differs(_now(row)) == "It makes no token."


def test_engine_that_makes_no_text_is_believed(host: Host, says: list[str | None]) -> None:
    says[:] = [None]
    row = _ready(host)
    answer_keep(row)
    says[:] = ["4"]
    assert answer_differs(_now(row)) == ""


def test_wrong_answer_after_waking_is_never_routable(
    host: Host, says: list[str | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """E1: it is ended with the reason, and its policy loads it anew."""
    from models_app.services.lifecycle import probe

    row = make_instance(
        host=host, model=make_model(enable_sleep_mode=True), state=S.STARTING, stage="waking", ready_at=host.created_at
    )
    assert row.attempt is not None
    answer_keep(row)
    LaunchAttempt.objects.filter(pk=row.attempt.pk).update(run_dir=str(tmp_path))
    says[:] = ["!"]
    monkeypatch.setattr(probe, "_ready_answer", lambda *_: {})
    assert not probe._look_at_start(_now(row), object())  # type: ignore[arg-type]
    assert (_now(row).state, _now(row).next_restart_at is not None) == (S.FAILED, True)
    assert "It answers '!' where it answered '4' before its sleep." in _now(row).reason


def test_answer_is_asked_for_when_it_falls_asleep(
    host: Host, says: list[str | None], settings: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(EngineClient, "sleep", lambda *_, **__: {})
    row = _ready(host)
    instance_sleep(row, actor="anna")
    sleep.sleep_apply(row.pk)
    found = _now(row)
    assert found.attempt is not None
    assert (found.state, found.attempt.memory["known_answer"]) == (S.SLEEPING, "4")
