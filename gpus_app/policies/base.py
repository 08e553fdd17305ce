"""What the policies are told and what they answer: one GPU, its instances, a step, a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

GIB = 1024**3
MIB = 1024**2
#: kvcached leaves this part of a card unmapped (KVCACHED_GPU_UTILIZATION, 0.95 by default).
KVCACHED_HEADROOM = 0.05


class StepKind(StrEnum):
    """What a step does to an instance. ``LOWER`` and ``RAISE`` set its KV limit to ``to_bytes``."""

    LOWER = "lower"
    RAISE = "raise"
    TRIM = "trim"
    SLEEP = "sleep"
    STOP = "stop"


class Harm(IntEnum):
    """How much the users of an instance notice of a step; plans take the smaller harm first."""

    NONE = 0  # a raise, or an idle instance loses room that it does not use
    IDLE_CACHE = 1  # an idle instance loses cached prefixes and reserved pages
    ALLOWANCE = 2  # a busy instance loses room that it does not use yet
    CACHE = 3  # a busy instance loses cached prefixes and reserved pages
    SQUEEZE = 4  # a busy instance gets less than it uses: requests wait or are recomputed
    SLEEP = 5  # the next request has to wake it
    STOP_IDLE = 6  # the next request finds it gone
    STOP_BUSY = 7  # requests are cut off after the drain


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """One card as the memory policies see it.

    ``foreign_bytes`` is held by processes that are none of ours; ``kv_headroom_bytes`` is what kvcached itself leaves
    unmapped at the top of the card (5 % by default), so that the larger of it and ``reserve_bytes`` is never handed
    out. ``free_bytes`` is the live reading, None when the card could not be read.
    """

    uuid: str
    total_bytes: int
    reserve_bytes: int = 0
    foreign_bytes: int = 0
    free_bytes: int | None = None
    kv_headroom_bytes: int = 0
    foreign_names: tuple[str, ...] = ()

    @property
    def kept_bytes(self) -> int:
        """Bytes of the card that no plan hands out."""
        return kept_bytes(self.reserve_bytes, self.kv_headroom_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceView:
    """One instance on one card: readings, rules and what may be done with it.

    ``adjustable`` says that its limit can be changed now (with kvcached, ready, answering). What is not (starting,
    asleep, without kvcached) holds the larger of ``reserved_bytes`` and what it has. ``evictable_bytes`` is the part of
    ``used_bytes`` that is only cached prefixes (0 when not known); ``used_bytes`` is as the segment says.
    """

    id: int
    name: str
    adjustable: bool = True
    asleep: bool = False
    baseline_bytes: int = 0
    used_bytes: int = 0
    prealloc_bytes: int = 0
    evictable_bytes: int = 0
    limit_bytes: int = 0
    capacity_bytes: int = 0
    bundle_bytes: int = 2 * MIB
    floor_bytes: int = 0
    full_context_bytes: int = 0  # limit at which one request of the longest allowed length fits; 0: not known
    reserved_bytes: int = 0
    running: int = 0
    waiting: int = 0
    guarantee_bytes: int = 0
    maximum_bytes: int | None = None
    priority: int = 50
    idle_shrink_after_s: float | None = None
    reclaim: str = "wait"
    pinned: bool = False
    sleepable: bool = False
    asleep_bytes: int | None = None  # resident while asleep, when it was measured
    idle_since: float | None = None  # None while it works or when not known
    ready_since: float | None = None
    limit_set_at: float | None = None
    tensor_parallel_size: int = 1
    dies_below_use: bool = False  # kvcached 0.1.5 and the pull request's engines: a limit below use ends the engine

    @property
    def footprint_bytes(self) -> int:
        return self.used_bytes + self.prealloc_bytes

    @property
    def resident_bytes(self) -> int:
        return self.baseline_bytes + self.footprint_bytes

    @property
    def idle(self) -> bool:
        return self.running == 0 and self.waiting == 0

    @property
    def elastic(self) -> bool:
        """Whether a policy can move its limit: it may, and both bounds of a move are known."""
        return self.adjustable and not self.asleep and self.capacity_bytes > 0 and self.bundle_bytes > 0

    @property
    def lowest_bytes(self) -> int:
        """The limit that no policy goes under: guarantee, floor, two bundles; in whole bundles, at most capacity."""
        wanted = max(self.guarantee_bytes, self.floor_bytes, 2 * self.bundle_bytes)
        if self.dies_below_use:
            wanted = max(wanted, self.used_bytes + self.bundle_bytes)
        return min(round_up(wanted, self.bundle_bytes), max(self.capacity_bytes, 0))

    @property
    def highest_bytes(self) -> int:
        """The limit that no policy goes over: maximum and capacity, whole bundles, never under ``lowest_bytes``."""
        wanted = self.capacity_bytes if self.maximum_bytes is None else min(self.maximum_bytes, self.capacity_bytes)
        return max(wanted // self.bundle_bytes * self.bundle_bytes, self.lowest_bytes)

    @property
    def held_bytes(self) -> int:
        """What the instance has or may take without asking anyone: its claim on the card."""
        if not self.elastic:
            return max(self.reserved_bytes, self.resident_bytes)
        return self.baseline_bytes + max(self.limit_bytes, self.footprint_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One change of one instance.

    ``from_bytes``/``to_bytes``: limits for LOWER and RAISE, footprint for TRIM, resident bytes for SLEEP and STOP.
    ``expected_bytes`` is what NVML should show as freed by this step; a raise frees nothing.
    """

    kind: StepKind
    instance_id: int
    from_bytes: int
    to_bytes: int
    expected_bytes: int
    reason: str
    harm: Harm = Harm.NONE
    reclaim: str = "wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Steps in the order in which to take them; no RAISE before every LOWER is in force.

    ``feasible`` is False when the rules allow no way; ``sentence`` says so with numbers. ``targets`` holds the limit of
    every adjustable instance after the plan. ``room_bytes``: what a newcomer can have afterwards (make_room), or
    what is left to nobody (rebalance). ``largest_bytes``: the most that could be freed for a newcomer by every step
    that the rules allow.
    """

    gpu_uuid: str
    steps: tuple[Step, ...] = ()
    targets: Mapping[int, int] = field(default_factory=dict)
    feasible: bool = True
    sentence: str = ""
    need_bytes: int = 0
    room_bytes: int = 0
    largest_bytes: int = 0

    @property
    def harm(self) -> Harm:
        return max((step.harm for step in self.steps), default=Harm.NONE)

    @property
    def expected_bytes(self) -> int:
        return sum(step.expected_bytes for step in self.steps)


def kv_headroom_bytes(total_bytes: int, *, elastic: bool) -> int:
    """Bytes at the top of a card that kvcached never maps; 0 where nobody there runs with it (``elastic`` False)."""
    return int(total_bytes * KVCACHED_HEADROOM) if elastic else 0


def kept_bytes(reserve_bytes: int, headroom_bytes: int) -> int:
    """Bytes of a card that nobody is given: the larger of the reserve and kvcached's headroom.

    Plans, placement and the rules of operators all take this off, so that what one says fits, the others do not refuse.
    """
    return max(reserve_bytes, headroom_bytes)


def round_up(value: int, unit: int) -> int:
    """The next multiple of ``unit`` (a bundle) that is not under ``value``."""
    return -(-value // unit) * unit if unit > 0 else value


def gib(value: int | float) -> str:
    """Bytes for a sentence: ``12.3 GiB``; under a tenth of a GiB in MiB."""
    if abs(value) < GIB / 10:
        return f"{value / MIB:.0f} MiB"
    return f"{value / GIB:.1f} GiB"
