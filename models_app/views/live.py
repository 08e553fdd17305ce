"""For pages without a live link: the same news by polling, and the parts of the header that refresh alone."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_GET

from gpus_app.selectors import latest_all
from models_app.models import Instance, Operation
from models_app.permissions import role_of
from models_app.presentation.broker_state import broker_alive
from models_app.presentation.frames import compact


@require_GET
def snapshot(request: HttpRequest) -> JsonResponse:
    """Versions of live instances and the newest readings. A script asks, so a stranger gets 401, not a login page."""
    if role_of(request.user) is None:
        return JsonResponse({"error": "Log in first."}, status=401)
    answer: dict[str, Any] = {
        "broker": broker_alive(),
        "instances": {
            str(pk): f"{version}.{stage}.{progress}.{limit}.{status}.{health}"
            for pk, version, stage, progress, limit, status, health in Instance.objects.live().values_list(
                "pk", "state_version", "stage", "stage_progress", "limit_revision", "limit_status", "health"
            )
        },
        "operations": ",".join(
            f"{pk}:{phase}"
            for pk, phase in Operation.objects.filter(
                state__in=(Operation.State.PENDING, Operation.State.RUNNING)
            ).values_list("pk", "phase")
        ),
    }
    if "samples" in request.GET:
        answer["samples"] = [compact(record) for record in latest_all().values()]
    return JsonResponse(answer)
