"""Models that requests ask for in vain, and models that drive one another out, as lines to attend to."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from models_app.models import Model
from models_app.presentation.item import Item
from models_app.selectors import DEMAND_REFUSED_S
from models_app.services.plans.thrash import thrash_pairs

#: While requests wait, the wish is repeated more often than this.
_SHOWN_S = 2 * DEMAND_REFUSED_S


def of_demand(*, may_operate: bool) -> list[Item]:
    """Each with since when, why, and what comes next. Four queries at most."""
    return [*_asked_for(may_operate=may_operate), *_thrash()]


def wish_sentence(model: Model) -> str:
    """Why a model that is asked for does not come up, and what becomes of the requests; empty when it is not so."""
    facts = model.demand_facts
    if not facts or time.time() - float(facts["at"]) > _SHOWN_S:
        return ""
    follow = "Requests wait, and it is tried again every few seconds."
    if facts["code"] != "waits":
        follow = f"Requests are turned away; from {DEMAND_REFUSED_S:.0f} s after the last try one may try again."
    return f"{facts['reason']} {follow}"


def _asked_for(*, may_operate: bool) -> list[Item]:
    found = []
    for model in Model.objects.filter(on_demand=True).exclude(demand_facts={}):
        facts, sentence = model.demand_facts, wish_sentence(model)
        if not sentence:
            continue
        waits = facts["code"] == "waits"
        acts = (("Launch", f"/models/{model.pk}/launch/", True),) if may_operate else ()
        found.append(
            Item(
                3 if waits else 1,
                "warn" if waits else "bad",
                "hourglass" if waits else "ban",
                f"{model} is asked for and {'waits for room' if waits else 'cannot come up'}",
                sentence,
                f"/models/{model.pk}/",
                datetime.fromtimestamp(float(facts["since"]), UTC),
                acts,
            )
        )
    return found


def _thrash() -> list[Item]:
    return [
        Item(
            2,
            "warn",
            "arrows-exchange",
            f"{pair.models[0]} and {pair.models[1]} evict one another",
            pair.sentence,
            f"/models/{pair.models[0].pk}/",
            pair.since,
        )
        for pair in thrash_pairs()
    ]
