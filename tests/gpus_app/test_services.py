"""Hosts, GPUs, policies and readings in the database."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from gpus_app import events, services
from gpus_app.errors import ImpossiblePolicy
from gpus_app.models import Gpu, GpuPolicy, GpuSample, Host
from gpus_app.policies.claims import Claim
from gpus_app.probes.base import GpuReading
from gpus_app.services import (
    RollUp,
    gpu_cordon,
    gpu_hold,
    gpu_hold_end,
    gpu_policy_set,
    gpu_uncordon,
    gpus_sync,
    host_cordon,
    host_heartbeat,
    host_maintenance_set,
    host_register,
    host_uncordon,
    samples_prune,
    samples_record,
)
from gpus_app.tasks import prune
from tests.builders import make_gpu, make_host

GIB = 1024**3
pytestmark = pytest.mark.django_db


def register(name: str = "host-a", **values: Any) -> Host:
    return host_register(name, **({"address": "10.0.0.5", "engine_kind": "vllm"} | values))


def reading(uuid: str = "GPU-a", index: int = 0, **values: Any) -> GpuReading:
    return GpuReading(uuid, index, values.pop("name", "H100"), values.pop("total_bytes", 80 * GIB), **values)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was published to pages."""
    messages: list[Any] = []
    monkeypatch.setattr(events, "_send", messages.append)
    return messages


@pytest.fixture
def acts() -> Any:
    """What the audit was told."""
    noted: list[tuple[str, str, str]] = []

    def note(actor: str, action: str, target: str, **_: Any) -> None:
        noted.append((actor, action, target))

    events.acted.connect(note)
    yield noted
    events.acted.disconnect(note)


# -- hosts -------------------------------------------------------------------------------------------------------------


def test_a_host_is_entered_once_under_its_name() -> None:
    """H14: an upgrade, another address, a reboot: the same row."""
    register(boot_id="one")
    register(address="10.0.0.6", boot_id="two", total_ram_bytes=5)
    host = Host.objects.get()
    assert (host.address, host.boot_id, host.total_ram_bytes) == ("10.0.0.6", "two", 5)


def test_worker_and_sampler_each_add_the_versions_that_they_know() -> None:
    register(versions={"vllm": "0.24.0"})
    register(versions={"driver": "580.1"})
    assert Host.objects.get().versions == {"vllm": "0.24.0", "driver": "580.1"}


def test_registering_again_does_not_lift_a_cordon() -> None:
    host = register()
    host_cordon(host, actor="ann", note="fan is loud")
    register(boot_id="two")
    host.refresh_from_db()
    assert host.cordoned and host.note == "fan is loud"


def test_pages_are_told_of_a_host_only_when_it_changed(told: list[Any], on_commit: Any) -> None:
    with on_commit():
        register()
        register()
    assert told == [{"type": "gpus.changed", "host": "host-a"}]


def test_a_heartbeat_is_stamped_by_the_database() -> None:
    register()
    assert host_heartbeat("host-a", source="worker", available_ram_bytes=7)
    host = Host.objects.get()
    assert host.worker_seen_at is not None and host.sampler_seen_at is None and host.available_ram_bytes == 7
    assert abs(timezone.now() - host.worker_seen_at) < timedelta(minutes=1)
    assert host.reachable


def test_a_heartbeat_tells_how_much_shared_memory_is_left() -> None:
    register()
    assert host_heartbeat("host-a", source="sampler", shm_bytes=(64, 5))
    host_heartbeat("host-a", source="worker")  # knows nothing of it, and takes nothing back
    host = Host.objects.get()
    assert (host.total_shm_bytes, host.available_shm_bytes) == (64, 5)


def test_a_heartbeat_of_an_unknown_host_says_so() -> None:
    assert not host_heartbeat("nobody", source="sampler")


def test_a_silent_host_is_out_of_reach_and_back_at_its_next_beat(settings: Any) -> None:
    """SZ-134, H4."""
    settings.HOST_HEARTBEAT_LIMIT_S = 10
    host = register()
    assert not host.reachable
    Host.objects.update(sampler_seen_at=timezone.now() - timedelta(seconds=12))
    host.refresh_from_db()
    assert not host.reachable
    host_heartbeat("host-a", source="sampler")
    host.refresh_from_db()
    assert host.reachable


def test_acts_on_hosts_are_noted_with_who_did_them(acts: list[Any], on_commit: Any) -> None:
    host = register()
    with on_commit():
        host_cordon(host, actor="ann")
        host_maintenance_set(host, on=True, actor="bob", note="new fan")
        host_maintenance_set(host, on=False, actor="bob")
        host_uncordon(host, actor="ann")
    assert acts == [
        ("ann", "host.cordon", "host-a"),
        ("bob", "host.maintenance_on", "host-a"),
        ("bob", "host.maintenance_off", "host-a"),
        ("ann", "host.uncordon", "host-a"),
    ]


