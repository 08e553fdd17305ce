"""Weighted routes: one name, several models, each with its share of the requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import IntegrityError, transaction

from models_app import events
from models_app.errors import Conflict, InvalidInput
from models_app.models import MAX_WEIGHT, Model, RouteTarget, WeightedRoute
from models_app.services.audit import audited
from models_app.services.locks import NAMES, transaction_lock
from models_app.services.model_check import taken_names
from models_app.services.model_fields import READERS

#: More models behind one name than anybody can weigh.
MAX_TARGETS = 32


def route_save(
    name: str,
    *,
    actor: str,
    targets: Mapping[str, Any],
    request_defaults: Any = None,
    route: WeightedRoute | None = None,
) -> WeightedRoute:
    """Make a weighted route, or change ``route``; ``targets`` maps served model names to weights (whole, 1 to 1000).

    Raises InvalidInput with sentences per field (name, targets, request_defaults).
    """
    with audited(actor, "route.save", name[:128], ", ".join(f"{model} {weight}" for model, weight in targets.items())):
        wrong: dict[str, list[str]] = {}
        clean = _read("served_model_name", name, "name", wrong)
        defaults = _read("request_defaults", request_defaults, "request_defaults", wrong)
        weights = _weights(targets, wrong)
        try:
            with transaction.atomic():
                transaction_lock(NAMES)
                if clean is not None and (taken := taken_names([clean], besides_route=route)):
                    wrong.setdefault("name", []).append(taken[clean])
                if wrong:
                    raise InvalidInput(wrong)
                row = route or WeightedRoute(created_by=actor[:150])
                row.name, row.request_defaults = clean, defaults
                row.save()
                row.targets.all().delete()
                RouteTarget.objects.bulk_create(
                    RouteTarget(route=row, model=model, weight=weight) for model, weight in weights.items()
                )
                events.publish_models_on_commit()
        except IntegrityError:
            raise Conflict(f"The name {name!r} was taken just now, or one of its models is gone.") from None
    return row


def route_delete(route: WeightedRoute, *, actor: str) -> None:
    """Its models stay; requests for the name get 404 from now on."""
    with audited(actor, "route.delete", route.name), transaction.atomic():
        route.delete()
        events.publish_models_on_commit()


def _read(reader: str, value: Any, name: str, wrong: dict[str, list[str]]) -> Any:
    try:
        return READERS[reader](value)
    except ValueError as exc:
        wrong[name] = [str(exc)]
        return None


def _weights(targets: Mapping[str, Any], wrong: dict[str, list[str]]) -> dict[Model, int]:
    """The models with their weights; what is wrong is said at ``targets``."""
    names = [name for name in targets if "\0" not in name]
    found = {model.served_model_name: model for model in Model.objects.filter(served_model_name__in=names)}
    sentences = []
    weights: dict[Model, int] = {}
    for name, given in targets.items():
        weight = _whole(given)
        if name not in found:
            sentences.append(f"There is no model named {name[:128]!r}.")
        elif weight is None or not 1 <= weight <= MAX_WEIGHT:
            sentences.append(f"The weight of {name} is not a whole number from 1 to {MAX_WEIGHT}.")
        else:
            weights[found[name]] = weight
    if not targets:
        sentences.append("Choose at least one model, with a weight.")
    if len(targets) > MAX_TARGETS:
        sentences.append(f"At most {MAX_TARGETS} models can share one name.")
    if sentences:
        wrong["targets"] = sentences
    return weights


def _whole(value: Any) -> int | None:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        return None
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None
