"""Weighted routes: names whose requests are spread over several models."""

from __future__ import annotations

import json
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseBase, HttpResponseRedirect
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_http_methods, require_POST

from models_app.errors import InvalidInput, SardeenzError
from models_app.models import Model, WeightedRoute
from models_app.permissions import require_role
from models_app.services.routes import route_delete, route_save
from models_app.views.common import act, actor_of

#: Empty lines of the form below those that are filled in.
_SPARE_LINES = 3


@require_http_methods(["GET", "POST"])
@require_role("viewer")
def routes(request: HttpRequest) -> HttpResponseBase:
    """The list, with the form for a new route."""
    return _save(request, None) if request.method == "POST" else _page(request, None)


@require_http_methods(["GET", "POST"])
@require_role("viewer")
def route(request: HttpRequest, route_id: int) -> HttpResponseBase:
    """The list, with the form of one route."""
    row = get_object_or_404(WeightedRoute, pk=route_id)
    return _save(request, row) if request.method == "POST" else _page(request, row)


@require_POST
@require_role("operator")
def delete(request: HttpRequest, route_id: int) -> HttpResponse:
    row = get_object_or_404(WeightedRoute, pk=route_id)

    def work() -> str:
        route_delete(row, actor=actor_of(request))
        return f"The route {row.name} is deleted; its models stay."

    return act(request, work, back="/routes/", go=True)


def _page(
    request: HttpRequest,
    row: WeightedRoute | None,
    *,
    given: dict[str, Any] | None = None,
    errors: dict[str, list[str]] | None = None,
    status: int = 200,
) -> HttpResponse:
    given = given or _given(row)
    lines = given["lines"] + [("", "")] * _SPARE_LINES
    rows = WeightedRoute.objects.prefetch_related("targets__model")
    context = {
        "route": row,
        "lines": [
            {
                "name": one.name,
                "pk": one.pk,
                "defaults": one.request_defaults,
                "shares": _shares([(target.model, target.weight) for target in one.targets.all()]),
            }
            for one in rows
        ],
        "models": Model.objects.values_list("served_model_name", flat=True),
        "given": given,
        "targets": lines,
        "errors": errors or {},
    }
    return render(request, "models_app/routes.html", context, status=status)


def _shares(targets: list[tuple[Model, int]]) -> list[dict[str, Any]]:
    """Each model with its weight and what that is of all requests, in percent."""
    total = sum(weight for _model, weight in targets)
    return [{"model": model, "weight": weight, "percent": round(100 * weight / total)} for model, weight in targets]


def _given(row: WeightedRoute | None) -> dict[str, Any]:
    if row is None:
        return {"name": "", "request_defaults": "", "lines": []}
    lines = [(target.model.served_model_name, str(target.weight)) for target in row.targets.select_related("model")]
    return {
        "name": row.name,
        "request_defaults": json.dumps(row.request_defaults) if row.request_defaults else "",
        "lines": lines,
    }


@require_role("operator")
def _save(request: HttpRequest, row: WeightedRoute | None) -> HttpResponse:
    data = request.POST
    pairs = zip(data.getlist("model"), data.getlist("weight"), strict=False)
    lines = [(model, weight.strip()) for model, weight in pairs if model]
    given: dict[str, Any] = {
        "name": data.get("name", "").strip(),
        "request_defaults": data.get("request_defaults", "").strip(),
        "lines": lines,
    }
    errors: dict[str, list[str]] = {}
    doubled = sorted({model for model, _weight in lines if [name for name, _ in lines].count(model) > 1})
    if doubled:
        errors["targets"] = [f"{doubled[0]} stands there twice."]
        return _page(request, row, given=given, errors=errors, status=422)
    try:
        saved = route_save(
            given["name"],
            actor=actor_of(request),
            targets=dict(lines),
            request_defaults=given["request_defaults"],
            route=row,
        )
    except InvalidInput as exc:
        return _page(request, row, given=given, errors=exc.fields, status=422)
    except SardeenzError as exc:
        return _page(request, row, given=given, errors={"name": [exc.message]}, status=422)
    return HttpResponseRedirect(f"/routes/{saved.pk}/")
