"""What the placer is told of this fleet: cards, what they hold, and what a launch needs of them.

The choice itself is ``gpus_app.policies.placement``; the need is ``gpus_app.policies.fit``. Here rows and readings
become their input. A starting instance counts with its reservation, a running one with what it really holds, whichever
is more; so two launches in the same second never get the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpus_app import selectors as gpu_readings
from gpus_app.models import Gpu
from gpus_app.policies import fit
from gpus_app.policies.base import gib, kept_bytes, kv_headroom_bytes
from gpus_app.policies.placement import Decision, GpuState, Rejection, Request, choose, ledger_free
from models_app.engines.arguments import parse_extra_args
from models_app.models import Instance, LaunchAttempt, MemoryProfile, Model, Operation
from models_app.states import OCCUPIES_GPU, InstanceState

#: Readings older than this say nothing of the present: the ledger alone decides.
READING_LIMIT_S = 10.0
#: In ``LaunchAttempt.memory``: the ``state_version`` of the sleep during which the instance claims nothing.
WAIVED = "waived_version"


@dataclass(frozen=True)
class Wish:
    """Where an instance should go: by the launch, else by its model."""

    host: str | None = None
    gpu_uuids: tuple[str, ...] = ()
    anyway: bool = False

    @classmethod
    def of(cls, model: Model, wish: Mapping[str, Any] | None = None) -> Wish:
        wish = wish or {}
        own = () if wish.get("elsewhere") else model.gpu_uuids  # moved by hand: the model's GPUs are what it leaves
        uuids = tuple(wish.get("gpu_uuids") or own or ())
        host = wish.get("host") or (model.host.name if model.host else None)
        return cls(host, uuids, bool(wish.get("anyway")))


@dataclass(frozen=True)
class Placement:
    """A decision with the need it was made for."""

    decision: Decision
    need: fit.Need
    gpus: list[GpuState] = field(default_factory=list)

    @property
    def facts(self) -> dict[str, Any]:
        """The numbers, for an error's facts or an event."""
        return {
            "need_bytes": self.need.total_bytes,
            "largest_bytes": self.decision.largest_bytes,
            "measured": self.need.measured,
            "lines": [{"label": line.label, "bytes": line.bytes, "why": line.why} for line in self.need.lines],
            "gpus": [
                {
                    "uuid": row.uuid,
                    "host": row.host,
                    "index": row.index,
                    "code": row.code,
                    "sentence": row.sentence,
                    "available_bytes": row.available_bytes,
                }
                for row in self.decision.rejections
            ],
        }


def gpu_states(newcomer: Model, *, without: int | None = None) -> list[GpuState]:
    """Every card as the placer sees it for a ``newcomer``; ``without``: an instance whose own claim is left out (it
    moves, restarts or wakes).

    Bytes for which room is being made are promised to their model, and to nobody else. kvcached's headroom is kept
    wherever an instance with it is, or would be: the same as in the view that ``make_room`` plans on.
    """
    gpus = list(Gpu.objects.select_related("host", "policy"))
    readings = _readings(gpus)
    held: dict[str, list[Instance]] = defaultdict(list)
    occupying = (
        Instance.objects.filter(state__in=OCCUPIES_GPU)
        .exclude(pk=without or 0)
        .select_related("attempt", "model__memory_policy")
    )
    for row in occupying:
        for uuid in row.gpu_uuids:
            held[uuid].append(row)
    promised = _promised(newcomer.pk, {row.pk for row in occupying})
    return [_state(gpu, readings.get(gpu.uuid), held[gpu.uuid], promised[gpu.uuid], newcomer) for gpu in gpus]


def claim_bytes(row: Instance) -> int:
    """Bytes per GPU that the book keeps for an instance: its reservation; once it is measured, what it is owed now.

    Its floor follows its longest request: by the floor of a busy hour the book would refuse what a plan has made room
    for.
    One who was put to sleep to make room has given up its claim to come back at once, until its state changes again.
    """
    memory = row.attempt.memory if row.attempt else {}
    if row.state == InstanceState.SLEEPING and memory.get(WAIVED) == row.state_version:
        return int(memory.get("asleep_bytes") or 0)
    if row.state == InstanceState.READY and row.model.kvcached and memory.get("baseline_bytes"):
        rules = getattr(row.model, "memory_policy", None)
        return int(memory["baseline_bytes"]) + max(row.safety_floor_bytes or 0, rules.guarantee_bytes if rules else 0)
    return row.reserved_bytes


def claim_waive(row: Instance) -> None:
    """A sleeper claims nothing but what it holds until its state changes: its bytes are given to somebody else."""
    if row.attempt is not None and row.attempt.memory.get(WAIVED) != row.state_version:
        memory = {**row.attempt.memory, WAIVED: row.state_version}
        LaunchAttempt.objects.filter(pk=row.attempt.pk).update(memory=memory)


