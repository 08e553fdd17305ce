"""What is served: making, changing and deleting models, with one sentence per wrong field before anything starts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import F

from gpus_app.models import Host
from models_app import events
from models_app.engines.facts import ModelFacts
from models_app.errors import Conflict, InvalidInput, StaleRevision
from models_app.models import MemoryPolicy, Model, ModelAlias
from models_app.services import specs
from models_app.services.audit import audited
from models_app.services.locks import NAMES, transaction_lock
from models_app.services.model_check import Judgement, candidate_of, judge, taken_names
from models_app.services.model_fields import ENGINE_FIELDS, POLICY_READERS, read_fields


@dataclass(frozen=True)
class CommandPreview:
    """The command line that a launch would run, secrets masked; ``text`` is quoted for a shell."""

    argv: list[str]
    text: str


def model_check(
    fields: Mapping[str, Any], *, model: Model | None = None, allow_risky: bool = False
) -> dict[str, list[str]]:
    """Every wrong field with its sentences; empty when all is well. ``model``: the row being changed, if any."""
    return judge(fields, model=model, allow_risky=allow_risky).errors


def model_create(*, actor: str, allow_risky: bool = False, **fields: Any) -> Model:
    """Make a model. Fields are those of ``Model``, those of ``MemoryPolicy``, ``aliases`` (names) and
    ``alias_defaults`` (per alias, the options of requests that have none).

    ``host`` may be a Host, its name or None; ``fallback`` a Model, its name or None; sizes numbers or texts (``3G``).
    Raises InvalidInput with sentences per field; Conflict when the name was taken in between.
    """
    with audited(actor, "model.create", str(fields.get("served_model_name", ""))[:128]):
        found = judge(fields, allow_risky=allow_risky)
        if found.errors:
            raise InvalidInput(found.errors)
        values, policy, aliases, presets = _split(found)
        try:
            with transaction.atomic():
                _names_free([values["served_model_name"], *aliases], None)
                model = Model.objects.create(created_by=actor[:150], facts=found.facts or {}, **values)
                MemoryPolicy.objects.create(model=model, **policy)
                _aliases_write(model, aliases, presets or {})
                events.publish_models_on_commit()
        except IntegrityError:
            raise Conflict(f"The name {values['served_model_name']!r}, or an alias, was taken just now.") from None
    return model


def model_update(
    model: Model, /, *, actor: str, expected_revision: int | None = None, allow_risky: bool = False, **fields: Any
) -> Model:
    """Change fields of a model; ``spec_revision`` rises when an option of the engine changes.

    Running instances keep the options that they were started with. Raises StaleRevision when ``expected_revision`` is
    no longer the row's, InvalidInput as ``model_create``, Conflict for a new served name while an instance is live.
    """
    with audited(actor, "model.update", model.served_model_name, ", ".join(sorted(fields))):
        found = judge(fields, model=model, allow_risky=allow_risky)
        if found.errors:
            raise InvalidInput(found.errors)
        values, policy, aliases, presets = _split(found)
        names = aliases if "aliases" in found.values else None
        try:
            with transaction.atomic():
                _update(model.pk, values, policy, names, presets, found, expected_revision)
        except IntegrityError:
            raise Conflict("The name, or an alias, was taken just now.") from None
    model.refresh_from_db()
    return model


def model_delete(model: Model, *, actor: str) -> None:
    """Delete a model with its history. Raises Conflict while an instance of it is live."""
    with audited(actor, "model.delete", model.served_model_name), transaction.atomic():
        locked = Model.objects.select_for_update(of=("self",)).get(pk=model.pk)
        live = locked.instances.live().count()
        if live:
            raise Conflict(f"{live} instance{' is' if live == 1 else 's are'} live: stop {locked} first.", live=live)
        locked.delete()
        events.publish_models_on_commit()


def model_facts(model: Model) -> ModelFacts | None:
    """Architecture facts of the model, from its row; None when they are not known."""
    return ModelFacts.from_json(model.facts) if model.facts else None


def command_preview(model: Model | Mapping[str, Any], *, host: Host | None = None) -> CommandPreview:
    """The exact command line of a launch, from a row or from the form's fields. Raises InvalidInput."""
    aliases: list[str] | None = None
    if not isinstance(model, Model):
        values, errors = read_fields(model)
        if errors:
            raise InvalidInput(errors)
        aliases = values.pop("aliases", [])
        values.pop("alias_defaults", None)
        model = candidate_of(values)
    argv = list(specs.preview(model, host or model.host, aliases).masked_argv)
    return CommandPreview(argv, shlex.join(argv))


def _split(found: Judgement) -> tuple[dict[str, Any], dict[str, Any], list[str], dict[str, Any] | None]:
    """Columns of the model, of its policy, aliases, and the aliases' own defaults (None: not given)."""
    values = dict(found.values)
    aliases = values.pop("aliases", [])
    presets = values.pop("alias_defaults", None)
    policy = {name: values.pop(name) for name in POLICY_READERS if name in values}
    return values, policy, aliases, presets


def _aliases_write(model: Model, names: list[str], presets: Mapping[str, dict[str, Any]]) -> None:
    """Exactly these aliases, each with its defaults."""
    model.aliases.all().delete()
    ModelAlias.objects.bulk_create(
        ModelAlias(name=name, model=model, request_defaults=presets.get(name, {})) for name in names
    )


def _names_free(names: list[str], model: Model | None) -> None:
    """Look again under a lock: three tables hold names, and no constraint spans them."""
    transaction_lock(NAMES)
    taken = taken_names(names, besides=model)
    if taken:
        raise Conflict(next(iter(taken.values())))


def _update(
    pk: int,
    values: dict[str, Any],
    policy: dict[str, Any],
    aliases: list[str] | None,
    presets: dict[str, Any] | None,
    found: Judgement,
    expected_revision: int | None,
) -> None:
    row = Model.objects.select_for_update(of=("self",)).get(pk=pk)
    if expected_revision is not None and row.spec_revision != expected_revision:
        raise StaleRevision(
            f"{row} was changed in the meantime (revision {row.spec_revision}, not {expected_revision}): look again.",
            revision=row.spec_revision,
        )
    if (
        values.get("served_model_name", row.served_model_name) != row.served_model_name
        and row.instances.live().exists()
    ):
        raise Conflict("Its engines know it by the old name: stop it before giving it another.")
    before = dict(row.aliases.values_list("name", "request_defaults"))
    names = list(before) if aliases is None else aliases
    if "served_model_name" in values or aliases is not None:
        _names_free([values.get("served_model_name", row.served_model_name), *names], row)
    changed = {name for name, value in values.items() if getattr(row, name) != value}
    if sorted(names) != sorted(before):
        changed.add("aliases")
    kept = before if presets is None else presets
    if {name: kept.get(name, {}) for name in names} != before:
        _aliases_write(row, names, kept)
    for name, value in values.items():
        setattr(row, name, value)
    if found.facts is not None:
        row.facts = found.facts
    row.save()
    if changed & ENGINE_FIELDS:
        Model.objects.filter(pk=pk).update(spec_revision=F("spec_revision") + 1)
    if policy:
        MemoryPolicy.objects.update_or_create(model=row, defaults=policy)
    events.publish_models_on_commit()
