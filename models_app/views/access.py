"""API keys, the audit trail, and the reader's own choice of theme."""

from __future__ import annotations

from django.core.paginator import Paginator
from django.db.models import Q
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from models_app.errors import InvalidInput, SardeenzError
from models_app.forms.keys import KeyForm
from models_app.models import ApiKey, AuditEntry
from models_app.permissions import require_role
from models_app.presentation.shell import THEME_COOKIE, THEMES
from models_app.services.keys import api_key_create, api_key_revoke
from models_app.views.common import act, actor_of, back_address, dialog, is_fragment, trigger

PAGE = 50


@require_http_methods(["GET", "POST"])
@require_role("admin")
def keys(request: HttpRequest) -> HttpResponse:
    """The list of keys and the form for a new one; a new key is shown once, in the answer to its POST."""
    token = None
    status = 200
    form = KeyForm(request.POST or None)
    if request.method == "POST":
        status = 422
        if form.is_valid():
            data = form.cleaned_data
            try:
                _key, token = api_key_create(
                    data["name"],
                    role=data["role"],
                    actor=actor_of(request),
                    models=data["models"],
                    expires_at=data["expires_at"],
                    requests_per_minute=data["requests_per_minute"],
                    tokens_per_minute=data["tokens_per_minute"],
                    max_concurrency=data["max_concurrency"],
                )
                status, form = 200, KeyForm()
            except InvalidInput as exc:
                for field, sentences in exc.fields.items():
                    form.add_error(field if field in form.fields else None, sentences)
            except SardeenzError as exc:
                form.add_error("name", exc.message)
    rows = ApiKey.objects.prefetch_related("allowed_models").order_by("revoked_at", "name")
    context = {"keys": rows, "form": form, "token": token, "base": f"{request.scheme}://{request.get_host()}"}
    return render(request, "models_app/keys.html", context, status=status)


@require_http_methods(["GET", "POST"])
@require_role("admin")
def key_revoke(request: HttpRequest, key_id: int) -> HttpResponse:
    key = get_object_or_404(ApiKey, pk=key_id)
    if request.method == "GET":
        context = {"key": key, "heading": f"Revoke {key.name}"}
        return dialog(request, "models_app/_key_revoke.html", context, back="/keys/")

    def work() -> str:
        api_key_revoke(key, actor=actor_of(request))
        return f"{key.name} is revoked: requests with it are refused from now on."

    response = act(request, work, back="/keys/")
    return trigger(response, go={"to": "/keys/"}) if is_fragment(request) and response.status_code == 204 else response


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