def test_maintenance_cordons_and_its_end_leaves_the_cordon_to_the_operator() -> None:
    host = register()
    host_maintenance_set(host, on=True, actor="bob", note="x" * 500)
    host.refresh_from_db()
    assert host.cordoned and host.maintenance and len(host.note) == 255
    host_maintenance_set(host, on=False, actor="bob")
    host.refresh_from_db()
    assert host.cordoned and not host.maintenance
    host_uncordon(host, actor="bob")
    host.refresh_from_db()
    assert not host.cordoned


def test_an_audit_that_fails_does_not_undo_the_act(on_commit: Any, caplog: pytest.LogCaptureFixture) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("no audit")

    events.acted.connect(fail)
    try:
        with on_commit():
            host_cordon(register(), actor="ann")
    finally:
        events.acted.disconnect(fail)
    assert Host.objects.get().cordoned and "no audit" in caplog.text


# -- GPUs --------------------------------------------------------------------------------------------------------------


def test_new_cards_are_entered_with_a_policy() -> None:
    host = register()
    changed = gpus_sync(host, readings=[reading(), reading("GPU-b", 1)])
    assert [gpu.uuid for gpu in changed] == ["GPU-a", "GPU-b"]
    assert GpuPolicy.objects.count() == 2
    assert gpus_sync(host, readings=[reading(), reading("GPU-b", 1)]) == []


def test_gaps_and_changes_of_index_are_taken_over() -> None:
    """SZ-017, SZ-019: the UUID is the card, the index is display."""
    host = register()
    gpus_sync(host, readings=[reading("GPU-a", 0), reading("GPU-c", 2), reading("GPU-d", 3)])
    gpus_sync(host, readings=[reading("GPU-c", 0), reading("GPU-a", 1), reading("GPU-d", 3)])
    assert dict(Gpu.objects.values_list("uuid", "index")) == {"GPU-a": 1, "GPU-c": 0, "GPU-d": 3}


def test_a_card_with_an_error_is_faulty_with_the_reason_and_since_when() -> None:
    host = register()
    gpus_sync(host, readings=[reading()])
    (gpu,) = gpus_sync(host, readings=[reading(error="XID 48: a memory error", name="?", total_bytes=0)])
    gpu.refresh_from_db()
    assert (gpu.state, gpu.state_reason) == (Gpu.State.FAULTY, "XID 48: a memory error")
    assert (gpu.name, gpu.total_bytes) == ("H100", 80 * GIB), "a card in error keeps its name and size"
    since = gpu.state_since
    assert gpus_sync(host, readings=[reading(error="XID 48: a memory error")]) == []
    gpus_sync(host, readings=[reading(error="XID 79: off the bus")])
    gpu.refresh_from_db()
    assert gpu.state_since == since and gpu.state_reason.startswith("XID 79")


def test_a_card_that_is_not_listed_is_missing_and_ok_when_it_returns() -> None:
    host = register()
    gpus_sync(host, readings=[reading(), reading("GPU-b", 1)])
    (gone,) = gpus_sync(host, readings=[reading()])
    assert (gone.uuid, gone.state) == ("GPU-b", Gpu.State.MISSING) and "lists 1 GPUs" in gone.state_reason
    assert gpus_sync(host, readings=[reading()]) == []
    (back,) = gpus_sync(host, readings=[reading(), reading("GPU-b", 1)])
    assert (back.state, back.state_reason) == (Gpu.State.OK, "")


def test_a_missing_card_was_last_seen_when_it_was_seen() -> None:
    host = register()
    gpus_sync(host, readings=[reading()])
    seen = Gpu.objects.get().seen_at
    gpus_sync(host, readings=[reading(error="lost", missing=True)])
    assert Gpu.objects.get().seen_at == seen


def test_a_cordon_and_a_policy_outlive_a_fault() -> None:
    host = register()
    gpus_sync(host, readings=[reading()])
    gpu = Gpu.objects.get()
    gpu_cordon(gpu, actor="ann")
    gpu_policy_set(gpu, actor="ann", reserve_bytes=8 * GIB)
    gpus_sync(host, readings=[])
    gpus_sync(host, readings=[reading()])
    gpu = Gpu.objects.select_related("policy").get()
    assert gpu.cordoned and gpu.policy.reserve_bytes == 8 * GIB
    gpu_uncordon(gpu, actor="ann")
    assert not Gpu.objects.get().cordoned


def test_cards_of_another_host_are_left_alone() -> None:
    one, two = register("host-a"), register("host-b")
    gpus_sync(one, readings=[reading("GPU-a")])
    gpus_sync(two, readings=[reading("GPU-b")])
    gpus_sync(one, readings=[reading("GPU-a")])
    assert dict(Gpu.objects.values_list("uuid", "state")) == {"GPU-a": "ok", "GPU-b": "ok"}


