"""What goes wrong with memory on a card and is nobody's failure: growth without load, pages that a neighbour has."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from gpus_app.policies.base import kv_headroom_bytes
from models_app.presentation import words
from models_app.presentation.board import GpuCard, Row
from models_app.presentation.item import Item
from models_app.services.memory.leaks import growth_of, growth_sentence

#: Holders that are named, the largest first.
MOST_NAMED = 4


def memory_items(row: Row, card: GpuCard | None, *, may_operate: bool) -> Iterator[Item]:
    """What is to be said of one instance on one card."""
    if (growth := _growth(row, card, may_operate)) is not None:
        yield growth
    if card is not None and (pressure := _pressure(row, card, may_operate)) is not None:
        yield pressure


def _growth(row: Row, card: GpuCard | None, may_operate: bool) -> Item | None:
    facts = growth_of(row.instance)
    if not facts:
        return None
    href = f"/instances/{row.instance.pk}/"
    free = card.bar.free_bytes if card is not None and card.bar.known else None
    return Item(
        3,
        "warn",
        "trending-up",
        f"Memory of {row.label} grows without load",
        growth_sentence(row.instance, free_bytes=free),
        href,
        datetime.fromtimestamp(float(facts["since"]), UTC),
        (("Restart", f"{href}restart/", True),) if may_operate else (),
    )


def _pressure(row: Row, card: GpuCard, may_operate: bool) -> Item | None:
    """Requests wait although the limit would allow more: others hold the card. Preempted requests wait, too."""
    waiting, limit = row.reading.get("waiting") or 0, row.reading.get("limit") or 0
    bundle = row.instance.bundle_bytes or 0
    if not waiting or not bundle or not card.bar.known or limit - row.share.footprint_bytes < bundle:
        return None
    if card.bar.free_bytes - kv_headroom_bytes(card.bar.total_bytes, elastic=True) >= bundle:
        return None
    holders = sorted(((share.resident_bytes, share.label) for share in card.bar.shares), reverse=True)
    held = [f"{label} {words.gib(size)}" for size, label in holders[:MOST_NAMED] if size]
    if card.bar.other_bytes > 0:
        held.append(f"other processes {words.gib(card.bar.other_bytes)}")
    preempted = row.reading.get("preemptions") or 0
    return Item(
        2,
        "warn",
        "stack-push",
        f"GPU {card.gpu.index} of {card.gpu.host.name} has no page left for {row.label}",
        f"{waiting} request{'s wait' if waiting != 1 else ' waits'} ({preempted:.0f} preempted since its start), and "
        f"its limit would allow {words.gib(limit - row.share.footprint_bytes)} GiB more. "
        f"Held, in GiB: {', '.join(held)}. Lower the limit of one of them, or let the controller divide the card.",
        f"/gpus/{card.gpu.pk}/",
        None,
        (("Policies", "/policies/", False),) if may_operate else (),
    )
