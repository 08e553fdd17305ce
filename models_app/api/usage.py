"""/usage: what was used per key, model and day. A viewer's key sees its own."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from ninja import Query, Router

from gpus_app.api import ERRORS
from models_app.api.auth import caller_of
from models_app.api.schemas import Text
from models_app.api.schemas_access import UsageOut
from models_app.errors import Forbidden
from models_app.permissions import role_at_least
from models_app.presentation.usage_file import csv_response
from models_app.usage_report import By, UsageFilter, days_of, usage_report

router = Router()


Day = Annotated[date | None, Query(description="UTC; part of what is shown.")]
Named = Annotated[Text | None, Query(max_length=128)]


def _filter(
    request: HttpRequest, start: date | None, end: date | None, key: str | None, model: str | None
) -> UsageFilter:
    """Raises InvalidInput for days in the wrong order, Forbidden for keys that are not the caller's to see."""
    first, last = days_of(start, end)
    caller = caller_of(request)
    if not role_at_least(caller.role, "operator"):
        if caller.key_name is None or key not in (None, caller.key_name):
            raise Forbidden("The usage of other keys is for operators; a viewer's key sees its own.")
        key = caller.key_name
    return UsageFilter(first, last, key or None, model or None)


@router.get("/usage", response={200: UsageOut, **ERRORS})
def list_usage(
    request: HttpRequest,
    start: Day = None,
    end: Day = None,
    key: Named = None,
    model: Named = None,
    by: By = "all",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
) -> Any:
    """The last seven days where none are given. ``by``: a line per day, key and model (all), or per one of these."""
    wanted = _filter(request, start, end, key, model)
    report = usage_report(wanted, by)
    return {
        "start": wanted.start,
        "end": wanted.end,
        "count": len(report.lines),
        "totals": report.totals,
        "items": report.lines[offset : offset + limit],
    }


@router.get(
    "/usage.csv",
    response=ERRORS,
    openapi_extra={"responses": {200: {"description": "OK", "content": {"text/csv": {"schema": {"type": "string"}}}}}},
)
def usage_file(
    request: HttpRequest, start: Day = None, end: Day = None, key: Named = None, model: Named = None
) -> HttpResponseBase:
    """All rows that are meant, one per day, key and model, as CSV (RFC 4180)."""
    return csv_response(request, _filter(request, start, end, key, model))
