"""The picture of all hosts: rows and readings joined to bars and table lines, in a fixed number of queries."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from django.utils import timezone

from gpus_app.models import Gpu, GpuPolicy, Host
from gpus_app.selectors import hosts_with_gpus, latest_all
from models_app.models import Instance, MemoryPolicy
from models_app.presentation.actions import Action, actions_for
from models_app.presentation.leftover_view import Holding, Leftover, leftovers_of, unclaimed_bytes
from models_app.presentation.memory_bar import Bar, Share, with_distinct_slots
from models_app.services.lifecycle.leftovers import orphans_shown
from models_app.services.memory.sleep_ram import SleepRam, sleep_ram
from models_app.states import OCCUPIES_GPU, DesiredState, InstanceState

#: A reading older than this is shown as old.
STALE_AFTER_S = 5.0


@dataclass(slots=True)
class Row:
    """One instance on one GPU, as a table line. ``reading`` is its part of the last record, empty when it has none."""

    instance: Instance
    gpu: Gpu | None
    share: Share
    reading: Mapping[str, Any] = field(default_factory=dict)
    actions: Sequence[Action] = ()
    more: Sequence[Action] = ()

    @property
    def key(self) -> str:
        return f"{self.instance.pk}-{self.gpu.pk if self.gpu else 0}"

    @property
    def label(self) -> str:
        return label_of(self.instance)

    @property
    def policy(self) -> MemoryPolicy | None:
        return getattr(self.instance.model, "memory_policy", None)

    @property
    def running(self) -> int | None:
        return self.reading.get("running")

    @property
    def waiting(self) -> int | None:
        return self.reading.get("waiting")

    @property
    def drift_bytes(self) -> int | None:
        """A limit that somebody else wrote into the segment."""
        return self.reading.get("drift")

    @property
    def outdated(self) -> bool:
        """It runs older options than those saved."""
        return 0 < self.instance.spec_revision < self.instance.model.spec_revision


@dataclass(slots=True)
class GpuCard:
    """One GPU with its bar and table."""

    gpu: Gpu
    policy: GpuPolicy | None
    reading: Mapping[str, Any] | None
    bar: Bar
    rows: list[Row] = field(default_factory=list)
    leftovers: list[Holding] = field(default_factory=list)

    @property
    def strangers_bytes(self) -> int:
        """Memory of processes that are neither an instance's nor a leftover of ours."""
        return max(0, self.bar.other_bytes - sum(one.bytes for one in self.leftovers))

    @property
    def held(self) -> bool:
        return bool(self.policy and self.policy.held_until and self.policy.held_until > timezone.now())


@dataclass(slots=True)
class HostCard:
    """One host with its GPUs. ``age_s``: of its last reading, None when there never was one."""

    host: Host
    reachable: bool
    age_s: float | None
    read_at: datetime | None
    cards: list[GpuCard] = field(default_factory=list)
    leftovers: list[Leftover] = field(default_factory=list)
    stale_segments: list[str] = field(default_factory=list)
    sleep_ram: SleepRam | None = None

    @property
    def stale(self) -> bool:
        return self.age_s is None or self.age_s > STALE_AFTER_S

    @property
    def versions(self) -> list[tuple[str, str]]:
        """Those that an operator asks for first."""
        known = self.host.versions
        return [(name, known[name]) for name in ("driver", "vllm", "kvcached") if known.get(name)]


@dataclass(slots=True)
class Board:
    """Everything that the GPUs page and the overview show. ``homeless``: live instances without a GPU yet."""

    hosts: list[HostCard]
    homeless: list[Row]
    broker_away: bool
    read_at: datetime

    @property
    def cards(self) -> list[GpuCard]:
        return [card for host in self.hosts for card in host.cards]

    @property
    def rows(self) -> list[Row]:
        return [row for card in self.cards for row in card.rows] + self.homeless


def label_of(instance: Instance) -> str:
    """The served model name, with the replica's number where there can be several."""
    name = instance.model.served_model_name
    return name if instance.model.replicas <= 1 and instance.replica_index == 0 else f"{name} #{instance.replica_index}"


def shown_instances() -> list[Instance]:
    """Live instances, and failed ones that should be running: one query."""
    rows = Instance.objects.select_related("model", "model__memory_policy", "host").order_by("pk")
    live = rows.live()
    failed = rows.filter(state=InstanceState.FAILED).exclude(desired_state=DesiredState.STOPPED)
    return list(live | failed)


