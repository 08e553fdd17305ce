"""/routes: names whose requests are spread over several models by weight."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from django.http import HttpRequest
from ninja import Field, Path, Router, Schema, Status

from gpus_app.api import ERRORS
from models_app.api.auth import caller_of, operator
from models_app.api.schemas import Name, Strict
from models_app.errors import NotFound
from models_app.models import MAX_WEIGHT, WeightedRoute
from models_app.services.routes import route_delete, route_save

router = Router()
RouteName = Annotated[str, Path(max_length=128, description="The name that clients ask for.")]


class RouteIn(Strict):
    """``targets``: served model names with their weights; a model gets its weight over the sum of all."""

    targets: dict[Name, Annotated[int, Field(ge=1, le=MAX_WEIGHT)]]
    request_defaults: dict[str, Any] = {}


class RouteOut(Schema):
    name: str
    targets: dict[str, int]
    request_defaults: dict[str, Any]
    created_by: str
    created_at: datetime
    updated_at: datetime

    @staticmethod
    def resolve_targets(obj: WeightedRoute) -> dict[str, int]:
        return {target.model.served_model_name: target.weight for target in obj.targets.all()}


def _rows() -> Any:
    return WeightedRoute.objects.prefetch_related("targets__model")


def _named(name: str) -> WeightedRoute:
    row: WeightedRoute | None = _rows().filter(name=name).first() if "\x00" not in name else None
    if row is None:
        raise NotFound(f"There is no weighted route named {name!r}.")
    return row


@router.get("", response={200: list[RouteOut], **ERRORS})
def list_routes(request: HttpRequest) -> Any:
    return _rows()


@router.get("/{path:name}", response={200: RouteOut, **ERRORS})
def get_route(request: HttpRequest, name: RouteName) -> Any:
    return _named(name)


@router.put("/{path:name}", auth=operator, response={200: RouteOut, **ERRORS})
def put_route(request: HttpRequest, name: RouteName, payload: RouteIn) -> Any:
    """Make the route, or replace its models and defaults. Putting the same twice changes nothing."""
    row = WeightedRoute.objects.filter(name=name).first() if "\x00" not in name else None
    saved = route_save(
        name,
        actor=caller_of(request).actor,
        targets=payload.targets,
        request_defaults=payload.request_defaults,
        route=row,
    )
    return _named(saved.name)


@router.delete("/{path:name}", auth=operator, response={204: None, **ERRORS})
def delete_route(request: HttpRequest, name: RouteName) -> Any:
    """Its models stay."""
    route_delete(_named(name), actor=caller_of(request).actor)
    return Status(204, None)
