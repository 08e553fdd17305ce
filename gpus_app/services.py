"""Verbs on hosts, GPUs and their readings. Arguments after the first are keyword-only; times are the database's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from django.db import transaction
from django.db.models.functions import Now
from django.utils import timezone

from gpus_app.errors import ImpossiblePolicy
from gpus_app.events import publish_gpus_on_commit, report_act_on_commit
from gpus_app.models import Gpu, GpuPolicy, GpuSample, Host
from gpus_app.policies.claims import Claim, check_card
from gpus_app.probes.base import GpuReading
from gpus_app.probes.grades import Grade

#: How long rolled-up readings are kept, by their resolution in seconds.
KEEP_SAMPLES = {10: timedelta(days=1), 60: timedelta(days=30)}
PRUNE_BATCH = 5000
#: Who closes a faulty card.
PROBE_ACTOR = "sampler"


@dataclass(frozen=True, slots=True)
class RollUp:
    """The mean of one GPU's readings over ``resolution_s`` seconds from ``at``."""

    uuid: str
    at: datetime
    resolution_s: int
    used_bytes: int
    utilization_percent: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    instances: list[dict[str, Any]] = field(default_factory=list)


# -- hosts -------------------------------------------------------------------------------------------------------------


def host_register(
    name: str,
    *,
    address: str,
    engine_kind: str,
    versions: dict[str, str] | None = None,
    total_ram_bytes: int = 0,
    boot_id: str = "",
) -> Host:
    """Enter this machine under its stable name, or bring its row up to date; never a second row for one name.

    Versions are merged, because worker and sampler each know some of them.
    """
    with transaction.atomic():
        host, created = Host.objects.select_for_update().get_or_create(
            name=name, defaults={"address": address, "engine_kind": engine_kind}
        )
        before = _facts(host)
        host.address, host.engine_kind = address, engine_kind
        host.versions = {**host.versions, **(versions or {})}
        host.total_ram_bytes = total_ram_bytes or host.total_ram_bytes
        host.boot_id = boot_id or host.boot_id
        if created or _facts(host) != before:
            host.save(update_fields=["address", "engine_kind", "versions", "total_ram_bytes", "boot_id"])
            publish_gpus_on_commit(name)
    return host


def _facts(host: Host) -> tuple[Any, ...]:
    versions = json.dumps(host.versions, sort_keys=True)
    return host.address, host.engine_kind, versions, host.total_ram_bytes, host.boot_id


def host_heartbeat(
    name: str,
    *,
    source: Literal["worker", "sampler"],
    available_ram_bytes: int | None = None,
    shm_bytes: tuple[int, int] | None = None,
) -> bool:
    """Note, on the database's clock, that the host's worker or sampler lives. False: no such host is entered.

    ``shm_bytes``: total and free, of ``/dev/shm``.
    """
    changes: dict[str, Any] = {f"{source}_seen_at": Now()}
    if available_ram_bytes is not None:
        changes["available_ram_bytes"] = available_ram_bytes
    if shm_bytes is not None:
        changes["total_shm_bytes"], changes["available_shm_bytes"] = shm_bytes
    return bool(Host.objects.filter(name=name).update(**changes))


def host_cordon(host: Host, *, actor: str, note: str = "") -> None:
    """No new instances on this host; what runs stays."""
    _host_set(host, actor=actor, action="host.cordon", cordoned=True, note=note)


def host_uncordon(host: Host, *, actor: str) -> None:
    """Open the host again; ends maintenance too."""
    _host_set(host, actor=actor, action="host.uncordon", cordoned=False, maintenance=False, note="")


def host_maintenance_set(host: Host, *, on: bool, actor: str, note: str = "") -> None:
    """Being worked on: cordoned, and nothing that ends here is started again until maintenance is over."""
    changes: dict[str, Any] = {"maintenance": on}
    if on:
        changes |= {"cordoned": True, "note": note}
    _host_set(host, actor=actor, action="host.maintenance_on" if on else "host.maintenance_off", **changes)


def _host_set(host: Host, *, actor: str, action: str, **changes: Any) -> None:
    if "note" in changes:
        changes["note"] = changes["note"][:255]
    with transaction.atomic():
        Host.objects.filter(pk=host.pk).update(**changes)
        for name, value in changes.items():
            setattr(host, name, value)
        publish_gpus_on_commit(host.name)
        report_act_on_commit(actor=actor, action=action, target=host.name, detail=changes.get("note", ""))


