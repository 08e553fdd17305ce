"""What is served: making, changing and deleting models, with one sentence per wrong field before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpus_app.models import Host
from models_app.engines.facts import ModelFacts
from models_app.models import Model


@dataclass(frozen=True)
class CommandPreview:
    """The command line that a launch would run, secrets masked; ``text`` is quoted for a shell."""

    argv: list[str]
    text: str


def model_check(
    fields: Mapping[str, Any], *, model: Model | None = None, allow_risky: bool = False
) -> dict[str, list[str]]:
    """Every wrong field with its sentences; empty when all is well. ``model``: the row being changed, if any."""
    raise NotImplementedError


def model_create(*, actor: str, allow_risky: bool = False, **fields: Any) -> Model:
    """Make a model. Fields are those of ``Model`` plus ``aliases`` (list of names) and those of ``MemoryPolicy``.

    ``host`` may be a Host, its name or None; ``fallback`` a Model, its name or None; sizes numbers or texts (``3G``).
    Raises InvalidInput with sentences per field; Conflict when the name was taken in between.
    """
    raise NotImplementedError


def model_update(
    model: Model, *, actor: str, expected_revision: int | None = None, allow_risky: bool = False, **fields: Any
) -> Model:
    """Change fields of a model; ``spec_revision`` rises when an option of the engine changes.

    Raises StaleRevision when ``expected_revision`` is no longer the row's, InvalidInput as ``model_create``.
    """
    raise NotImplementedError


def model_delete(model: Model, *, actor: str) -> None:
    """Delete a model with its history. Raises Conflict while an instance of it is live."""
    raise NotImplementedError


def model_facts(model: Model) -> ModelFacts | None:
    """Architecture facts of the model, from its row; None when they are not known."""
    raise NotImplementedError


def command_preview(model: Model | Mapping[str, Any], *, host: Host | None = None) -> CommandPreview:
    """The exact command line of a launch, from a row or from the form's fields."""
    raise NotImplementedError
