"""What a launch needs per GPU, and whether that fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from gpus_app.policies.base import GIB, MIB, GpuView, Harm, InstanceView, Plan, gib
from gpus_app.policies.make_room import make_room
from gpus_app.policies.placement import Decision, GpuState, Request, alike, choose, names_of

#: vLLM's own share of a card for an engine without kvcached.
UTILIZATION = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFacts:
    """What is known of a launch before it starts. Bytes are of the whole model unless named otherwise."""

    weights_bytes: int
    tensor_parallel_size: int = 1
    bundle_bytes: int = 0  # per GPU
    floor_bytes: int = 0  # safety floor of the KV cache, per GPU
    hidden_size: int = 0
    vocab_size: int = 0
    num_layers: int = 0
    enforce_eager: bool = False
    max_num_seqs: int | None = None  # None: vLLM's default for the card
    max_num_batched_tokens: int | None = None
    initial_limit_bytes: int | None = None
    kvcached: bool = True
    gpu_memory_utilization: float = UTILIZATION  # only matters without kvcached: a static reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured in an earlier run of the same model, options and kind of GPU (``MemoryProfile``)."""

    baseline_bytes: int
    bundle_bytes: int | None = None
    floor_bytes: int | None = None
    runs: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedLine:
    """One term of a need, with where the number comes from."""

    label: str
    bytes: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes per GPU that must be free for a start to succeed and make progress."""

    total_bytes: int
    baseline_bytes: int
    kv_bytes: int
    measured: bool  # from a profile rather than an estimate
    lines: tuple[NeedLine, ...]


class Verdict(StrEnum):
    FITS = "fits"
    AFTER_ROOM = "fits_after_making_room"
    DOES_NOT_FIT = "does_not_fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """``plans`` (one a GPU, same order as ``gpus``) is filled for AFTER_ROOM; ``largest_bytes`` for DOES_NOT_FIT."""

    verdict: Verdict
    sentence: str
    gpus: tuple[GpuState, ...]
    decision: Decision
    plans: tuple[Plan, ...] = ()
    largest_bytes: int = 0
    suggested_tensor_parallel_size: int | None = None


#: CUDA context, libraries and workspaces of one engine process: 1,075,838,976 bytes seen (vLLM 0.24.0, H200).
RUNTIME_BYTES = 1026 * MIB
#: Warm-up keeps this many float32 copies of the logits of a full batch: 3.58 and 3.60 seen (Llama-3.2-1B, Qwen3-0.6B).
LOGITS_COPIES = 3.6
#: … and this many copies of the hidden state of a full batch of tokens, in 2 bytes: a round estimate.
HIDDEN_COPIES = 8
#: CUDA graphs: at least this, or this much a layer. Estimates; a profile replaces them after the first run.
GRAPHS_BYTES, GRAPHS_LAYER_BYTES = 512 * MIB, 20 * MIB
#: Cards of this size get vLLM's larger defaults: (max_num_seqs, max_num_batched_tokens).
LARGE_CARD_BYTES, LARGE_DEFAULTS, SMALL_DEFAULTS = 70 * GIB, (1024, 8192), (256, 2048)
#: Less than any card has to give, overbooked ones included.
_ANY = -(2**62)
#: Reserved pages that kvcached maps at start, in bundles.
START_BUNDLES = 6


def need(facts: LaunchFacts, *, gpu_total_bytes: int, profile: Profile | None = None) -> Need:
    """What one GPU must have free for this launch: measured before when there is a profile, else an estimate."""
    if not facts.kvcached:
        fixed = int(gpu_total_bytes * facts.gpu_memory_utilization)
        why = f"without kvcached vLLM takes {facts.gpu_memory_utilization:.0%} of the card at start and keeps it"
        line = NeedLine(label="static reservation", bytes=fixed, why=why)
        return Need(total_bytes=fixed, baseline_bytes=fixed, kv_bytes=0, measured=False, lines=(line,))
    lines = _profile_lines(profile) if profile else _estimate_lines(facts, gpu_total_bytes)
    baseline = sum(line.bytes for line in lines)
    kv_line = _kv_line(facts, profile)
    return Need(
        total_bytes=baseline + kv_line.bytes,
        baseline_bytes=baseline,
        kv_bytes=kv_line.bytes,
        measured=profile is not None,
        lines=(*lines, kv_line),
    )


def _profile_lines(profile: Profile) -> list[NeedLine]:
    runs = "an earlier run" if profile.runs == 1 else f"{profile.runs} earlier runs"
    why = f"measured in {runs} on this kind of GPU: weights, context, graphs and workspaces together"
    return [NeedLine(label="baseline", bytes=profile.baseline_bytes, why=why)]


def _estimate_lines(facts: LaunchFacts, gpu_total_bytes: int) -> list[NeedLine]:
    size = facts.tensor_parallel_size
    defaults = LARGE_DEFAULTS if gpu_total_bytes >= LARGE_CARD_BYTES else SMALL_DEFAULTS
    sequences = facts.max_num_seqs or defaults[0]
    tokens = facts.max_num_batched_tokens or defaults[1]
    whole = gib(facts.weights_bytes)
    logits = int(LOGITS_COPIES * sequences * facts.vocab_size * 4)
    hidden = tokens * facts.hidden_size * 2 * HIDDEN_COPIES
    lines = [
        NeedLine(
            label="weights",
            bytes=-(-facts.weights_bytes // size),
            why=f"{whole} of weights" if size == 1 else f"{whole} of weights over {size} GPUs",
        ),
        NeedLine(label="runtime", bytes=RUNTIME_BYTES, why="CUDA context and libraries of one engine process"),
        NeedLine(
            label="activations",
            bytes=logits + hidden,
            why=f"a full batch at warm-up: {sequences} sequences, {tokens} tokens, {facts.vocab_size} words (estimate)",
        ),
    ]
    if not facts.enforce_eager:
        graphs = max(GRAPHS_BYTES, GRAPHS_LAYER_BYTES * facts.num_layers)
        lines.append(
            NeedLine(label="CUDA graphs", bytes=graphs, why=f"captured for {facts.num_layers} layers (estimate)")
        )
    return lines


def _kv_line(facts: LaunchFacts, profile: Profile | None) -> NeedLine:
    bundle = (profile and profile.bundle_bytes) or facts.bundle_bytes
    floor = max((profile and profile.floor_bytes) or 0, facts.floor_bytes)
    start = START_BUNDLES * bundle
    if facts.initial_limit_bytes is not None:
        start = min(start, max(facts.initial_limit_bytes, 2 * bundle))
    if floor >= start:
        return NeedLine(label="KV cache", bytes=floor, why="its safety floor: with less it may stop making progress")
    return NeedLine(label="KV cache", bytes=start, why=f"{START_BUNDLES} bundles that kvcached maps at start")


def judge(
    wanted: Need,
    request: Request,
    gpus: Sequence[GpuState],
    views: Mapping[str, tuple[GpuView, Sequence[InstanceView]]],
    now: float,
    *,
    facts: LaunchFacts | None = None,
    priority: int = 50,
    minimum_residence_s: float = 60.0,
    max_harm: Harm = Harm.STOP_BUSY,
) -> Judgement:
    """Fits now, fits after making room (with the plans), or does not fit (with the largest that would).

    Measures beyond ``max_harm`` are not planned.
    ``views`` maps GPU UUIDs to what ``make_room`` needs; GPUs without a view can only fit as they are. ``facts`` allows
    the suggestion of a tensor parallel size.
    """
    request = replace(request, need_bytes=wanted.total_bytes)
    decision = choose(gpus, request)
    if decision.gpus:
        return Judgement(
            verdict=Verdict.FITS,
            sentence=f"Fits now on {decision.reason}",
            gpus=decision.gpus,
            decision=decision,
            largest_bytes=decision.largest_bytes,
        )
    # An overbooked card has less than nothing to give, and can be planned on all the same.
    open_decision = choose(gpus, replace(request, need_bytes=_ANY))
    if not open_decision.gpus:
        # Nothing to do with memory: no GPU takes newcomers, or the choice by hand is wrong.
        return Judgement(verdict=Verdict.DOES_NOT_FIT, sentence=open_decision.reason, gpus=(), decision=open_decision)
    plans = {
        gpu.uuid: make_room(
            *views[gpu.uuid],
            wanted.total_bytes,
            now,
            priority=priority,
            minimum_residence_s=minimum_residence_s,
            max_harm=max_harm,
        )
        for group in alike(gpus, request)
        for gpu in group
        if gpu.uuid in views
    }
    size = request.tensor_parallel_size
    best: list[GpuState] = []
    largest = 0
    for group in alike(gpus, request):
        known = [gpu for gpu in group if gpu.uuid in plans]
        known.sort(key=lambda gpu: (-plans[gpu.uuid].largest_bytes, gpu.index))
        if len(known) >= size:
            largest = max(largest, plans[known[size - 1].uuid].largest_bytes)
        able = [gpu for gpu in known if plans[gpu.uuid].feasible]
        able.sort(key=lambda gpu: _rank([gpu], plans, request))
        if len(able) >= size and (not best or _rank(able[:size], plans, request) < _rank(best, plans, request)):
            best = able[:size]
    if best:
        order = {uuid: place for place, uuid in enumerate(request.gpu_uuids)}
        chosen = tuple(sorted(best, key=lambda gpu: (order.get(gpu.uuid, 0), gpu.index)))
        ways = tuple(plans[gpu.uuid] for gpu in chosen)
        return Judgement(
            verdict=Verdict.AFTER_ROOM,
            sentence=f"Fits on {names_of(chosen)} after making room. {_once(plan.sentence for plan in ways)}",
            gpus=chosen,
            decision=decision,
            plans=ways,
            largest_bytes=largest,
        )
    suggestion = _suggest(facts, wanted, request, gpus) if facts and not request.gpu_uuids else None
    sentence = f"{decision.reason} Even with all the room that may be made, at most {gib(largest)} can be had on a GPU."
    if suggestion:
        sentence += f" It would fit with tensor parallel size {suggestion}."
    return Judgement(
        verdict=Verdict.DOES_NOT_FIT,
        sentence=sentence,
        gpus=(),
        decision=decision,
        largest_bytes=max(largest, decision.largest_bytes),
        suggested_tensor_parallel_size=suggestion,
    )


def _once(sentences: Iterable[str]) -> str:
    """What two cards would say alike is said once."""
    return " ".join(dict.fromkeys(sentences))


def _rank(group: Sequence[GpuState], plans: Mapping[str, Plan], request: Request) -> tuple[object, ...]:
    """The least harm first, then away from replicas, then fewest steps, then the order of host and index."""
    steps = [step for gpu in group for step in plans[gpu.uuid].steps]
    return (
        max((step.harm for step in steps), default=0),
        sum(gpu.uuid in request.avoid for gpu in group),
        len({(step.kind, step.instance_id) for step in steps}),
        group[0].host,
        sorted(gpu.index for gpu in group),
    )


def _suggest(facts: LaunchFacts, wanted: Need, request: Request, gpus: Sequence[GpuState]) -> int | None:
    """The smallest larger tensor parallel size that would fit now, by the same estimate; None when there is none."""
    largest = max((gpu.total_bytes for gpu in gpus), default=0)
    for size in (2, 4, 8):
        if size <= request.tensor_parallel_size:
            continue
        each = need(replace(facts, tensor_parallel_size=size), gpu_total_bytes=largest)
        bytes_needed = each.total_bytes
        if wanted.measured:  # the estimate tells how much the split saves, the measurement from where
            now_each = need(replace(facts, tensor_parallel_size=request.tensor_parallel_size), gpu_total_bytes=largest)
            bytes_needed = max(0, wanted.total_bytes - (now_each.total_bytes - each.total_bytes))
        if choose(gpus, replace(request, tensor_parallel_size=size, need_bytes=bytes_needed)).gpus:
            return size
    return None