# -- GPUs --------------------------------------------------------------------------------------------------------------


def gpus_sync(host: Host, *, readings: Sequence[GpuReading]) -> list[Gpu]:
    """Bring the host's GPU rows in line with what the driver lists; returns those that are new or changed state.

    Adds new cards, marks those that are no longer listed ``missing`` and those with an error ``faulty`` with the
    reason, and both ``ok`` again when they answer. A fatal fault cordons the card, until an operator opens it again:
    whether it was reset is not for us to know. Each fault goes to the audit. A card known by its UUID that turns up in
    another host moves there.
    """
    by_uuid = {reading.uuid: reading for reading in readings}
    now = timezone.now()
    changed: list[Gpu] = []
    with transaction.atomic():
        known = {gpu.uuid: gpu for gpu in Gpu.objects.select_for_update().filter(uuid__in=by_uuid)}
        for reading in readings:
            gpu = known.get(reading.uuid)
            if gpu is None:
                gpu = Gpu.objects.create(
                    uuid=reading.uuid,
                    host=host,
                    index=reading.index,
                    name=reading.name[:128],
                    total_bytes=reading.total_bytes,
                    seen_at=now,
                )
                GpuPolicy.objects.create(gpu=gpu)
                if _judge(gpu, reading, now):
                    gpu.save()
                changed.append(gpu)
                continue
            moved = gpu.host_id != host.pk
            identity = (gpu.host_id, gpu.index, gpu.name, gpu.total_bytes)
            gpu.host = host
            if reading.error is None:  # a card in error may have lost its name and size
                gpu.index, gpu.name, gpu.total_bytes = reading.index, reading.name[:128], reading.total_bytes
            if not reading.missing:
                gpu.seen_at = now
            altered = _judge(gpu, reading, now) or identity != (gpu.host_id, gpu.index, gpu.name, gpu.total_bytes)
            if moved and reading.error is None:
                gpu.state_reason = "moved here from another host"
            gpu.save()
            if altered:
                changed.append(gpu)
        gone = Gpu.objects.select_for_update().filter(host=host).exclude(uuid__in=by_uuid)
        for gpu in gone.exclude(state=Gpu.State.MISSING):
            gpu.state, gpu.state_since = Gpu.State.MISSING, now
            gpu.state_reason = f"The driver lists {len(by_uuid)} GPUs and this one is not among them."
            gpu.grade = Grade.FATAL
            _condemn(gpu)
            gpu.save(update_fields=["state", "state_reason", "state_since", "grade", "cordoned", "cordon_reason"])
            changed.append(gpu)
        if changed:
            publish_gpus_on_commit(host.name)
    return changed


def _judge(gpu: Gpu, reading: GpuReading, now: datetime) -> bool:
    """Set the state that the reading shows; whether it is another than before."""
    if reading.error is None:
        state, reason = Gpu.State.OK, ""
    else:
        state, reason = (Gpu.State.MISSING if reading.missing else Gpu.State.FAULTY), reading.error[:500]
    if gpu.state == state and (state == Gpu.State.OK or gpu.state_reason == reason):
        return False
    if gpu.state != state:
        gpu.state_since = now
    worse = reading.grade != gpu.grade or gpu.state == Gpu.State.OK
    gpu.state, gpu.state_reason, gpu.grade = state, reason, reading.grade
    if state != Gpu.State.OK and worse:
        _condemn(gpu)
    return True


def _condemn(gpu: Gpu) -> None:
    """A new fault, or a worse one: it goes to the audit, and a fatal one closes the card."""
    if gpu.grade == Grade.FATAL and not gpu.cordoned:
        gpu.cordoned, gpu.cordon_reason = True, gpu.state_reason[:500]
    report_act_on_commit(actor=PROBE_ACTOR, action="gpu.fault", target=str(gpu), detail=gpu.state_reason)


def gpu_cordon(gpu: Gpu, *, actor: str) -> None:
    """No new instances on this GPU; what runs stays."""
    _gpu_set(gpu, actor=actor, action="gpu.cordon", cordoned=True)


def gpu_uncordon(gpu: Gpu, *, actor: str) -> None:
    _gpu_set(gpu, actor=actor, action="gpu.uncordon", cordoned=False, cordon_reason="")