def build_board(role: str | None, *, instances: Iterable[Instance] | None = None) -> Board:
    """Read hosts, instances and the last record of each host, and join them."""
    hosts = hosts_with_gpus()
    records = latest_all([host.name for host in hosts])
    by_gpu: dict[str, list[Instance]] = defaultdict(list)
    homeless: list[Row] = []
    for instance in shown_instances() if instances is None else instances:
        if instance.gpu_uuids:
            for uuid in instance.gpu_uuids:
                by_gpu[uuid].append(instance)
        else:
            homeless.append(make_row(instance, None, {}, role))
    orphans = orphans_shown([host.name for host in hosts]) if hosts else []
    rams = sleep_ram(hosts)
    found = []
    for host in hosts:
        record = records.get(host.name)
        readings = {gpu["uuid"]: gpu for gpu in record["gpus"]} if record else {}
        card = HostCard(
            host=host,
            reachable=host.reachable,
            age_s=record.get("age_s") if record else None,
            read_at=datetime.fromtimestamp(record["t"], UTC) if record else None,
            leftovers=leftovers_of(host.name, orphans, record),
            stale_segments=list(record.get("stale_segments") or ()) if record else [],
            sleep_ram=rams[host.name],
        )
        for gpu in host.gpus.all():
            found_here = make_card(gpu, readings.get(gpu.uuid), by_gpu.get(gpu.uuid, ()), role)
            card.cards.append(with_leftovers(found_here, card.leftovers))
        found.append(card)
    away = any(record.get("source") == "database" for record in records.values())
    return Board(found, homeless, away, timezone.now())


def build_card(gpu: Gpu, role: str | None) -> GpuCard:
    """One GPU alone."""
    record = latest_all([gpu.host.name]).get(gpu.host.name)
    reading = next((g for g in record["gpus"] if g["uuid"] == gpu.uuid), None) if record else None
    instances = [instance for instance in shown_instances() if gpu.uuid in instance.gpu_uuids]
    found = leftovers_of(gpu.host.name, orphans_shown([gpu.host.name]), record)
    return with_leftovers(make_card(gpu, reading, instances, role), found)


def with_leftovers(card: GpuCard, leftovers: Iterable[Leftover]) -> GpuCard:
    """The card with what no row claims on it."""
    uuid = card.gpu.uuid
    card.leftovers = [Holding(one, one.bytes_by_gpu[uuid]) for one in leftovers if uuid in one.bytes_by_gpu]
    return card


def make_card(gpu: Gpu, reading: Mapping[str, Any] | None, instances: Iterable[Instance], role: str | None) -> GpuCard:
    policy: GpuPolicy | None = getattr(gpu, "policy", None)
    parts = {part["id"]: part for part in reading["instances"]} if reading else {}
    rows = [make_row(instance, gpu, parts.get(instance.pk, {}), role) for instance in instances]
    shares = with_distinct_slots([row.share for row in rows])
    for row, share in zip(rows, shares, strict=True):
        row.share = share
    known = reading is not None and not reading.get("error")
    other = 0
    if reading is not None:
        other = (reading.get("other") or 0) + unclaimed_bytes(reading, (row.instance.pk for row in rows))
    bar = Bar(
        uuid=gpu.uuid,
        title=f"GPU {gpu.index} {gpu.name}",
        total_bytes=(reading or {}).get("total") or gpu.total_bytes,
        shares=shares,
        other_bytes=other,
        reserve_bytes=policy.reserve_bytes if policy else 0,
        known=known,
    )
    return GpuCard(gpu, policy, reading, bar, rows)


def make_row(instance: Instance, gpu: Gpu | None, reading: Mapping[str, Any], role: str | None) -> Row:
    main, more = actions_for(instance, role)
    return Row(instance, gpu, make_share(instance, reading), reading, main, more)


def make_share(instance: Instance, reading: Mapping[str, Any]) -> Share:
    """What the instance holds by its last reading, and the marks of its limit, guarantee and floor."""
    policy: MemoryPolicy | None = getattr(instance.model, "memory_policy", None)
    used, prealloc = reading.get("used") or 0, reading.get("prealloc") or 0
    baseline = reading.get("baseline")
    if baseline is None:
        baseline = max(0, (reading.get("resident") or 0) - used - prealloc)
    effective = reading.get("limit") or instance.effective_limit_bytes
    return Share(
        key=f"i{instance.pk}",
        label=label_of(instance),
        slot=instance.pk if instance.colour_slot is None else instance.colour_slot,
        baseline_bytes=baseline,
        used_bytes=used,
        prealloc_bytes=prealloc,
        reserved_bytes=instance.reserved_bytes if _is_claiming(instance) else 0,
        limit_bytes=instance.limit_bytes if instance.limit_bytes is not None else effective,
        effective_limit_bytes=effective,
        guarantee_bytes=policy.guarantee_bytes if policy else 0,
        floor_bytes=instance.safety_floor_bytes,
        href=f"/instances/{instance.pk}/",
        asleep=instance.state == InstanceState.SLEEPING,
    )


def _is_claiming(instance: Instance) -> bool:
    """While it starts, what it reserved and does not hold yet is drawn as promised."""
    return instance.state in OCCUPIES_GPU and instance.state in (InstanceState.SCHEDULED, InstanceState.STARTING)