def _promised(room_for: int | None, placed: Collection[int]) -> dict[str, int]:
    """Bytes per card that open operations make room for, those of ``room_for`` left out.

    Nothing more is promised once the newcomer has its place (``placed``), nor by a plan that is being undone.
    """
    promised: dict[str, int] = defaultdict(int)
    for operation in Operation.objects.filter(kind="make_room", ended_at=None).exclude(model=room_for):
        newcomer = operation.steps[-1].get("instance_id") if operation.steps else None
        if newcomer in placed or operation.facts.get("undoing"):
            continue
        for uuid in operation.facts.get("gpu_uuids", ()):
            promised[uuid] += int(operation.facts.get("need_bytes") or 0)
    return promised


def _readings(gpus: Iterable[Gpu]) -> dict[str, dict[str, Any]]:
    """The newest fresh reading of each card, by UUID."""
    names = sorted({gpu.host.name for gpu in gpus})
    records = gpu_readings.latest_all(names).values()
    return {gpu["uuid"]: gpu for record in records if record["age_s"] <= READING_LIMIT_S for gpu in record["gpus"]}


def _state(
    gpu: Gpu, reading: Mapping[str, Any] | None, rows: Sequence[Instance], promised: int, newcomer: Model
) -> GpuState:
    policy = getattr(gpu, "policy", None)
    reserve = policy.reserve_bytes if policy else 0
    elastic = newcomer.kvcached or any(row.model.kvcached for row in rows)
    headroom = kv_headroom_bytes(gpu.total_bytes, elastic=elastic)
    if reading is not None and reading.get("error"):
        reading = None
    seen = {} if reading is None else {row["id"]: row.get("resident") or 0 for row in reading.get("instances", ())}
    foreign = 0 if reading is None else int(reading.get("other") or 0)
    processes = () if reading is None else reading.get("other_processes") or ()
    return GpuState(
        uuid=gpu.uuid,
        host=gpu.host.name,
        index=gpu.index,
        name=gpu.name,
        total_bytes=gpu.total_bytes,
        free_measured_bytes=None if reading is None else int(reading["free"]),
        ledger_free_bytes=ledger_free(
            gpu.total_bytes,
            [(claim_bytes(row), seen.get(row.pk, 0)) for row in rows],
            kept_bytes=kept_bytes(reserve, headroom) + promised,
            foreign_bytes=foreign,
        ),
        reserve_bytes=reserve,
        kv_headroom_bytes=headroom,
        foreign_bytes=foreign,
        foreign_names=tuple(f"{row.get('name', '?')} (pid {row.get('pid')})" for row in processes),
        cordoned=gpu.cordoned,
        host_cordoned=gpu.host.cordoned or gpu.host.maintenance,
        host_reachable=gpu.host.reachable,
        faulty="" if gpu.state == Gpu.State.OK else gpu.state_reason or gpu.state,
        starting=any(row.state == InstanceState.STARTING for row in rows),
        instances=len(rows),
    )


# --- need ------------------------------------------------------------------------------------------


def launch_facts(model: Model) -> fit.LaunchFacts:
    """What is known of the model's need before it starts. Unknown weights count as none: the profile, then the engine,
    will tell."""
    facts = model.facts or {}
    return fit.LaunchFacts(
        weights_bytes=int(facts.get("weights_bytes") or 0),
        tensor_parallel_size=model.tensor_parallel_size,
        bundle_bytes=int(facts.get("bundle_bytes") or 0),
        floor_bytes=int(facts.get("safety_floor_bytes") or 0),
        hidden_size=int(facts.get("hidden_size") or 0),
        vocab_size=int(facts.get("vocab_size") or 0),
        num_layers=int(facts.get("num_layers") or 0),
        enforce_eager=model.enforce_eager,
        initial_limit_bytes=model.initial_limit_bytes,
        kvcached=model.kvcached,
        gpu_memory_utilization=_static_share(model.extra_args),
    )


def _static_share(extra_args: str) -> float:
    """The share of a card that an engine without kvcached takes: vLLM's, unless the extra arguments say another."""
    given = [
        argument.values[0]
        for argument in parse_extra_args(extra_args)[0]
        if argument.flag.name == "--gpu-memory-utilization" and argument.values
    ]
    try:
        return float(given[-1])
    except (IndexError, ValueError):  # not given, or no number: the engine will say so
        return fit.UTILIZATION


#: Options of a model that change how much memory an engine takes before any request.
FOOTPRINT_OPTIONS = (
    "hf_revision",
    "max_model_len",
    "dtype",
    "quantization",
    "tensor_parallel_size",
    "enforce_eager",
    "enable_sleep_mode",
    "enable_prefix_caching",
    "kvcached",
    "kv_layout",
    "extra_args",
    "load_format",
)


