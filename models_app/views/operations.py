"""Long work: the tray in the header, the list, one operation with its steps, and its cancelling."""

from __future__ import annotations

from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_GET, require_POST

from models_app.models import Operation
from models_app.permissions import require_role
from models_app.services.plans.operations import operation_cancel
from models_app.views.common import act, actor_of, target_is

PAGE = 30
IN_TRAY = 8


@require_GET
@require_role("viewer")
def operations(request: HttpRequest) -> HttpResponse:
    rows = Operation.objects.select_related("model", "instance")
    page = Paginator(rows, PAGE).get_page(request.GET.get("page"))
    template = "models_app/_operations.html" if target_is(request, "operations") else "models_app/operations.html"
    return render(request, template, {"page": page})


@require_GET
@require_role("viewer")
def operations_tray(request: HttpRequest) -> HttpResponse:
    """The newest few; those under way first."""
    rows = list(Operation.objects.all()[: IN_TRAY * 2])
    rows.sort(key=lambda row: not row.is_open)
    return render(request, "models_app/_operations_tray.html", {"operations": rows[:IN_TRAY]})


@require_GET
@require_role("viewer")
def operations_count(request: HttpRequest) -> HttpResponse:
    return render(request, "models_app/_operations_count.html")


@require_GET
@require_role("viewer")
def operation(request: HttpRequest, operation_id: int) -> HttpResponse:
    row = get_object_or_404(Operation.objects.select_related("model", "instance"), pk=operation_id)
    template = "models_app/_operation.html" if target_is(request, "operation") else "models_app/operation.html"
    return render(request, template, {"operation": row})


@require_POST
@require_role("operator")
def operation_stop(request: HttpRequest, operation_id: int) -> HttpResponse:
    row = get_object_or_404(Operation, pk=operation_id)

    def work() -> str:
        operation_cancel(row, actor=actor_of(request))
        return "It is asked to end; the step under way finishes first."

    return act(request, work, back=f"/operations/{row.pk}/", changed={"names": ["operations"]})
