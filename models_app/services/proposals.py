"""What to do about a start that lacked memory: room on the GPU, a shorter context, a smaller KV limit; with numbers.

One that waits to be placed needs room alone. A start that failed is not tried again as it was. Each proposal can be
taken as it is: its options are saved and the model is launched again, or room is made for it by the plan that is shown
before.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gpus_app.policies.base import gib
from models_app.errors import Conflict, NotFound
from models_app.models import Instance, LaunchAttempt
from models_app.services import specs
from models_app.services.lifecycle.launch import instance_restart
from models_app.services.lifecycle.restart_policy import NO_MEMORY
from models_app.services.memory import placement
from models_app.services.memory.placement import Wish
from models_app.services.models import model_update
from models_app.states import InstanceState

ROOM, CONTEXT, LIMIT = "room", "context", "limit"
#: Contexts are proposed in such steps of tokens; below the smallest the model is of no use.
_STEP_TOKENS, _FEWEST_TOKENS = 256, 512
_FITS = re.compile(r"estimated maximum model length is (\d+)")


@dataclass(frozen=True)
class Proposal:
    """``changes``: options of the model that are saved when it is taken. ``page``: where room is planned and shown."""

    kind: str
    title: str
    why: str
    changes: dict[str, Any]
    page: str = ""


def proposals_of(row: Instance) -> list[Proposal]:
    """For an instance whose newest start failed for lack of memory before it served, or that finds no place for lack of
    it; empty for any other.
    """
    if row.state == InstanceState.PENDING:
        return _room_to_be_placed(row)
    attempt = row.attempt
    if row.state != InstanceState.FAILED or attempt is None or row.ready_at is not None:
        return []
    if attempt.cause_code not in NO_MEMORY:
        return []
    found = placement.place(row.model, Wish.of(row.model, row.placement_wish), unusable=specs.unusable_hosts(row.model))
    need, have = found.need, found.decision.largest_bytes
    kv_room = max(0, have - need.baseline_bytes)
    proposals = [_room(row, need.total_bytes, have)]
    proposals += _context(row, attempt, kv_room)
    proposals += _limit(row, kv_room)
    return proposals


def _room_to_be_placed(row: Instance) -> list[Proposal]:
    wish = Wish.of(row.model, row.placement_wish)
    found = placement.place(row.model, wish, without=row.pk, unusable=specs.unusable_hosts(row.model))
    short = found.need.total_bytes > found.decision.largest_bytes > 0
    if found.decision.gpus or not short:  # it is placed at the next look, or no card may take it at all
        return []
    return [_room(row, found.need.total_bytes, found.decision.largest_bytes)]


def _room(row: Instance, need_bytes: int, have_bytes: int) -> Proposal:
    numbers = f"It needs about {gib(need_bytes)} per GPU, the emptiest has {gib(have_bytes)} to give."
    page = f"/models/{row.model_id}/launch/"
    if need_bytes <= have_bytes:
        why = f"{numbers} There was less when it failed, or it takes more than reckoned: look at the plan first."
        return Proposal(ROOM, "Launch it where there is room now", why, {}, page)
    short = f"{gib(need_bytes - have_bytes)} are missing."
    why = f"{numbers} {short} The plan is shown before anything is done: caches trimmed, limits of the idle lowered."
    return Proposal(ROOM, "Make room on a GPU, then launch it", why, {}, page)


def _context(row: Instance, attempt: LaunchAttempt, kv_room: int) -> list[Proposal]:
    """By the engine's own estimate where it gave one, else by what is left for one request."""
    facts: dict[str, Any] = row.model.facts or {}
    now = row.model.max_model_len or int(facts.get("max_position_embeddings") or 0)
    per_token = int(facts.get("kv_bytes_per_token_per_gpu") or 0)
    told = _FITS.search(attempt.log_tail)
    fits = int(told[1]) if told else kv_room // per_token if per_token else 0
    tokens = fits // _STEP_TOKENS * _STEP_TOKENS
    if not now or not _FEWEST_TOKENS <= tokens < now:
        return []
    by = "The engine reckons" if told else f"With {gib(kv_room)} left beside the weights, one request has room for"
    why = f"{by} {fits} tokens; now it is {now}. Longer requests are refused then."
    return [Proposal(CONTEXT, f"Shorten the context to {tokens} tokens", why, {"max_model_len": tokens})]


def _limit(row: Instance, kv_room: int) -> list[Proposal]:
    """Where a limit at start is more than there is room for: as much as there is, if the engine can live with it."""
    asked = row.model.initial_limit_bytes or 0
    facts: dict[str, Any] = row.model.facts or {}
    bundle = int(facts.get("bundle_bytes") or row.bundle_bytes or 2 * 1024**2)
    floor = int(facts.get("safety_floor_bytes") or row.safety_floor_bytes or bundle)
    size = kv_room // bundle * bundle
    if not row.model.kvcached or not floor <= size < asked:
        return []
    why = f"It starts with {gib(asked)} of KV memory per GPU, there is room for {gib(kv_room)}. It can be raised later."
    return [Proposal(LIMIT, f"Start with a KV limit of {gib(size)}", why, {"initial_limit_bytes": size})]


def proposal_take(row: Instance, kind: str, *, actor: str) -> Proposal:
    """Save what it changes and launch again. Raises NotFound when it is not proposed (any more), Conflict for room,
    which is made by its own plan, and what saving and launching raise.
    """
    chosen = next((one for one in proposals_of(row) if one.kind == kind), None)
    if chosen is None:
        raise NotFound("That is not proposed for this instance, or not any more.")
    if not chosen.changes:
        raise Conflict("Room is made by its plan: look at it, then confirm it.")
    model_update(row.model, actor=actor, **chosen.changes)
    row.refresh_from_db()
    instance_restart(row, actor=actor)
    return chosen