def profile_options(model: Model) -> dict[str, Any]:
    return {name: getattr(model, name) for name in FOOTPRINT_OPTIONS}


def profile_key(model: Model, gpu_name: str) -> str:
    """The key of what this model, with these options, took on this kind of card."""
    text = json.dumps([model.model, gpu_name, profile_options(model)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _profile(model: Model, gpu_name: str) -> fit.Profile | None:
    row = MemoryProfile.objects.filter(key=profile_key(model, gpu_name)).first()
    if row is None:
        return None
    return fit.Profile(
        baseline_bytes=row.baseline_bytes,
        bundle_bytes=row.bundle_bytes,
        floor_bytes=row.safety_floor_bytes,
        runs=row.runs,
    )


def need_on(model: Model, *, gpu_name: str, gpu_total_bytes: int) -> fit.Need:
    """Bytes per GPU that a launch needs on this kind of card, from an earlier run where there was one."""
    return fit.need(launch_facts(model), gpu_total_bytes=gpu_total_bytes, profile=_profile(model, gpu_name))


# --- decision --------------------------------------------------------------------------------------


def place(
    model: Model, wish: Wish, *, without: int | None = None, unusable: Mapping[str, str] | None = None
) -> Placement:
    """Where an instance of the model would go now, or why nowhere.

    ``unusable`` maps names of hosts that cannot run it to the reason (an engine too old, a pair of versions that do not
    work together); their cards are out.
    """
    states = states_for(model, without=without, unusable=unusable)
    kinds: dict[tuple[str, int], list[GpuState]] = defaultdict(list)
    for state in states:
        kinds[state.name, state.total_bytes].append(state)
    if not kinds:
        nothing = Decision(gpus=(), reason="No GPU is known yet: start a host worker and a sampler on a GPU host.")
        return Placement(nothing, need_on(model, gpu_name="", gpu_total_bytes=0))
    if wish.gpu_uuids:
        return _by_hand(model, wish, states)
    avoid = _replica_gpus(model, without)
    tried = []
    for (name, total), cards in sorted(kinds.items()):
        need = need_on(model, gpu_name=name, gpu_total_bytes=total)
        request = Request(
            need_bytes=need.total_bytes,
            tensor_parallel_size=model.tensor_parallel_size,
            host=wish.host,
            avoid=avoid,
            anyway=wish.anyway,
        )
        tried.append(Placement(choose(cards, request), need, cards))
    best = max(tried, key=_merit)
    if best.decision.gpus:
        return best
    rejections: list[Rejection] = [row for one in tried for row in one.decision.rejections]
    return replace(best, decision=replace(best.decision, rejections=tuple(rejections)), gpus=states)


def states_for(
    model: Model, *, without: int | None = None, unusable: Mapping[str, str] | None = None
) -> list[GpuState]:
    """The cards as a launch of this model sees them: with what was promised to it, without hosts that cannot run it."""
    return [_barred(state, unusable or {}) for state in gpu_states(model, without=without)]


def _merit(placement: Placement) -> tuple[bool, int]:
    """Kinds of cards are compared by what is left over after the need."""
    decision = placement.decision
    return bool(decision.gpus), decision.largest_bytes - placement.need.total_bytes


def _barred(state: GpuState, unusable: Mapping[str, str]) -> GpuState:
    reason = unusable.get(state.host)
    return replace(state, faulty=reason) if reason and not state.faulty else state


def _by_hand(model: Model, wish: Wish, states: list[GpuState]) -> Placement:
    chosen = [state for state in states if state.uuid in wish.gpu_uuids] or states[:1]
    needs = [need_on(model, gpu_name=state.name, gpu_total_bytes=state.total_bytes) for state in chosen]
    need = max(needs, key=lambda one: one.total_bytes)
    request = Request(
        need_bytes=need.total_bytes,
        tensor_parallel_size=model.tensor_parallel_size,
        host=wish.host,
        gpu_uuids=wish.gpu_uuids,
        anyway=wish.anyway,
    )
    return Placement(choose(states, request), need, states)


def _replica_gpus(model: Model, without: int | None) -> frozenset[str]:
    rows = Instance.objects.filter(model_id=model.pk, state__in=OCCUPIES_GPU).exclude(pk=without or 0)
    return frozenset(uuid for row in rows for uuid in row.gpu_uuids)


def refusal(placement: Placement) -> str:
    """Why nothing was found, with the first few cards' numbers."""
    sentences = [row.sentence for row in placement.decision.rejections if row.sentence != placement.decision.reason]
    return " ".join([placement.decision.reason, *sentences[:3]])


def need_sentence(need: fit.Need) -> str:
    parts = ", ".join(f"{line.label} {gib(line.bytes)}" for line in need.lines)
    return f"{gib(need.total_bytes)} per GPU ({parts})"
