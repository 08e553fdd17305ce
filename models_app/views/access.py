"""The audit trail, and the reader's own choice of theme."""

from __future__ import annotations

from django.core.paginator import Paginator
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.views.decorators.http import require_GET, require_POST

from models_app.models import AuditEntry
from models_app.permissions import require_role
from models_app.presentation.shell import THEME_COOKIE, THEMES
from models_app.views.common import back_address, is_fragment

PAGE = 50


@require_GET
@require_role("admin")
def audit_trail(request: HttpRequest) -> HttpResponse:
    """Who did what, newest first; searched and paged on the server."""
    rows = AuditEntry.objects.all()
    wanted = request.GET.get("q", "").strip()
    if wanted:
        rows = rows.filter(
            Q(actor__icontains=wanted)
            | Q(action__icontains=wanted)
            | Q(target__icontains=wanted)
            | Q(detail__icontains=wanted)
        )
    outcome = request.GET.get("outcome", "")
    if outcome in ("ok", "refused", "failed"):
        rows = rows.filter(outcome=outcome)
    page = Paginator(rows, PAGE).get_page(request.GET.get("page"))
    context = {"page": page, "q": wanted, "outcome": outcome}
    template = "models_app/_audit.html" if is_fragment(request) else "models_app/audit.html"
    return render(request, template, context)


@require_POST
def theme(request: HttpRequest) -> HttpResponse:
    """Remember light, dark or the system's in a cookie that the server reads too, so that no page flashes."""
    response = HttpResponseRedirect(back_address(request, "/"))
    chosen = request.POST.get("theme")
    if chosen in THEMES:
        # The script switches it as well, so it is no secret from scripts.
        response.set_cookie(THEME_COOKIE, chosen, max_age=365 * 86400, samesite="Lax", secure=request.is_secure())
    return response