def _gpu_set(gpu: Gpu, *, actor: str, action: str, **changes: Any) -> None:
    with transaction.atomic():
        Gpu.objects.filter(pk=gpu.pk).update(**changes)
        for name, value in changes.items():
            setattr(gpu, name, value)
        publish_gpus_on_commit(gpu.host.name)
        report_act_on_commit(actor=actor, action=action, target=str(gpu))


# -- policies ----------------------------------------------------------------------------------------------------------


def gpu_policy_set(
    gpu: Gpu,
    *,
    actor: str,
    reserve_bytes: int | None = None,
    rebalance: str | None = None,
    claims: Iterable[Claim] = (),
    headroom_bytes: int = 0,
) -> GpuPolicy:
    """Set what the controller may do on one GPU.

    ``claims`` and ``headroom_bytes``: what its instances are owed, and what kvcached leaves free on it; gathered by
    the caller.

    Raises ImpossiblePolicy, with the numbers, when reserve, weights and guarantees exceed the card.
    """
    if rebalance is not None and rebalance not in GpuPolicy.Rebalance.values:
        raise ImpossiblePolicy(f"{rebalance!r} is not one of {', '.join(GpuPolicy.Rebalance.values)}.")
    with transaction.atomic():
        policy, _ = GpuPolicy.objects.select_for_update().get_or_create(gpu=gpu)
        if reserve_bytes is not None:
            check_card(gpu.total_bytes, reserve_bytes=reserve_bytes, headroom_bytes=headroom_bytes, claims=claims)
            policy.reserve_bytes = reserve_bytes
        if rebalance is not None:
            policy.rebalance = rebalance
        policy.save()
        publish_gpus_on_commit(gpu.host.name)
        report_act_on_commit(
            actor=actor,
            action="gpu.policy",
            target=str(gpu),
            detail=f"reserve {policy.reserve_bytes} bytes, rebalance {policy.rebalance}",
        )
    return policy


def gpu_hold(gpus: Iterable[Gpu], *, actor: str, seconds: float) -> int:
    """The controller changes nothing on these GPUs for so long; how many it holds for."""
    until = timezone.now() + timedelta(seconds=seconds)
    return _hold(gpus, actor=actor, action="gpu.hold", held_until=until, held_by=actor[:150])


def gpu_hold_end(gpus: Iterable[Gpu], *, actor: str) -> int:
    return _hold(gpus, actor=actor, action="gpu.hold_end", held_until=None, held_by="")


def _hold(gpus: Iterable[Gpu], *, actor: str, action: str, **changes: Any) -> int:
    rows = list(gpus)
    with transaction.atomic():
        for gpu in rows:
            GpuPolicy.objects.update_or_create(gpu=gpu, defaults=changes)
            report_act_on_commit(actor=actor, action=action, target=str(gpu))
        for host_name in sorted({gpu.host.name for gpu in rows}):
            publish_gpus_on_commit(host_name)
    return len(rows)


# -- readings ----------------------------------------------------------------------------------------------------------


def samples_record(rollups: Sequence[RollUp]) -> int:
    """Write rolled-up readings in one transaction; how many rows. Those of unknown GPUs are left out; twice is once."""
    if not rollups:
        return 0
    with transaction.atomic():
        ids = dict(Gpu.objects.filter(uuid__in={row.uuid for row in rollups}).values_list("uuid", "pk"))
        rows = [
            GpuSample(
                gpu_id=ids[row.uuid],
                at=row.at,
                resolution_s=row.resolution_s,
                used_bytes=row.used_bytes,
                utilization_percent=row.utilization_percent,
                temperature_c=row.temperature_c,
                power_w=row.power_w,
                instances=row.instances,
            )
            for row in rollups
            if row.uuid in ids
        ]
        GpuSample.objects.bulk_create(
            rows,
            update_conflicts=True,
            unique_fields=["gpu", "resolution_s", "at"],
            update_fields=["used_bytes", "utilization_percent", "temperature_c", "power_w", "instances"],
        )
    return len(rows)


def samples_prune(*, now: datetime | None = None) -> int:
    """Delete readings past their time, in batches that hold no lock for long; how many rows went."""
    now = now or timezone.now()
    deleted = 0
    for resolution_s, keep in KEEP_SAMPLES.items():
        old = GpuSample.objects.filter(resolution_s=resolution_s, at__lt=now - keep).order_by("pk")
        while ids := list(old.values_list("pk", flat=True)[:PRUNE_BATCH]):
            deleted += GpuSample.objects.filter(pk__in=ids).delete()[0]
    return deleted
