"""The least harmful way to free bytes on one GPU, and to keep them free.

Bytes count as free for a newcomer when NVML shows them and when nobody may take them back: an instance's claim is its
baseline and the larger of its limit and its footprint, so what goes first is what a limit allows and nobody uses.
Measures are taken in the order of ``Harm``; within one, lower priorities first; then what turned out to be
unnecessary is given up again, the most harmful first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gpus_app.policies.acts import (
    NOTHING,
    Act,
    Acts,
    Card,
    card_of,
    footprint_after,
    harm_of,
    held_after,
    limit_after,
    limits_after,
    steps_of,
    trim_step,
    trimmable,
)
from gpus_app.policies.base import GpuView, Harm, InstanceView, Plan, Step, StepKind, gib, round_up

#: A busy instance that only loses unused room keeps this much to grow into.
BUSY_MARGIN_BUNDLES = 2


def make_room(
    gpu: GpuView,
    instances: Sequence[InstanceView],
    need_bytes: int,
    now: float,
    *,
    priority: int = 50,
    minimum_residence_s: float = 60.0,
    max_harm: Harm = Harm.STOP_BUSY,
) -> Plan:
    """Steps after which ``need_bytes`` are free on the card and stay free, beside what the card keeps.

    ``priority`` is the newcomer's: busy instances of a higher one are not squeezed or stopped. Pinned instances are
    never put to sleep or stopped, nor is anyone who is ready for less than ``minimum_residence_s``. Measures beyond
    ``max_harm`` are not taken. When it is impossible the plan has no steps and says what stands in the way.
    """
    card = card_of(gpu, instances)
    stages = _stages(card, now, priority, minimum_residence_s, max_harm)
    acts: Acts = {}
    for stage in stages:
        if card.room(acts) >= need_bytes:
            break
        stage(acts, need_bytes)
    room = card.room(acts)
    if room < need_bytes:
        return Plan(
            gpu_uuid=gpu.uuid,
            feasible=False,
            sentence=_impossible(card, acts, need_bytes, room, now, minimum_residence_s),
            targets=limits_after(card, {}),
            need_bytes=need_bytes,
            room_bytes=card.room({}),
            largest_bytes=max(room, 0),
        )
    acts = _only_what_is_needed(card, acts, need_bytes)
    everything: Acts = {}
    for stage in stages:
        stage(everything, 2 * gpu.total_bytes)
    steps = steps_of(card, acts, now)
    return Plan(
        gpu_uuid=gpu.uuid,
        steps=steps,
        targets=limits_after(card, acts),
        sentence=_summary(steps, need_bytes, card),
        need_bytes=need_bytes,
        room_bytes=card.room(acts),
        largest_bytes=max(card.room(everything), 0),
    )


def trim_all(gpu: GpuView, instances: Sequence[InstanceView]) -> Plan:
    """Drop every cached prefix and reserved page on the card; limits stay as they are."""
    card = card_of(gpu, instances)
    acts = {row.id: Act(trim=True) for row in card.rows if row.elastic and trimmable(row)}
    steps = tuple(trim_step(row) for row in card.rows if row.id in acts)
    return Plan(
        gpu_uuid=gpu.uuid,
        steps=steps,
        targets=limits_after(card, acts),
        sentence=f"{gib(sum(step.expected_bytes for step in steps))} of caches and reserved pages can go."
        if steps
        else "There is nothing to trim.",
        room_bytes=card.room(acts),
    )


def shrink_idle(gpu: GpuView, instances: Sequence[InstanceView], now: float) -> Plan:
    """Bring every idle instance of the card down to its lowest limit: guarantee or safety floor."""
    card = card_of(gpu, instances)
    acts = {
        row.id: Act(limit=row.lowest_bytes)
        for row in card.rows
        if row.elastic and row.idle and row.limit_bytes > row.lowest_bytes
    }
    steps = steps_of(card, acts, now)
    return Plan(
        gpu_uuid=gpu.uuid,
        steps=steps,
        targets=limits_after(card, acts),
        sentence=f"{len(steps)} idle instances go down to their lowest limit."
        if steps
        else "No idle instance can shrink.",
        room_bytes=card.room(acts),
    )


# -- measures, in the order of their harm ------------------------------------------------------------------------------

_Stage = Callable[[Acts, int], None]


def _stages(card: Card, now: float, priority: int, residence_s: float, max_harm: Harm) -> list[_Stage]:
    rows = card.rows
    elastic = [row for row in rows if row.elastic]
    idle = [row for row in elastic if row.idle]
    busy = [row for row in elastic if not row.idle]
    lesser = [row for row in busy if row.priority <= priority]
    settled = [row for row in rows if not row.pinned and _settled(row, now, residence_s)]
    sleepers = [row for row in settled if row.sleepable and row.idle and not row.asleep]
    stages: list[tuple[Harm, _Stage]] = [
        (Harm.NONE, _limits_stage(card, idle, lambda row: row.footprint_bytes)),
        (Harm.IDLE_CACHE, _caches_stage(card, idle)),
        (Harm.ALLOWANCE, _limits_stage(card, busy, _with_margin)),
        (Harm.CACHE, _caches_stage(card, lesser)),
        (Harm.SQUEEZE, _limits_stage(card, lesser, lambda row: 0)),
        (Harm.SLEEP, _victims_stage(card, sleepers, Act(sleep=True))),
        (Harm.STOP_IDLE, _victims_stage(card, [row for row in settled if row.idle], Act(stop=True))),
        (
            Harm.STOP_BUSY,
            _victims_stage(card, [row for row in settled if not row.idle and row.priority <= priority], Act(stop=True)),
        ),
    ]
    return [stage for harm, stage in stages if harm <= max_harm]


def _settled(row: InstanceView, now: float, residence_s: float) -> bool:
    """Whether it may be a victim: never while starting, nor just after."""
    return row.asleep or (row.ready_since is not None and now - row.ready_since >= residence_s)


def _with_margin(row: InstanceView) -> int:
    return row.footprint_bytes + BUSY_MARGIN_BUNDLES * row.bundle_bytes


def _by_priority(rows: Sequence[InstanceView]) -> list[list[InstanceView]]:
    levels = sorted({row.priority for row in rows})
    return [[row for row in rows if row.priority == level] for level in levels]


def _limits_stage(card: Card, rows: Sequence[InstanceView], keep: Callable[[InstanceView], int]) -> _Stage:
    """Lower limits, at most to what ``keep`` leaves: of one priority the largest first, down to one level."""

    def run(acts: Acts, need: int) -> None:
        for group in _by_priority(rows):
            low, high = 0, max(limit_after(row, acts) for row in group)
            # The highest level that is enough; if none is, the bottom.
            while low < high and card.room(acts) < need:
                level = (low + high + 1) // 2
                enough = card.room(_lowered(acts, group, level, keep)) >= need
                low, high = (level, high) if enough else (low, level - 1)
            if card.room(acts) < need:
                acts.update(_lowered(acts, group, low, keep))

    return run


def _lowered(acts: Acts, group: Sequence[InstanceView], level: int, keep: Callable[[InstanceView], int]) -> Acts:
    changed = dict(acts)
    for row in group:
        whole = level // row.bundle_bytes * row.bundle_bytes
        limit = limit_after(row, acts)
        to = min(limit, max(row.lowest_bytes, round_up(keep(row), row.bundle_bytes), whole))
        act = acts.get(row.id, NOTHING)
        if to < limit or (keep(row) < to < footprint_after(row, act)):
            changed[row.id] = replace(act, limit=to)
    return changed


def _caches_stage(card: Card, rows: Sequence[InstanceView]) -> _Stage:
    """Trim, the instance with most to give first, and bring its limit down to what is left so that it stays free."""

    def run(acts: Acts, need: int) -> None:
        for row in sorted(rows, key=lambda row: (row.priority, -trimmable(row), row.id)):
            if card.room(acts) >= need:
                return
            if not trimmable(row):
                continue
            to = max(row.lowest_bytes, round_up(footprint_after(row, Act(trim=True)), row.bundle_bytes))
            before = acts.get(row.id, NOTHING)
            acts[row.id] = replace(before, limit=to if to < limit_after(row, acts) else before.limit, trim=True)

    return run


def _victims_stage(card: Card, rows: Sequence[InstanceView], act: Act) -> _Stage:
    """Put to sleep or stop: of the lowest priority the smallest one that is enough, else the largest."""

    def run(acts: Acts, need: int) -> None:
        while card.room(acts) < need:
            gains = {
                row.id: card.room({**acts, row.id: act}) - card.room(acts) for row in rows if acts.get(row.id) != act
            }
            able = [row for row in rows if gains.get(row.id, 0) > 0]
            if not able:
                return
            able = _by_priority(able)[0]
            missing = need - card.room(acts)
            enough = [row for row in able if gains[row.id] >= missing]
            if enough:
                victim = min(enough, key=lambda row: (gains[row.id], row.id))
            else:
                victim = max(able, key=lambda row: (gains[row.id], -row.id))
            acts[victim.id] = act

    return run


def _only_what_is_needed(card: Card, acts: Acts, need: int) -> Acts:
    """Give up again what turned out not to be needed, the most harmful first."""
    acts = dict(acts)
    rows = {row.id: row for row in card.rows}
    for id_ in sorted(acts, key=lambda id_: (-harm_of(rows[id_], acts[id_]), -rows[id_].priority, id_)):
        row, act = rows[id_], acts[id_]
        without = {other: one for other, one in acts.items() if other != id_}
        if card.room(without) >= need:
            acts = without
            continue
        if act.stop or act.sleep:
            continue
        if act.trim and card.room({**acts, id_: replace(act, trim=False, limit=None)}) >= need:
            acts[id_] = act = replace(act, trim=False)
        limit = limit_after(row, acts)
        # Lower no further than necessary.
        low, high = limit // row.bundle_bytes, row.limit_bytes // row.bundle_bytes
        while low < high:
            middle = (low + high + 1) // 2
            enough = card.room({**acts, id_: replace(act, limit=middle * row.bundle_bytes)}) >= need
            low, high = (middle, high) if enough else (low, middle - 1)
        if low * row.bundle_bytes > limit:
            acts[id_] = replace(act, limit=low * row.bundle_bytes)
    return acts


def _summary(steps: Sequence[Step], need: int, card: Card) -> str:
    if not steps:
        return f"{gib(need)} are free and nobody else may take them."
    names = {row.id: row.name for row in card.rows}
    words = {StepKind.LOWER: "lower", StepKind.TRIM: "trim", StepKind.SLEEP: "put to sleep", StepKind.STOP: "stop"}
    parts = [f"{words[step.kind]} {names[step.instance_id]}" for step in steps if step.kind in words]
    return f"For {gib(need)}: {', '.join(parts)}."


def _impossible(card: Card, acts: Acts, need: int, room: int, now: float, residence_s: float) -> str:
    """What remains on the card after every measure, and by whose right."""
    gpu = card.gpu
    held = []
    if gpu.foreign_bytes > 0:
        names = f" ({', '.join(gpu.foreign_names[:3])})" if gpu.foreign_names else ""
        held.append(f"{gib(gpu.foreign_bytes)} by processes that are not ours{names}")
    if gpu.kept_bytes:
        held.append(f"{gib(gpu.kept_bytes)} kept as reserve")
    for row in sorted(card.rows, key=lambda row: (-held_after(row, acts.get(row.id, NOTHING)), row.id)):
        left = held_after(row, acts.get(row.id, NOTHING))
        if left <= 0:
            continue
        if row.pinned:
            right = "pinned"
        elif row.asleep or acts.get(row.id, NOTHING).sleep:
            right = "asleep"
        elif row.ready_since is None:
            right = "starting"
        elif not _settled(row, now, residence_s):
            right = f"ready for only {now - row.ready_since:.0f} s"
        elif not row.idle:
            right = f"working, priority {row.priority}"
        else:
            right = "idle"
        held.append(f"{gib(left)} by {row.name} ({right})")
    return (
        f"{gib(need)} are needed and {gib(max(room, 0))} of {gib(gpu.total_bytes)} can be made free at most. "
        f"The rest is held: {'; '.join(held)}."
    )
