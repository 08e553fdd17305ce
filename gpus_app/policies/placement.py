"""Which GPUs a launch goes to, and why not the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from gpus_app.policies.base import gib, kept_bytes


class Strategy(StrEnum):
    """``spread``: the GPU with most bytes left, so that every KV cache can grow. ``pack``: the fullest that fits."""

    SPREAD = "spread"
    PACK = "pack"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """One card as the placer sees it.

    ``free_measured_bytes`` is NVML's live figure (None: not read); ``ledger_free_bytes`` is what our own book leaves
    (see ``ledger_free``), what is kept and foreign memory already taken off. The worse of the two counts.
    ``kv_headroom_bytes``: what kvcached leaves unmapped when an instance with it is here or comes.
    """

    uuid: str
    host: str
    index: int
    name: str
    total_bytes: int
    free_measured_bytes: int | None
    ledger_free_bytes: int
    reserve_bytes: int = 0
    kv_headroom_bytes: int = 0
    foreign_bytes: int = 0
    foreign_names: tuple[str, ...] = ()
    cordoned: bool = False
    host_cordoned: bool = False
    host_reachable: bool = True
    faulty: str = ""  # the reason, empty when it works
    starting: bool = False  # an instance is starting here: a further start waits for it
    instances: int = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of the card that no newcomer gets: as ``GpuView.kept_bytes``."""
        return kept_bytes(self.reserve_bytes, self.kv_headroom_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be placed. ``gpu_uuids`` given = chosen by hand, in that order; ``avoid`` = GPUs with its replicas."""

    need_bytes: int
    tensor_parallel_size: int = 1
    host: str | None = None
    gpu_uuids: tuple[str, ...] = ()
    avoid: frozenset[str] = frozenset()
    strategy: Strategy = Strategy.SPREAD
    anyway: bool = False  # place although the bytes are short (needs permission; checked by the caller)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why one GPU was not taken. ``code``: cordoned, host_cordoned, unreachable, faulty, other_host, short, set."""

    uuid: str
    host: str
    index: int
    code: str
    sentence: str
    available_bytes: int
    need_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """``gpus`` is empty when nothing was found; ``reason`` is a sentence in both cases."""

    gpus: tuple[GpuState, ...]
    reason: str
    rejections: tuple[Rejection, ...] = ()
    largest_bytes: int = 0  # per GPU, the most that a set of the asked size could be given
    waits: bool = False  # a start is under way on a chosen GPU

    @property
    def host(self) -> str | None:
        return self.gpus[0].host if self.gpus else None


def ledger_free(
    total_bytes: int, holdings: Iterable[tuple[int, int]], *, kept_bytes: int = 0, foreign_bytes: int = 0
) -> int:
    """What our book leaves: total − kept − foreign − Σ max(reserved, resident) of ``holdings``; may be negative."""
    held = sum(max(reserved, resident) for reserved, resident in holdings)
    return total_bytes - kept_bytes - foreign_bytes - held


def choose(gpus: Sequence[GpuState], request: Request) -> Decision:
    """The GPUs for one instance, all on one host. The same input gives the same answer.

    Chosen by hand: exactly those, or a refusal that says what is wrong with them. Otherwise the rules, in this order:

    1. GPUs that are faulty, cordoned, out of reach or on another host than the one asked for are out.
    2. A set has ``tensor_parallel_size`` GPUs of one host and one kind, each with ``need_bytes`` available.
    3. A set without GPUs that serve this model already (``avoid``) comes before one with, and among the latter
       the one with fewest: replicas spread.
    4. ``spread``: the set whose poorest GPU has most available; ``pack``: the one whose poorest has least.
    5. Then: nobody starting there, fewer instances, host name, neighbours, lower indices.
    """
    ordered = sorted(gpus, key=lambda gpu: (gpu.host, gpu.index, gpu.uuid))
    if request.tensor_parallel_size < 1:
        return Decision(gpus=(), reason="The tensor parallel size must be 1 or more.")
    if request.gpu_uuids:
        return _by_hand(ordered, request)
    rejections: list[Rejection] = []
    usable: list[GpuState] = []
    for gpu in ordered:
        refusal = _closed(gpu, request)
        if refusal:
            rejections.append(_reject(gpu, request, *refusal))
        else:
            usable.append(gpu)
    short = [gpu for gpu in usable if available_bytes(gpu) < request.need_bytes]
    rejections += [_reject(gpu, request, "short", _short(gpu, request)) for gpu in short]
    candidates = usable if request.anyway else [gpu for gpu in usable if gpu not in short]
    sets = list(_sets(candidates, request))
    largest = max((_poorest(group) for group in _sets(usable, request)), default=0)
    if not sets:
        size = request.tensor_parallel_size
        rejections += [
            _reject(gpu, request, "set", f"GPU {gpu.index} has room, but its host has not {size} alike that do.")
            for gpu in candidates
        ]
        rejections.sort(key=lambda row: (row.host, row.index))
        return Decision(
            gpus=(),
            reason=_nothing(request, usable, largest),
            rejections=tuple(rejections),
            largest_bytes=max(largest, 0),
        )
    best = min(sets, key=lambda group: _rank(group, request))
    rejections.sort(key=lambda row: (row.host, row.index))
    return Decision(
        gpus=best,
        reason=_why(best, request, len(sets)),
        rejections=tuple(row for row in rejections if row.uuid not in {gpu.uuid for gpu in best}),
        largest_bytes=max(largest, 0),
        waits=any(gpu.starting for gpu in best),
    )


def available_bytes(gpu: GpuState) -> int:
    """What a newcomer can count on: the worse of our ledger and the live reading, what is kept taken off both."""
    if gpu.free_measured_bytes is None:
        return gpu.ledger_free_bytes
    return min(gpu.ledger_free_bytes, gpu.free_measured_bytes - gpu.kept_bytes)


def alike(gpus: Sequence[GpuState], request: Request) -> list[list[GpuState]]:
    """GPUs that a launch may go to, memory left aside, in groups of one host and kind; the one group chosen by hand."""
    ordered = sorted(gpus, key=lambda gpu: (gpu.host, gpu.index, gpu.uuid))
    if request.gpu_uuids:
        decision = _by_hand(ordered, replace(request, anyway=True))
        return [list(decision.gpus)] if decision.gpus else []
    return _kinds([gpu for gpu in ordered if not _closed(gpu, request)], request)


def _kinds(gpus: Sequence[GpuState], request: Request) -> list[list[GpuState]]:
    """The parts of a model go to cards of one kind; alone, a card may be of any."""
    kinds: dict[tuple[str, str, int], list[GpuState]] = {}
    for gpu in gpus:
        kind = (gpu.host, gpu.name, gpu.total_bytes) if request.tensor_parallel_size > 1 else ("", "", 0)
        kinds.setdefault(kind, []).append(gpu)
    return list(kinds.values())


def _closed(gpu: GpuState, request: Request) -> tuple[str, str] | None:
    """Why no newcomer may come here, whatever its size."""
    here = f"GPU {gpu.index} of {gpu.host}"
    if request.host is not None and gpu.host != request.host:
        return "other_host", f"{here} is not on the host asked for, {request.host}."
    if not gpu.host_reachable:
        return "unreachable", f"{here}: the host has not been heard of for a while."
    if gpu.faulty:
        return "faulty", f"{here} is out of order: {gpu.faulty}"
    if gpu.host_cordoned:
        return "host_cordoned", f"{here}: the host is cordoned."
    if gpu.cordoned:
        return "cordoned", f"{here} is cordoned."
    return None


def _short(gpu: GpuState, request: Request) -> str:
    """The refusal with its numbers: what is needed, what there is, and who has the rest."""
    have = available_bytes(gpu)
    live = gpu.free_measured_bytes
    text = f"GPU {gpu.index} of {gpu.host} has {gib(max(have, 0))} to give of {gib(gpu.total_bytes)}"
    text += f"; {gib(request.need_bytes)} are needed, {gib(request.need_bytes - have)} more than that."
    if live is not None and live - gpu.kept_bytes > gpu.ledger_free_bytes:
        text += f" {gib(live)} are free at the moment, but promised to instances that run, start or sleep."
    if gpu.kv_headroom_bytes > gpu.reserve_bytes:
        text += f" {gib(gpu.kv_headroom_bytes)} are what kvcached leaves free of every card."
    elif gpu.reserve_bytes:
        text += f" {gib(gpu.reserve_bytes)} are kept as reserve."
    if gpu.foreign_bytes > 0 and gpu.foreign_names:
        text += f" Others hold {gib(gpu.foreign_bytes)}: {', '.join(gpu.foreign_names[:3])}."
    return text


def _reject(gpu: GpuState, request: Request, code: str, sentence: str) -> Rejection:
    return Rejection(
        uuid=gpu.uuid,
        host=gpu.host,
        index=gpu.index,
        code=code,
        sentence=sentence,
        available_bytes=available_bytes(gpu),
        need_bytes=request.need_bytes,
    )


def _poorest(group: Sequence[GpuState]) -> int:
    return min(available_bytes(gpu) for gpu in group)


def _sets(gpus: Sequence[GpuState], request: Request) -> Iterable[tuple[GpuState, ...]]:
    """Sets worth comparing, a handful instead of every combination.

    Within one host and kind of card only as many GPUs with a replica are taken as are needed to make up the number;
    and whether the poorest GPU is to have most or least, the best set is a run of the list sorted by available bytes.
    """
    size = request.tensor_parallel_size
    for members in _kinds(gpus, request):
        members.sort(key=lambda gpu: (-available_bytes(gpu), gpu.starting, gpu.instances, gpu.index))
        fresh = [gpu for gpu in members if gpu.uuid not in request.avoid]
        taken = [gpu for gpu in members if gpu.uuid in request.avoid]
        always, rest, count = ([], fresh, size) if len(fresh) >= size else (fresh, taken, size - len(fresh))
        for start in range(len(rest) - count + 1):
            yield tuple(sorted([*always, *rest[start : start + count]], key=lambda gpu: gpu.index))


def _rank(group: tuple[GpuState, ...], request: Request) -> tuple[object, ...]:
    room = _poorest(group)
    return (
        sum(gpu.uuid in request.avoid for gpu in group),
        -room if request.strategy is Strategy.SPREAD else room,
        sum(gpu.starting for gpu in group),
        sum(gpu.instances for gpu in group),
        group[0].host,
        group[-1].index - group[0].index,  # neighbours are mostly better connected
        [gpu.index for gpu in group],
    )


def _why(group: tuple[GpuState, ...], request: Request, sets: int) -> str:
    names = names_of(group)
    room = _poorest(group)
    if room < request.need_bytes:
        return f"{names} by order, although {gib(request.need_bytes)} are needed and {gib(max(room, 0))} to be had."
    if sets == 1:
        rule = "nothing else fits"
    elif request.strategy is Strategy.SPREAD:
        rule = "most room for KV cache" if not request.avoid else "away from its replicas, then most room for KV cache"
    else:
        rule = "the fullest that fits" if not request.avoid else "away from its replicas, then the fullest that fits"
    return f"{names}: {gib(room)} to give, {gib(request.need_bytes)} needed; {rule}."


def names_of(group: Sequence[GpuState]) -> str:
    word = "GPU" if len(group) == 1 else "GPUs"
    return f"{word} {', '.join(str(gpu.index) for gpu in group)} of {group[0].host}"


def _nothing(request: Request, usable: Sequence[GpuState], largest: int) -> str:
    size = request.tensor_parallel_size
    if not usable:
        where = f" on {request.host}" if request.host else ""
        return f"There is no GPU{where} that takes new instances."
    if size == 1:
        return f"{gib(request.need_bytes)} are needed, and no GPU can give more than {gib(max(largest, 0))}."
    if largest == 0 and not any(True for _ in _sets(usable, request)):
        return f"No host has {size} GPUs of one kind that take new instances."
    return (
        f"{gib(request.need_bytes)} are needed on each of {size} GPUs of one kind and host; "
        f"no such set can give more than {gib(max(largest, 0))} each."
    )


def _by_hand(ordered: Sequence[GpuState], request: Request) -> Decision:
    """Check a choice by hand; memory may be waived (``anyway``), a card out of order may not."""
    uuids, size = request.gpu_uuids, request.tensor_parallel_size
    known = {gpu.uuid: gpu for gpu in ordered}
    if len(set(uuids)) != len(uuids):
        twice = next(uuid for uuid in uuids if uuids.count(uuid) > 1)
        name = f"GPU {known[twice].index}" if twice in known else twice
        return Decision(gpus=(), reason=f"{name} is chosen twice; each GPU can hold one part of the model.")
    if len(uuids) != size:
        return Decision(
            gpus=(),
            reason=f"{len(uuids)} GPUs are chosen, but the tensor parallel size is {size}: choose exactly {size}.",
        )
    unknown = [uuid for uuid in uuids if uuid not in known]
    if unknown:
        return Decision(gpus=(), reason=f"There is no GPU {unknown[0]} on any host.")
    group = tuple(known[uuid] for uuid in uuids)
    hosts = sorted({gpu.host for gpu in group})
    if len(hosts) > 1:
        return Decision(
            gpus=(),
            reason=f"The chosen GPUs are on {len(hosts)} hosts ({', '.join(hosts)}); one engine runs on one host.",
        )
    rejections = [_reject(gpu, request, *refusal) for gpu in group if (refusal := _closed(gpu, request))]
    largest = max(_poorest(group), 0)
    if not rejections and not request.anyway:
        rejections = [
            _reject(gpu, request, "short", _short(gpu, request))
            for gpu in group
            if available_bytes(gpu) < request.need_bytes
        ]
    if rejections:
        return Decision(gpus=(), reason=rejections[0].sentence, rejections=tuple(rejections), largest_bytes=largest)
    return Decision(
        gpus=group,
        reason=f"{names_of(group)}, as asked: {gib(largest)} to give, {gib(request.need_bytes)} needed.",
        largest_bytes=largest,
        waits=any(gpu.starting for gpu in group),
    )
