"""Capture of a key's requests: switching it on for a time, reading what was captured, switching it off."""

from __future__ import annotations

from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_GET, require_POST

from models_app.errors import BrokerAway, InvalidInput
from models_app.forms.keys import CaptureForm
from models_app.models import ApiKey
from models_app.permissions import require_capture
from models_app.services.capture import capture_start, capture_stop, captures_read, longest_s
from models_app.views.common import act, actor_of, refused

PAGE = 20


@require_GET
@require_capture
def key_capture(request: HttpRequest, key_id: int) -> HttpResponse:
    """Whether it is on, until when, and what was captured. To look at captured requests is on record."""
    key = get_object_or_404(ApiKey, pk=key_id)
    problem = ""
    try:
        captured = captures_read(key, actor=actor_of(request))
    except BrokerAway as exc:
        captured, problem = [], exc.message
    context = {
        "key": key,
        "page": Paginator(captured, PAGE).get_page(request.GET.get("page")),
        "problem": problem,
        "longest_min": int(longest_s() // 60),
    }
    response = render(request, "models_app/capture.html", context)
    response.headers["Cache-Control"] = "no-store"
    return response


@require_POST
@require_capture
def key_capture_on(request: HttpRequest, key_id: int) -> HttpResponse:
    key = get_object_or_404(ApiKey, pk=key_id)
    form = CaptureForm(request.POST)
    back = f"/keys/{key.pk}/capture/"
    if not form.is_valid():
        wrong = InvalidInput(
            {"minutes": [str(text) for text in form.errors["minutes"]]}, "Give the time as a whole number of minutes."
        )
        return refused(request, wrong, back=back)

    def work() -> str:
        row = capture_start(key, actor=actor_of(request), seconds=form.cleaned_data["minutes"] * 60.0)
        return f"Requests of {row.name} are captured until {row.capture_until:%Y-%m-%d %H:%M:%S} UTC."

    return act(request, work, back=back)


@require_POST
@require_capture
def key_capture_off(request: HttpRequest, key_id: int) -> HttpResponse:
    key = get_object_or_404(ApiKey, pk=key_id)

    def work() -> str:
        capture_stop(key, actor=actor_of(request))
        return f"Capture of {key.name} is off; what was captured is deleted."

    return act(request, work, back=f"/keys/{key.pk}/capture/")
