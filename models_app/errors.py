"""Errors with names. Services raise them; doors turn them into a sentence, a 4xx or a retry. Plain Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class SardeenzError(Exception):
    """Base: ``code`` is stable for scripts, the message is a sentence for people, ``status`` the HTTP answer."""

    code = "error"
    status = 500

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts


class InvalidInput(SardeenzError):
    """Bad values, one sentence per field: ``fields`` maps a field's name to its sentences."""

    code = "invalid"
    status = 422

    def __init__(self, fields: Mapping[str, str | list[str]], message: str = "") -> None:
        self.fields: dict[str, list[str]] = {
            name: [text] if isinstance(text, str) else list(text) for name, text in fields.items()
        }
        first = next(iter(self.fields.items()), ("", [""]))
        super().__init__(message or f"{first[0]}: {first[1][0]}", fields=self.fields)


class NotFound(SardeenzError):
    code = "not_found"
    status = 404


class Conflict(SardeenzError):
    """The thing exists already, or is in a state that does not allow the act."""

    code = "conflict"
    status = 409


class BelowFloor(Conflict):
    """A KV limit under the safety floor without ``force``."""

    code = "below_safety_floor"


class StaleRevision(Conflict):
    """Someone changed it first; the last writer is named in the facts."""

    code = "stale_revision"


class DoesNotFit(Conflict):
    """No GPU has room; the facts hold the numbers and what would fit."""

    code = "does_not_fit"


class Forbidden(SardeenzError):
    code = "forbidden"
    status = 403


class BrokerAway(SardeenzError):
    """Redis/Valkey did not take the message in time: nothing was started; reads work on."""

    code = "broker_away"
    status = 503


class EngineUnavailable(SardeenzError):
    """The engine did not answer a control call in time."""

    code = "engine_unavailable"
    status = 503
