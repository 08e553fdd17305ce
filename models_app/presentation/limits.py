"""What a new KV limit would mean, said before it is set; and what the engine answered, said after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from django.utils.text import capfirst

from models_app.models import Instance
from models_app.presentation.board import GpuCard
from models_app.presentation.memory_bar import Bar
from models_app.presentation.words import gib, size
from models_app.services.memory.kvcache import LimitAnswer


@dataclass(slots=True)
class LimitPreview:
    """Sentences and the bar before and after. ``blocked``: it would be refused as it stands."""

    asked_bytes: int
    asked_text: str
    sentences: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    blocked: str = ""
    now: Bar | None = None
    after: Bar | None = None


def preview(instance: Instance, asked_bytes: int, *, force: bool, reclaim: str, card: GpuCard | None) -> LimitPreview:
    """Compare the asked limit with capacity, floors and what is held now. Figures are those of the last reading."""
    bundle = instance.bundle_bytes or 1
    wanted = asked_bytes
    found = LimitPreview(asked_bytes, size(asked_bytes))
    if instance.capacity_bytes and wanted > instance.capacity_bytes:
        wanted = instance.capacity_bytes
        found.warnings.append(
            f"More than the {gib(wanted)} GiB that this start can ever hold: it will be set to that. "
            "Restart the instance to give it more."
        )
    wanted = wanted // bundle * bundle or wanted
    if size(wanted) != found.asked_text and not found.warnings:
        found.sentences.append(f"Rounded down to whole bundles: {size(wanted)}.")
    if instance.hard_minimum_bytes and wanted < instance.hard_minimum_bytes:
        found.blocked = f"Below the hard minimum of {size(instance.hard_minimum_bytes)}: the engine could not run."
    elif instance.safety_floor_bytes and wanted < instance.safety_floor_bytes:
        text = f"Below the safety floor of {size(instance.safety_floor_bytes)}: requests may wait for ever."
        if force:
            found.warnings.append(text)
        else:
            found.blocked = f"{text} Tick “below the floor” to set it all the same."
    elif instance.full_context_floor_bytes and wanted < instance.full_context_floor_bytes:
        found.warnings.append(
            f"Requests of full context need {size(instance.full_context_floor_bytes)}; longer ones than this limit "
            "holds are refused."
        )
    per_token = (instance.model.facts or {}).get("kv_bytes_per_token_per_gpu")
    if per_token:
        found.sentences.append(f"Holds about {wanted // int(per_token):,} tokens.".replace(",", " "))
    share = next((row.share for row in card.rows if row.instance.pk == instance.pk), None) if card else None
    if card is None or share is None or not card.bar.known:
        return found
    over = share.footprint_bytes - wanted
    if over > 0:
        if reclaim == "wait":
            found.warnings.append(
                f"{size(over)} more than that is mapped now: idle and cached pages go at once, the rest as running "
                "requests finish (deferred)."
            )
        else:
            verb = "recomputed, none fails" if reclaim == "preempt" else "ended with an error"
            found.warnings.append(f"{size(over)} are taken back at once: the youngest requests are {verb}.")
    used = min(share.used_bytes, wanted)
    after = replace(
        share,
        used_bytes=used,
        prealloc_bytes=max(0, min(share.prealloc_bytes, wanted - used)),
        limit_bytes=wanted,
        effective_limit_bytes=wanted,
    )
    found.now = replace(card.bar, title=f"{card.bar.title}, now")
    found.after = replace(
        card.bar,
        title=f"{card.bar.title}, after",
        shares=[after if other.key == share.key else other for other in card.bar.shares],
    )
    return found


def limit_answer_text(answer: LimitAnswer) -> tuple[str, str]:
    """The engine's answer to a limit as a sentence, with its tone."""
    asked = size(answer.limit_bytes)
    if answer.status == "applied":
        text = f"Applied: {asked} in force."
        if answer.clamped:
            text = f"Applied, cut to what this start can hold: {asked} in force."
        if answer.freed_bytes:
            text += f" {size(answer.freed_bytes)} came back."
        return text + _cost(answer.preempted) + _warnings(answer), "warn" if answer.clamped else "ok"
    if answer.status == "deferred":
        text = f"Deferred: {asked} asked, {size(answer.effective_limit_bytes)} in force"
        if answer.overage_bytes:
            text += f", {size(answer.overage_bytes)} still to come back as requests finish"
        return text + "." + _cost(answer.preempted), "warn"
    if answer.status == "pending":
        return answer.message or f"Noted: {asked} will be set as soon as the engine can take it.", "info"
    if answer.status == "starved":
        return f"In force: {asked}, but requests wait and no page can be had. Raise the limit.", "bad"
    return answer.message or f"Not set ({answer.status}).", "bad"


def trim_answer_text(answer: LimitAnswer) -> tuple[str, str]:
    """What a trim brought, measured."""
    if answer.status in ("rejected", "unavailable", "conflict"):
        return answer.message or "The engine did not answer the trim.", "bad"
    if answer.freed_bytes is None:
        return answer.message or "Trim sent; the bar shows what comes back.", "info"
    if answer.freed_bytes <= 0:
        return "Nothing to trim: no idle KV memory was mapped. The limit is unchanged.", "info"
    return f"Trimmed: {size(answer.freed_bytes)} came back. The limit is unchanged.", "ok"


def _cost(preempted: Mapping[str, Any] | None) -> str:
    if not preempted or not preempted.get("requests"):
        return ""
    text = f" {preempted['requests']} requests were set back and are recomputed"
    if preempted.get("tokens"):
        text += f" ({preempted['tokens']} tokens)"
    if preempted.get("pause_s") is not None:
        text += f", longest pause {preempted['pause_s']:.1f} s"
    return text + "."


def _warnings(answer: LimitAnswer) -> str:
    return "".join(f" {capfirst(warning.rstrip('.'))}." for warning in answer.warnings)
