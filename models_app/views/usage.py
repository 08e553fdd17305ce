"""What keys and models used, by day: a page with filters, and the same rows as CSV."""

from __future__ import annotations

from typing import Any

from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.views.decorators.http import require_GET

from models_app.forms.usage import UsageForm
from models_app.permissions import require_role
from models_app.presentation.usage_chart import chart_of
from models_app.presentation.usage_file import csv_response
from models_app.usage_report import usage_names, usage_report
from models_app.views.common import is_fragment

PAGE = 50


@require_GET
@require_role("operator")
def usage(request: HttpRequest) -> HttpResponse:
    """The lines of the chosen days, newest first, with their total and a chart. A bad filter shows the default."""
    form = UsageForm(request.GET)
    valid = form.is_valid()
    wanted, by = form.wanted()
    report = usage_report(wanted, by)
    keys, models = usage_names()
    context: dict[str, Any] = {
        "errors": form.sentences(),
        "wanted": wanted,
        "by": by,
        "groupings": UsageForm.GROUPINGS,
        "key_names": keys,
        "model_names": models,
        "page": Paginator(report.lines, PAGE).get_page(request.GET.get("page")),
        "totals": report.totals,
        "chart": chart_of(report, wanted),
    }
    template = "models_app/_usage.html" if is_fragment(request) else "models_app/usage.html"
    return render(request, template, context, status=200 if valid else 422)


@require_GET
@require_role("operator")
def usage_file(request: HttpRequest) -> HttpResponseBase:
    """The rows of the same filter as CSV, one per key, model and day."""
    form = UsageForm(request.GET)
    if not form.is_valid():
        return HttpResponse(" ".join(form.sentences()), status=422, content_type="text/plain; charset=utf-8")
    return csv_response(request, form.wanted()[0])
