"""Room for a model that a request asks for: from whom it may be taken without asking anyone, and whether waiting helps.

Idle ones go first, the least important and no more than needed (``gpus_app.policies.make_room``). Put away are only
those who come back by a request themselves, who have been there for the minimum residence and idle for some seconds.
Nobody at work is ever stopped for a request.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime

from django.conf import settings
from django.utils import timezone

from gpus_app.policies.base import Harm, InstanceView, gib
from gpus_app.policies.fit import Verdict
from models_app import transitions
from models_app.errors import Conflict, DoesNotFit, SardeenzError
from models_app.models import Instance, Model, Operation
from models_app.services.audit import audit
from models_app.services.memory.cards import Card, cards
from models_app.services.plans.room import room_judge, room_make, room_wake_make
from models_app.services.plans.room_terms import Terms
from models_app.services.plans.room_wake import wake_plans
from models_app.services.plans.thrash import residence_s, thrash_pairs, turns_between

#: Idle for less, and its next request is probably on its way. Seconds.
IDLE_FOR_S = 5.0


class Later(SardeenzError):
    """Not now, but it is worth waiting for."""

    code = "later"
    status = 409


def make(model: Model, sleeper: Instance | None, *, actor: str) -> Operation:
    """Begin to make room, and to launch the model or to wake ``sleeper`` in it.

    Raises Later when only time stands in the way, DoesNotFit with who holds what otherwise.
    """
    found = cards(sleeper.gpu_uuids if sleeper else None)
    safe = _Safe(model, time.time())
    refusal: SardeenzError | None = None
    for terms in safe.terms(found):
        try:
            operation = (
                room_wake_make(sleeper, actor=actor, terms=terms)
                if sleeper is not None
                else room_make(model, actor=actor, terms=terms)
            )
        except DoesNotFit as exc:
            refusal = exc
            continue
        except Conflict as exc:  # the card is being rearranged, or its reading is old
            raise Later(exc.message) from exc
        _tell_of_thrash(model)
        return operation
    sentence = safe.sentence(found) or (refusal.message if refusal else "")
    if _would_fit_later(model, sleeper, found):
        raise Later(f"It waits for room. {sentence}")
    raise DoesNotFit(f"{refusal.message if refusal else ''} {sentence}".strip())


class _Safe:
    """Who is not put away for this model now, and why."""

    def __init__(self, model: Model, now: float) -> None:
        self.model = model
        self.now = now
        self.turns = turns_between(datetime.fromtimestamp(now, timezone.get_current_timezone()))

    def terms(self, found: dict[str, Card]) -> list[Terms]:
        """First with everybody at work left as they are; if that is not enough, their spare room too."""
        rows = [(row, card.instances[row.id]) for card in found.values() for row in card.rows]
        spared = frozenset(row.id for row, instance in rows if self.why(row, instance))
        busy = frozenset(row.id for row, _ in rows if not row.idle)
        return [Terms(Harm.STOP_IDLE, spared, busy), Terms(Harm.STOP_IDLE, spared)]

    def why(self, row: InstanceView, instance: Instance) -> str:
        """Why this instance stays; empty when it may be put away."""
        if instance.model.pinned:
            return "pinned"
        if not instance.model.on_demand:
            return "no request would bring it back"
        if row.asleep:
            return ""
        if row.ready_since is None:
            return "starting"
        if not row.idle or row.idle_since is None:
            return "at work"
        age = self.now - row.ready_since
        least = self._residence(instance.model)
        if age < least:
            return f"came up {age:.0f} s ago and stays for {least:.0f} s"
        if self.now - row.idle_since < IDLE_FOR_S:
            return f"was at work {self.now - row.idle_since:.0f} s ago"
        return ""

    def _residence(self, other: Model) -> float:
        if other.pk == self.model.pk:
            return float(settings.RESIDENCE_S)
        return residence_s(len(self.turns.get(frozenset((self.model.pk, other.pk)), ())))

    def sentence(self, found: dict[str, Card]) -> str:
        """Who holds what on the cards, with why each of them stays."""
        held = [
            f"{gib(row.held_bytes)} by {row.name} ({why})"
            for row, instance in _once(found)
            if (why := self.why(row, instance))
        ]
        return f"Held are {', '.join(held)}." if held else ""


def _once(found: dict[str, Card]) -> Iterable[tuple[InstanceView, Instance]]:
    seen: set[int] = set()
    for card in found.values():
        for row in card.rows:
            if row.id not in seen:
                seen.add(row.id)
                yield row, card.instances[row.id]


def _would_fit_later(model: Model, sleeper: Instance | None, found: dict[str, Card]) -> bool:
    """Whether there would be room if everybody who may be put away had nothing to do and had been there for long."""
    spared = frozenset(row.id for row, one in _once(found) if one.model.pinned or not one.model.on_demand)
    terms = Terms(Harm.STOP_IDLE, spared, settled=True)
    if sleeper is not None:
        return all(plan.feasible for plan in wake_plans(sleeper, terms, found, time.time()))
    return room_judge(model, terms=terms).judgement.verdict is not Verdict.DOES_NOT_FIT


def _tell_of_thrash(model: Model) -> None:
    """Once a turn: in the audit, and in the history of both."""
    for pair in thrash_pairs():
        if model in pair.models:
            one, other = pair.models
            audit("policy:on-demand", "demand.thrash", f"{one} and {other}", "ok", pair.sentence)
            for row in Instance.objects.live().filter(model__in=pair.models):
                transitions.note(row.pk, "thrash", pair.sentence, actor="policy:on-demand")
