"""How views answer: the same act by htmx or by a plain form, named errors as sentences, dialogs that are also pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from django.contrib import messages
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import render
from django.utils.http import url_has_allowed_host_and_scheme
from django_htmx.middleware import HtmxDetails

from gpus_app.errors import ImpossiblePolicy
from models_app.errors import SardeenzError
from models_app.models import Operation
from models_app.permissions import Role, role_of


class HtmxRequest(HttpRequest):
    """A request after django-htmx's middleware."""

    htmx: HtmxDetails


def is_fragment(request: HttpRequest) -> bool:
    """Whether htmx asks for a part of the page (a boosted link wants the whole)."""
    htmx = cast("HtmxRequest", request).htmx
    return bool(htmx) and not htmx.boosted


def target_is(request: HttpRequest, element_id: str) -> bool:
    return is_fragment(request) and cast("HtmxRequest", request).htmx.target == element_id


def actor_of(request: HttpRequest) -> str:
    return cast("User", request.user).get_username()


def role_for(request: HttpRequest) -> Role | None:
    return role_of(request.user)


def back_address(request: HttpRequest, default: str) -> str:
    """Where a plain form goes afterwards: where it came from when that is ours."""
    for candidate in (request.POST.get("next"), request.GET.get("next"), request.META.get("HTTP_REFERER")):
        if (
            candidate
            and url_has_allowed_host_and_scheme(
                candidate, allowed_hosts={request.get_host()}, require_https=request.is_secure()
            )
            and not candidate.endswith(request.path)
        ):
            return candidate
    return default


def trigger(response: HttpResponse, **events: Any) -> HttpResponse:
    """Add browser events to an answer for htmx: ``toast``, ``close``, ``changed``, ``go`` (``static/js/app.js``)."""
    known: dict[str, Any] = json.loads(response.headers.get("HX-Trigger", "{}"))
    known |= {f"sz:{name}": value for name, value in events.items()}
    response.headers["HX-Trigger"] = json.dumps(known)
    return response


def done(
    request: HttpRequest, message: str, *, back: str, tone: str = "ok", go: bool = False, **events: Any
) -> HttpResponse:
    """An act went through: a toast for htmx, a message and a redirect to ``back`` for a plain form.

    With ``go`` the page of htmx goes there too, for what it shows is gone or goes on elsewhere.
    """
    if is_fragment(request):
        if go:
            events["go"] = {"to": back}
        return trigger(HttpResponse(status=204), toast={"text": message, "tone": tone}, close=True, **events)
    level = {"ok": messages.SUCCESS, "warn": messages.WARNING, "bad": messages.ERROR}.get(tone, messages.INFO)
    messages.add_message(request, level, message)
    return HttpResponseRedirect(back)


def under_way(request: HttpRequest, operation: Operation) -> HttpResponse:
    """Work of several steps has begun: it is watched on its own page."""
    return done(request, f"{operation.title}: under way.", back=f"/operations/{operation.pk}/", go=True)


def refused(request: HttpRequest, error: SardeenzError | ImpossiblePolicy, *, back: str) -> HttpResponse:
    """An act did not go through: its sentence as a toast, or as a message on the page that it came from."""
    text = error.message if isinstance(error, SardeenzError) else str(error)
    status = error.status if isinstance(error, SardeenzError) else 422
    if is_fragment(request):
        response = HttpResponse(text, status=status, content_type="text/plain; charset=utf-8")
        response.headers["HX-Reswap"] = "none"
        return trigger(response, toast={"text": text, "tone": "bad"})
    messages.error(request, text)
    return HttpResponseRedirect(back)


def act(request: HttpRequest, work: Callable[[], str], *, back: str, **events: Any) -> HttpResponse:
    """Run ``work``, which returns the sentence to show; named errors become sentences too."""
    try:
        message = work()
    except (SardeenzError, ImpossiblePolicy) as exc:
        return refused(request, exc, back=back)
    return done(request, message, back=back, **events)


def dialog(
    request: HttpRequest, template: str, context: Mapping[str, Any], *, back: str, status: int = 200
) -> HttpResponse:
    """A question to the operator: a fragment for the dialog, or a page of its own without JavaScript."""
    full = {**context, "back": back, "fragment": template}
    return render(request, template if is_fragment(request) else "models_app/dialog_page.html", full, status=status)
