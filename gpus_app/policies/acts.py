"""What may be done to one instance to free memory, what that leaves of it, and the steps and words it makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpus_app.policies.base import MIB, GpuView, Harm, InstanceView, Step, StepKind, gib

#: What a sleeping engine keeps beside its KV memory when that was never measured: CUDA context and workspaces.
#: 1,075,838,976 bytes were seen with vLLM 0.24.0 on an H200.
ASLEEP_BYTES = 1026 * MIB


@dataclass(frozen=True, slots=True)
class Act:
    """What a plan does to one instance. ``limit`` None: as it is; the same as before: enforced now, being overdue."""

    limit: int | None = None
    trim: bool = False
    sleep: bool = False
    stop: bool = False


NOTHING = Act()
Acts = dict[int, Act]


@dataclass(frozen=True, slots=True)
class Card:
    """The card with its instances; evaluates what would be free after some acts."""

    gpu: GpuView
    rows: tuple[InstanceView, ...]
    free_bytes: int

    def room(self, acts: Acts) -> int:
        """Bytes that a newcomer can have for good: by claims, and by what NVML will show, the worse of the two."""
        gpu = self.gpu
        claimed = sum(held_after(row, acts.get(row.id, NOTHING)) for row in self.rows)
        mapped = sum(row.resident_bytes - resident_after(row, acts.get(row.id, NOTHING)) for row in self.rows)
        by_claims = gpu.total_bytes - gpu.foreign_bytes - claimed
        return min(by_claims, self.free_bytes + mapped) - gpu.kept_bytes


def card_of(gpu: GpuView, instances: Sequence[InstanceView]) -> Card:
    rows = tuple(sorted(instances, key=lambda row: row.id))
    free = gpu.free_bytes
    if free is None:
        free = gpu.total_bytes - gpu.foreign_bytes - sum(row.resident_bytes for row in rows)
    return Card(gpu, rows, free)


def trimmable(row: InstanceView) -> int:
    """Bytes that a trim gives back: reserved pages and cached prefixes. The one page in use at idle always stays.

    While no request is there, every page in use is a cached prefix, whether or not ``evictable_bytes`` is known.
    """
    stays = row.bundle_bytes if row.idle else max(row.used_bytes - row.evictable_bytes, row.bundle_bytes)
    return row.footprint_bytes - min(stays, row.used_bytes)


def footprint_after(row: InstanceView, act: Act) -> int:
    footprint = row.footprint_bytes - (trimmable(row) if act.trim else 0)
    return footprint if act.limit is None else min(footprint, act.limit)


def asleep_bytes(row: InstanceView) -> int:
    """Resident bytes of the instance while asleep: as measured, else context plus its smallest KV footprint."""
    asleep = row.asleep_bytes
    if asleep is None:
        asleep = ASLEEP_BYTES + min(row.footprint_bytes, row.bundle_bytes + row.prealloc_bytes)
    return min(asleep, row.resident_bytes)


def resident_after(row: InstanceView, act: Act) -> int:
    if act.stop:
        return 0
    if act.sleep:
        return asleep_bytes(row)
    return row.baseline_bytes + footprint_after(row, act)


def held_after(row: InstanceView, act: Act) -> int:
    """The claim on the card. One who is put to sleep for a newcomer gives up the claim to come back at once."""
    if act.stop or act.sleep:
        return resident_after(row, act)
    if not row.elastic:
        return row.held_bytes
    limit = row.limit_bytes if act.limit is None else act.limit
    return row.baseline_bytes + max(limit, footprint_after(row, act))


def limit_after(row: InstanceView, acts: Acts) -> int:
    limit = acts.get(row.id, NOTHING).limit
    return row.limit_bytes if limit is None else limit


# -- steps and words ---------------------------------------------------------------------------------------------------


def harm_of(row: InstanceView, act: Act) -> Harm:
    """The worst that the act does to the instance."""
    if act.stop:
        return Harm.STOP_IDLE if row.idle else Harm.STOP_BUSY
    if act.sleep:
        return Harm.SLEEP
    return max((step.harm for step in _limit_steps(row, act, 0.0)), default=Harm.NONE)


def limits_after(card: Card, acts: Acts) -> dict[int, int]:
    gone = {id_ for id_, act in acts.items() if act.stop or act.sleep}
    return {row.id: limit_after(row, acts) for row in card.rows if row.elastic and row.id not in gone}


def steps_of(card: Card, acts: Acts, now: float) -> tuple[Step, ...]:
    rows = {row.id: row for row in card.rows}
    steps: list[Step] = []
    for id_, act in acts.items():
        row = rows[id_]
        if act.stop or act.sleep:
            steps.append(_end(row, act, now))
        else:
            steps += _limit_steps(row, act, now)

    def rank(step: Step) -> tuple[int, int, int, bool]:
        # Of one instance the trim comes before the limit that keeps its bytes free.
        return step.harm, rows[step.instance_id].priority, step.instance_id, step.kind is not StepKind.TRIM

    return tuple(sorted(steps, key=rank))


def _limit_steps(row: InstanceView, act: Act, now: float) -> list[Step]:
    steps = []
    footprint = row.footprint_bytes
    if act.trim and trimmable(row):
        steps.append(trim_step(row))
        footprint = steps[0].to_bytes
    if act.limit is not None and (act.limit < row.limit_bytes or act.limit < footprint):
        steps.append(_lower(row, act.limit, footprint, bool(steps), now))
    return steps


def trim_step(row: InstanceView) -> Step:
    gain = trimmable(row)
    cached = min(row.evictable_bytes, gain)
    parts = [f"{gib(gain - cached)} of reserved pages"] if gain > cached else []
    parts += [f"{gib(cached)} of cached prefixes"] if cached else []
    return Step(
        kind=StepKind.TRIM,
        instance_id=row.id,
        from_bytes=row.footprint_bytes,
        to_bytes=row.footprint_bytes - gain,
        expected_bytes=gain,
        reason=f"{row.name} holds {' and '.join(parts)} that no request uses",
        harm=Harm.IDLE_CACHE if row.idle else Harm.CACHE,
    )


def _lower(row: InstanceView, to: int, footprint: int, trimmed: bool, now: float) -> Step:
    """``footprint``: what is mapped when this step's turn comes."""
    freed = max(0, footprint - to)
    if row.idle:
        harm = Harm.IDLE_CACHE if trimmed or freed else Harm.NONE
        idle_for = f"has been idle for {now - row.idle_since:.0f} s" if row.idle_since is not None else "is idle"
        reason = f"{row.name} {idle_for} and may still take {gib(row.limit_bytes - footprint)} more"
    elif freed:
        harm = Harm.SQUEEZE
        reason = (
            f"{row.name} is {gib(freed)} over its limit"
            if to == row.limit_bytes
            else (
                f"{row.name} (priority {row.priority}) uses {gib(row.used_bytes)} for {row.running} running requests; "
                f"those over {gib(to)} wait or are computed again"
            )
        )
    else:
        harm = Harm.CACHE if trimmed else Harm.ALLOWANCE
        reason = f"{row.name} uses {gib(footprint)} and may take {gib(row.limit_bytes - footprint)} more"
    if trimmed and not freed:
        reason = f"so that {row.name} does not take again what it gave back"
    return Step(
        kind=StepKind.LOWER,
        instance_id=row.id,
        from_bytes=row.limit_bytes,
        to_bytes=to,
        expected_bytes=freed,
        reason=reason,
        harm=harm,
        reclaim=row.reclaim if harm is Harm.SQUEEZE else "wait",
    )


def _end(row: InstanceView, act: Act, now: float) -> Step:
    to = asleep_bytes(row) if act.sleep else 0
    if row.asleep:
        state = "sleeps"
    elif not row.idle:
        state = f"has priority {row.priority}; its {row.running + row.waiting} requests are drained first"
    elif row.idle_since is not None:
        state = f"has been idle for {now - row.idle_since:.0f} s"
    else:
        state = "is idle"
    return Step(
        kind=StepKind.SLEEP if act.sleep else StepKind.STOP,
        instance_id=row.id,
        from_bytes=row.resident_bytes,
        to_bytes=to,
        expected_bytes=row.resident_bytes - to,
        reason=f"{row.name} {state} and holds {gib(row.resident_bytes)}",
        harm=harm_of(row, act),
    )
