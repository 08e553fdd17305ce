"""Whether a launch fits, drawn: the need in lines, and the bars of the GPUs concerned, now and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpus_app.models import Gpu
from gpus_app.policies.base import Plan, StepKind
from gpus_app.policies.fit import Need, Verdict
from models_app.models import Model
from models_app.presentation.board import build_card
from models_app.presentation.memory_bar import Bar, Share, with_distinct_slots
from models_app.services.memory.placement import Wish
from models_app.services.plans.room import room_judge

_TONES = {Verdict.FITS: "ok", Verdict.AFTER_ROOM: "warn", Verdict.DOES_NOT_FIT: "bad"}
_WORDS = {
    Verdict.FITS: "Fits now",
    Verdict.AFTER_ROOM: "Fits after making room",
    Verdict.DOES_NOT_FIT: "Does not fit",
}
_ICONS = {Verdict.FITS: "circle-check", Verdict.AFTER_ROOM: "arrows-minimize", Verdict.DOES_NOT_FIT: "circle-x"}


@dataclass(slots=True)
class Fit:
    """The verdict with its pictures. ``pairs``: (now, after) of each GPU that a launch would use."""

    verdict: str
    sentence: str
    tone: str
    word: str
    icon: str
    need: Need
    pairs: list[tuple[Bar, Bar]] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)
    largest_bytes: int = 0
    suggested_tensor_parallel_size: int | None = None

    @property
    def fits(self) -> bool:
        return self.verdict == Verdict.FITS

    @property
    def after_room(self) -> bool:
        return self.verdict == Verdict.AFTER_ROOM


def fit_of(model: Model, *, wish: Wish | None = None, pictures: bool = True) -> Fit:
    """Judge a launch of a model, saved or not, and draw it."""
    room = room_judge(model, wish=wish)
    judgement = room.judgement
    found = Fit(
        verdict=judgement.verdict,
        sentence=judgement.sentence,
        tone=_TONES[judgement.verdict],
        word=_WORDS[judgement.verdict],
        icon=_ICONS[judgement.verdict],
        need=room.need,
        steps=room.steps(),
        largest_bytes=judgement.largest_bytes,
        suggested_tensor_parallel_size=judgement.suggested_tensor_parallel_size,
    )
    if pictures:
        plans = {plan.gpu_uuid: plan for plan in judgement.plans}
        uuids = [gpu.uuid for gpu in judgement.gpus]
        for gpu in Gpu.objects.filter(uuid__in=uuids).select_related("host", "policy"):
            found.pairs.append(_pair(gpu, plans.get(gpu.uuid), room.need, str(model)))
    return found


def _pair(gpu: Gpu, plan: Plan | None, need: Need, name: str) -> tuple[Bar, Bar]:
    now = build_card(gpu, None).bar
    shares = list(now.shares)
    for step in plan.steps if plan else ():
        key = f"i{step.instance_id}"
        shares = [_without(share, step.expected_bytes) if share.key == key else share for share in shares]
        if step.kind in (StepKind.LOWER, StepKind.RAISE):
            shares = [replace(share, limit_bytes=step.to_bytes) if share.key == key else share for share in shares]
    newcomer = Share(key="new", label=name, slot=0, reserved_bytes=need.total_bytes)
    after = with_distinct_slots([*shares, newcomer])
    title = f"GPU {gpu.index} of {gpu.host.name}"
    return replace(now, title=f"{title}, now"), replace(now, title=f"{title}, after", shares=after)


def _without(share: Share, freed: int) -> Share:
    """The share after giving back bytes: idle pages first, then cached or used ones, then weights."""
    idle = max(0, share.prealloc_bytes - freed)
    freed -= share.prealloc_bytes - idle
    used = max(0, share.used_bytes - freed)
    freed -= share.used_bytes - used
    return replace(
        share, prealloc_bytes=idle, used_bytes=used, baseline_bytes=max(0, share.baseline_bytes - max(0, freed))
    )


def free_gain(pairs: Sequence[tuple[Bar, Bar]]) -> int:
    """Bytes that the plan frees over all its GPUs."""
    return sum(after.free_bytes - now.free_bytes for now, after in pairs)
