"""Divide the KV memory of one GPU among its instances: guarantees, then demand by priority, then what is left.

The targets follow from use, waiting requests and rules alone, never from the limits in force, so that the same load
leads to the same limits from wherever they are, and stays there. Hysteresis then leaves small differences alone; it is
given up where a neighbour needs the bytes. Lowered limits come before raised ones, and a raise is given only what is
not still mapped by somebody who is over his limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from gpus_app.policies.base import GpuView, Harm, InstanceView, Plan, Step, StepKind, gib, round_up

#: Differences below this part of the limit in force are left alone …
DEADBAND = 0.10
#: … and so is a limit that was set less than this many seconds ago, unless someone needs the bytes.
COOLDOWN_S = 20.0
#: An instance that uses this part of its limit, or has requests waiting, feels it.
PRESSED = 0.90
#: Room to grow until the next look, as part of the demand (1/8).
MARGIN = 8


def rebalance(gpu: GpuView, instances: Sequence[InstanceView], now: float) -> Plan:
    """The limits that the rules ask for, as the steps that lead there; no steps when all is well.

    After the plan, Σ (limit + baseline) of the elastic instances, what the others hold, foreign memory and what is kept
    fit on the card; when even guarantees and floors do not, the plan is not ``feasible`` and only lowers.
    """
    return rebalance_cards([(gpu, instances)], now)


def rebalance_cards(cards: Sequence[tuple[GpuView, Sequence[InstanceView]]], now: float) -> Plan:
    """The same for cards that share tensor-parallel instances, whose limit is one number for all of their cards.

    Each card gives such an instance what it can; the least of these counts, and the others divide the rest again.
    """
    rows = {row.id: row for _, instances in cards for row in instances}
    ideal = _ideal(cards, now)
    final = _settle(cards, ideal, now)
    lowers = [_lower(rows[id_], to, rows, final, now) for id_, to in final.items() if to < rows[id_].limit_bytes]
    granted = _grant(cards, final)
    raises = [_raise(rows[id_], to, now) for id_, to in granted.items()]
    lowers.sort(key=lambda step: (rows[step.instance_id].priority, step.instance_id))
    raises.sort(key=lambda step: (-rows[step.instance_id].priority, step.instance_id))
    targets = {id_: granted.get(id_, min(to, rows[id_].limit_bytes)) for id_, to in final.items()}
    problems = [text for gpu, instances in cards if (text := _problem(gpu, instances))]
    return Plan(
        gpu_uuid=",".join(gpu.uuid for gpu, _ in cards),
        steps=(*lowers, *raises),
        targets=targets,
        feasible=not problems,
        sentence=" ".join(problems) or _summary(lowers, raises, rows),
        room_bytes=min((_budget(gpu, inst) - _sum(targets, inst) for gpu, inst in cards), default=0),
    )


def awake_limits(cards: Sequence[tuple[GpuView, Sequence[InstanceView]]], now: float) -> dict[int, int]:
    """For each instance that its idle rule keeps small: the limit in bytes that the rules give it as soon as it works,
    as far as its longest request needs it.

    A request of that size may come in: it waits inside for the next look, which raises the limit.
    """
    resting = {row.id: row for _, rows in cards for row in rows if row.elastic and rests(row, now)}
    found = {}
    for id_, row in resting.items():
        awake = [
            (gpu, [replace(one, idle_since=None) if one.id == id_ else one for one in rows]) for gpu, rows in cards
        ]
        ideal = _ideal(awake, now)[id_]
        found[id_] = min(ideal, max(row.full_context_bytes, row.lowest_bytes)) if row.full_context_bytes else ideal
    return found


def _ideal(cards: Sequence[tuple[GpuView, Sequence[InstanceView]]], now: float) -> dict[int, int]:
    """The limit of every elastic instance that the rules want in the end, one number for all of its cards."""
    caps: dict[int, int] = {}
    shared = _shared(cards)
    ideal: dict[int, int] = {}
    for _ in range(1 + len(shared)):
        ideal = {}
        for gpu, instances in cards:
            for id_, target in _targets(gpu, [_capped(row, caps) for row in instances], now).items():
                ideal[id_] = min(ideal.get(id_, target), target)
        tighter = {id_: ideal[id_] for id_ in shared if id_ in ideal and ideal[id_] != caps.get(id_)}
        if not tighter:
            break
        caps |= tighter
    return ideal


def demand(row: InstanceView, now: float) -> int:
    """The limit that an instance could use now: its use, the requests that wait, and room to grow, in whole bundles;
    at least what its longest allowed request needs.

    Waiting requests count at the size of the running ones, together at most as much as is in use already: what is
    really wanted shows within a few rounds, and a queue that waits for something else cannot claim the card. When
    requests wait and none runs, the first may be longer than the limit allows: then it asks for its longest request,
    or, that not being known, for twice its limit (the one place where a target depends on a limit).
    """
    if rests(row, now):
        return row.lowest_bytes
    wanted = row.used_bytes
    if row.running and row.waiting:
        each = max(row.used_bytes // row.running, row.bundle_bytes)
        wanted += min(row.waiting * each, max(row.used_bytes, row.bundle_bytes))
    elif row.waiting:
        wanted = max(wanted, row.full_context_bytes or 2 * row.limit_bytes)
    wanted += max(wanted // MARGIN, 2 * row.bundle_bytes)
    # Below it the router has to refuse the longest requests, and what is refused is demand that nobody sees.
    wanted = max(wanted, row.full_context_bytes)
    return max(row.lowest_bytes, min(round_up(wanted, row.bundle_bytes), row.highest_bytes))


def rests(row: InstanceView, now: float) -> bool:
    """Whether its idle rule says that it shrinks to its lowest limit now."""
    if row.idle_shrink_after_s is None or row.idle_since is None or not row.idle:
        return False
    return now - row.idle_since >= row.idle_shrink_after_s


# -- targets -----------------------------------------------------------------------------------------------------------


def _elastic(instances: Iterable[InstanceView]) -> list[InstanceView]:
    return sorted((row for row in instances if row.elastic), key=lambda row: row.id)


def _budget(gpu: GpuView, instances: Iterable[InstanceView]) -> int:
    """KV bytes that the elastic instances can share. May be negative."""
    budget = gpu.total_bytes - gpu.kept_bytes - gpu.foreign_bytes
    for row in instances:
        budget -= row.baseline_bytes if row.elastic else row.held_bytes
    return budget


def _targets(gpu: GpuView, instances: Sequence[InstanceView], now: float) -> dict[int, int]:
    """The ideal limit of every elastic instance: what each is owed, demand by priority, then the rest for all."""
    rows = _elastic(instances)
    got = {row.id: row.lowest_bytes for row in rows}
    left = _budget(gpu, instances) - sum(got.values())
    if left <= 0:
        return got
    by_priority = sorted(rows, key=lambda row: (-row.priority, row.id))
    for _, group in groupby(by_priority, key=lambda row: row.priority):
        left -= _fill_level(list(group), got, left, now)
    _spread(rows, got, left, now)
    return got


def _fill_level(rows: list[InstanceView], got: dict[int, int], left: int, now: float) -> int:
    """Raise instances of one priority towards their demand, the poorest first; bytes given."""
    wants = {row.id: demand(row, now) for row in rows}
    needed = sum(wants[row.id] - got[row.id] for row in rows)
    if needed > left:
        # The highest level to which all can be lifted, each from what it is owed to what it wants.
        low, high = 0, max(wants.values())
        while low < high:
            level = (low + high + 1) // 2
            cost = sum(max(got[row.id], min(level, wants[row.id])) - got[row.id] for row in rows)
            low, high = (level, high) if cost <= left else (low, level - 1)
        for row in rows:
            whole = min(low, wants[row.id]) // row.bundle_bytes * row.bundle_bytes
            wants[row.id] = max(got[row.id], whole)
    given = 0
    for row in rows:
        given += wants[row.id] - got[row.id]
        got[row.id] = wants[row.id]
    return given


def _spread(rows: list[InstanceView], got: dict[int, int], left: int, now: float) -> None:
    """Hand out what nobody asks for: a limit is a ceiling, and a burst is served sooner under a high one."""
    room = {row.id: row.highest_bytes - got[row.id] for row in rows if not rests(row, now)}
    weight = {row.id: row.priority + 10 for row in rows}
    share: dict[int, int] = {}
    while room and left > 0:
        total = sum(weight[id_] for id_ in room)
        full = [id_ for id_, most in room.items() if most * total <= left * weight[id_]]
        if not full:
            share |= {id_: left * weight[id_] // total for id_ in room}
            break
        for id_ in full:
            share[id_] = room.pop(id_)
            left -= share[id_]
    for row in rows:
        more = share.get(row.id, 0)
        # lowest_bytes may be a capacity that is no whole number of bundles: the sum is what has to be whole.
        whole = (got[row.id] + more) // row.bundle_bytes * row.bundle_bytes
        got[row.id] = max(got[row.id], whole)


def _shared(cards: Sequence[tuple[GpuView, Sequence[InstanceView]]]) -> set[int]:
    seen: set[int] = set()
    twice: set[int] = set()
    for _, instances in cards:
        ids = {row.id for row in instances}
        twice |= seen & ids
        seen |= ids
    return twice


def _capped(row: InstanceView, caps: Mapping[int, int]) -> InstanceView:
    if row.id not in caps:
        return row
    cap = caps[row.id]
    return replace(row, maximum_bytes=cap if row.maximum_bytes is None else min(cap, row.maximum_bytes))


# -- hysteresis --------------------------------------------------------------------------------------------------------


def _settle(
    cards: Sequence[tuple[GpuView, Sequence[InstanceView]]], ideal: Mapping[int, int], now: float
) -> dict[int, int]:
    """Which targets to go for: small differences stay, except where the sum would not fit on a card."""
    rows = {row.id: row for _, instances in cards for row in instances if row.elastic}
    final = {id_: row.limit_bytes if _leave(row, ideal[id_], now) else ideal[id_] for id_, row in sorted(rows.items())}
    for gpu, instances in cards:
        excess = _sum(final, instances) - _budget(gpu, instances)
        left_alone = [row for row in _elastic(instances) if final[row.id] > ideal[row.id]]
        for row in sorted(left_alone, key=lambda row: (row.priority, ideal[row.id] - final[row.id], row.id)):
            if excess <= 0:
                break
            to = max(ideal[row.id], (final[row.id] - excess) // row.bundle_bytes * row.bundle_bytes)
            excess -= final[row.id] - to
            final[row.id] = to
    return final


def _sum(limits: Mapping[int, int], instances: Iterable[InstanceView]) -> int:
    return sum(limits[row.id] for row in instances if row.id in limits)


def _leave(row: InstanceView, target: int, now: float) -> bool:
    """Whether the limit in force is near enough to the target, or too young, to be left as it is."""
    limit, bundle = row.limit_bytes, row.bundle_bytes
    if not row.lowest_bytes <= limit <= row.highest_bytes:
        return False
    difference = abs(target - limit)
    if difference < bundle:
        return True
    pressed = row.waiting > 0 or row.used_bytes >= PRESSED * limit
    if (target > limit and pressed) or (target < limit and rests(row, now)):
        return False
    if row.limit_set_at is not None and now - row.limit_set_at < COOLDOWN_S:
        return True
    return difference < max(2 * bundle, DEADBAND * limit)


def _grant(cards: Sequence[tuple[GpuView, Sequence[InstanceView]]], final: Mapping[int, int]) -> dict[int, int]:
    """The raises that can be given once every lower is in force, by priority; those who get nothing are left out.

    Someone whose earlier limit is not in force yet (footprint above it) still has the bytes: they are not given twice.
    """
    rows = {row.id: row for _, instances in cards for row in instances if row.elastic}
    free: dict[str, int] = {}
    for gpu, instances in cards:
        held = 0
        for row in _elastic(instances):
            lowered = final[row.id] < row.limit_bytes
            held += final[row.id] if lowered else max(row.limit_bytes, row.footprint_bytes)
        free[gpu.uuid] = _budget(gpu, instances) - held
    stuck = {row.id for gpu, instances in cards if _problem(gpu, instances) for row in instances}
    wanting = [row for row in rows.values() if final[row.id] > row.limit_bytes and row.id not in stuck]
    granted: dict[int, int] = {}
    # What an instance is owed comes before what anyone would like.
    for owed in (True, False):
        for row in sorted(wanting, key=lambda row: (-row.priority, row.id)):
            base = granted.get(row.id, row.limit_bytes)
            goal = min(row.lowest_bytes, final[row.id]) if owed else final[row.id]
            mine = [gpu.uuid for gpu, instances in cards if any(one.id == row.id for one in instances)]
            # Bytes already mapped above the old limit were counted as held above.
            have = max(base, row.footprint_bytes)
            to = min(goal, have + max(0, min(free[uuid] for uuid in mine)))
            if to < goal:
                to = to // row.bundle_bytes * row.bundle_bytes
            if to <= base:
                continue
            for uuid in mine:
                free[uuid] -= max(to, row.footprint_bytes) - have
            granted[row.id] = to
    return granted


# -- words -------------------------------------------------------------------------------------------------------------


def _lower(row: InstanceView, to: int, rows: Mapping[int, InstanceView], final: Mapping[int, int], now: float) -> Step:
    takers = [other for other in rows.values() if final.get(other.id, 0) > other.limit_bytes]
    taker = max(takers, key=lambda other: (final[other.id] - other.limit_bytes, -other.id), default=None)
    if rests(row, now) and row.idle_since is not None:
        why = f"idle for {now - row.idle_since:.0f} s: down to its lowest limit, {gib(to)}"
    elif row.limit_bytes > row.highest_bytes and gib(row.limit_bytes) == gib(row.highest_bytes):
        why = f"rounded down to whole bundles within its {_bound(row)}"
    elif row.limit_bytes > row.highest_bytes:
        why = f"its limit of {gib(row.limit_bytes)} is above its {_bound(row)} of {gib(row.highest_bytes)}"
    elif taker is not None:
        why = f"gives up {gib(row.limit_bytes - to)}; {taker.name} needs more: {_need(taker)}"
    else:
        why = f"the limits together are more than the card has: {gib(row.limit_bytes)} down to {gib(to)}"
    below_use = to < row.used_bytes - row.evictable_bytes
    harm = (Harm.IDLE_CACHE if to < row.footprint_bytes else Harm.NONE) if row.idle else Harm.ALLOWANCE
    if not row.idle and to < row.footprint_bytes:
        harm = Harm.SQUEEZE if below_use else Harm.CACHE
    return Step(
        kind=StepKind.LOWER,
        instance_id=row.id,
        from_bytes=row.limit_bytes,
        to_bytes=to,
        expected_bytes=max(0, row.footprint_bytes - to),
        reason=why,
        harm=harm,
        reclaim=row.reclaim if below_use else "wait",
    )


def _raise(row: InstanceView, to: int, now: float) -> Step:
    if row.limit_bytes < row.lowest_bytes:
        owed = "guarantee" if row.guarantee_bytes >= row.floor_bytes else "safety floor"
        why = f"its limit of {gib(row.limit_bytes)} is below its {owed}, {gib(row.lowest_bytes)}"
    elif row.limit_bytes < demand(row, now):
        why = _need(row)
    else:
        why = f"{gib(to - row.limit_bytes)} that nobody else asks for"
    return Step(
        kind=StepKind.RAISE,
        instance_id=row.id,
        from_bytes=row.limit_bytes,
        to_bytes=to,
        expected_bytes=0,
        reason=why,
    )


def _bound(row: InstanceView) -> str:
    return "maximum" if row.maximum_bytes is not None and row.maximum_bytes < row.capacity_bytes else "capacity"


def _need(row: InstanceView) -> str:
    part = f"{gib(row.used_bytes)} of {gib(row.limit_bytes)} in use"
    return f"{row.waiting} requests wait, {part}" if row.waiting else part


def _problem(gpu: GpuView, instances: Sequence[InstanceView]) -> str:
    """The sentence for a card on which not even what is owed fits; empty when it does."""
    owed = sum(row.lowest_bytes for row in _elastic(instances))
    budget = _budget(gpu, instances)
    if owed <= budget:
        return ""
    return (
        f"Guarantees and safety floors ask for {gib(owed)} of KV memory and {gib(max(budget, 0))} are left beside "
        f"weights, other processes ({gib(gpu.foreign_bytes)}) and what is kept ({gib(gpu.kept_bytes)}): "
        f"{gib(owed - budget)} too little."
    )


def _summary(lowers: Sequence[Step], raises: Sequence[Step], rows: Mapping[int, InstanceView]) -> str:
    if not lowers and not raises:
        return "Nothing to change."
    parts = [
        f"{rows[step.instance_id].name} {gib(step.from_bytes)} → {gib(step.to_bytes)}" for step in (*lowers, *raises)
    ]
    return "; ".join(parts) + "."