def test_a_card_moved_to_another_host_keeps_its_row() -> None:
    one, two = register("host-a"), register("host-b")
    gpus_sync(one, readings=[reading()])
    gpus_sync(two, readings=[reading()])
    gpu = Gpu.objects.get()
    assert gpu.host_id == two.pk and gpu.state_reason == "moved here from another host"


# -- policies ----------------------------------------------------------------------------------------------------------


def test_an_impossible_policy_is_refused_with_the_numbers() -> None:
    gpu = make_gpu(host=make_host(), total_bytes=80 * GIB)
    claims = [
        Claim(name="a", baseline_bytes=30 * GIB, guarantee_bytes=20 * GIB),
        Claim(name="b", baseline_bytes=20 * GIB),
    ]
    gpu_policy_set(gpu, actor="ann", reserve_bytes=10 * GIB, claims=claims)
    with pytest.raises(ImpossiblePolicy, match=r"1\.0 GiB more than the card's 80\.0 GiB"):
        gpu_policy_set(gpu, actor="ann", reserve_bytes=11 * GIB, claims=claims)
    assert GpuPolicy.objects.get(gpu=gpu).reserve_bytes == 10 * GIB


@pytest.mark.parametrize("values", [{"reserve_bytes": -1}, {"reserve_bytes": 80 * GIB}, {"rebalance": "maybe"}])
def test_nonsense_is_no_policy(values: dict[str, Any]) -> None:
    gpu = make_gpu(host=make_host(), total_bytes=80 * GIB)
    with pytest.raises(ImpossiblePolicy):
        gpu_policy_set(gpu, actor="ann", **values)


def test_a_hold_has_an_end_and_an_owner() -> None:
    host = make_host()
    gpus = [make_gpu(host=host, uuid=f"G{index}", index=index) for index in range(2)]
    assert gpu_hold(gpus, actor="ann", seconds=600) == 2
    for policy in GpuPolicy.objects.all():
        assert policy.held_by == "ann" and policy.held_until is not None and policy.held_until > timezone.now()
    gpu_hold_end(gpus, actor="bob")
    assert not GpuPolicy.objects.exclude(held_until=None).exists()


def test_acts_on_cards_are_noted(acts: list[Any], on_commit: Any) -> None:
    gpu = make_gpu(host=make_host())
    with on_commit():
        gpu_cordon(gpu, actor="ann")
        gpu_policy_set(gpu, actor="ann", rebalance="on")
        gpu_hold([gpu], actor="ann", seconds=5)
    assert [action for _, action, _ in acts] == ["gpu.cordon", "gpu.policy", "gpu.hold"]


# -- readings ----------------------------------------------------------------------------------------------------------


def rollup(uuid: str = "GPU-a", second: int = 0, used: int = GIB, resolution_s: int = 10) -> RollUp:
    return RollUp(uuid, datetime.fromtimestamp(1_800_000_000 + second, UTC), resolution_s, used)


def test_rows_are_written_in_one_transaction_and_twice_is_once(django_assert_max_num_queries: Any) -> None:
    host = make_host()
    for name in ("GPU-a", "GPU-b"):
        make_gpu(host=host, uuid=name, index=0 if name == "GPU-a" else 1)
    with django_assert_max_num_queries(5):
        assert samples_record([rollup("GPU-a"), rollup("GPU-b"), rollup("GPU-unknown")]) == 2
    samples_record([rollup("GPU-a", used=2 * GIB)])
    assert GpuSample.objects.count() == 2
    assert GpuSample.objects.get(gpu__uuid="GPU-a").used_bytes == 2 * GIB


def test_nothing_to_write_is_no_query(django_assert_num_queries: Any) -> None:
    with django_assert_num_queries(0):
        assert samples_record([]) == 0


def test_tens_are_kept_for_a_day_and_minutes_for_a_month(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "PRUNE_BATCH", 2)
    gpu = make_gpu(host=make_host())
    now = timezone.now()
    for days, resolution_s in ((0.5, 10), (2, 10), (3, 10), (4, 10), (2, 60), (40, 60)):
        GpuSample.objects.create(gpu=gpu, at=now - timedelta(days=days), resolution_s=resolution_s, used_bytes=1)
    assert samples_prune() == 4
    left = sorted(GpuSample.objects.values_list("resolution_s", flat=True))
    assert left == [10, 60]
    assert prune() == 0


@pytest.mark.django_db(transaction=True)
def test_worker_and_sampler_that_register_at_once_make_one_row() -> None:
    failures: list[Exception] = []

    def go(number: int) -> None:
        try:
            register(versions={f"part{number}": "1"})
        except Exception as exc:
            failures.append(exc)
        finally:
            connection.close()

    threads = [threading.Thread(target=go, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(Host.objects.get().versions) == 6
