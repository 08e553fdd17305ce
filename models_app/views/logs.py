"""The log of an instance: its end on the page, any start's as a file."""

from __future__ import annotations

import zlib
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_GET

from models_app.models import Instance, LaunchAttempt
from models_app.permissions import require_role
from models_app.presentation.board import label_of
from models_app.presentation.log_lines import log_lines
from models_app.selectors import instance_log
from models_app.services.logs import attempt_log as attempt_log_text
from models_app.services.logs import log_name
from models_app.views.common import is_fragment

LOG_LINES = 400


def log_context(row: Instance, attempt: LaunchAttempt | None) -> dict[str, Any]:
    lines = instance_log(row, LOG_LINES, attempt)
    digest = zlib.crc32("\n".join(lines).encode())
    return {"i": row, "lines": log_lines(lines), "digest": digest, "shown_attempt": attempt}


@require_GET
@require_role("viewer")
def instance_log_tail(request: HttpRequest, instance_id: int) -> HttpResponse:
    """The end of the log, or all of it as a file (``download``).

    ``have``: the digest of what the page shows already; the same again is answered with 204.
    """
    row = get_object_or_404(Instance.objects.select_related("model", "host", "attempt"), pk=instance_id)
    wanted = request.GET.get("attempt", "")
    attempt = row.attempts.filter(number=wanted).first() if wanted.isdecimal() else None
    if "download" in request.GET:
        return _log_file(row, attempt or row.attempt or row.attempts.first())
    context = log_context(row, attempt)
    if request.GET.get("have") == str(context["digest"]):
        return HttpResponse(status=204)
    if is_fragment(request):
        return render(request, "models_app/_log.html", context)
    return render(request, "models_app/log.html", context | {"label": label_of(row)})


@require_GET
@require_role("viewer")
def attempt_log(request: HttpRequest, attempt_id: int) -> HttpResponse:
    """A start's log as a file."""
    attempt = get_object_or_404(LaunchAttempt.objects.select_related("instance__model", "host"), pk=attempt_id)
    return _log_file(attempt.instance, attempt)


def _log_file(row: Instance, attempt: LaunchAttempt | None) -> HttpResponse:
    """Bounded (LOG_DOWNLOAD_BYTES), secrets masked, from whichever host it lies on."""
    return HttpResponse(
        attempt_log_text(attempt) if attempt else "",
        content_type="text/plain; charset=utf-8",
        headers={"Content-Disposition": f'attachment; filename="{log_name(row, attempt)}"'},
    )
