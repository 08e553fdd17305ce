"""Whether an engine answers after its sleep as it did before: one greedy token, taken before and compared after.

Weights that were not read again, or a prefix cache that outlived them, still give *an* answer, quickly and in good
form. An engine that cannot be asked (it makes no text) has no known answer, and is believed.
"""

from __future__ import annotations

import logging

from django.conf import settings

from models_app.models import Instance, LaunchAttempt
from models_app.services.access import EngineSaidNo, client

log = logging.getLogger(__name__)

_KEY = "known_answer"
#: A near tie between two tokens can fall either way once; not as often as this.
_TRIES = 3


def answer_keep(row: Instance) -> None:
    """Ask once in the life of a start, while nothing else runs, and remember."""
    attempt = row.attempt
    if attempt is None or _KEY in attempt.memory:
        return
    answer = _ask(row)
    if answer is not None:
        attempt.memory = {**attempt.memory, _KEY: answer}
        LaunchAttempt.objects.filter(pk=attempt.pk).update(memory=attempt.memory)


def answer_differs(row: Instance) -> str:
    """Empty when it answers as before, or nothing is known; else the sentence."""
    known = row.attempt.memory.get(_KEY) if row.attempt else None
    if known is None:
        return ""
    said = None
    for _ in range(_TRIES):
        said = _ask(row)
        if said == known:
            return ""
    return (
        "It makes no token." if said is None else f"It answers {said!r} where it answered {known!r} before its sleep."
    )


def _ask(row: Instance) -> str | None:
    try:
        return client(row, limit_s=settings.CONTROL_CALL_LIMIT_S).probe_token(row.model.served_model_name)
    except EngineSaidNo as exc:
        log.info("%s gives no token to compare: %s", row, exc.message)
        return None
