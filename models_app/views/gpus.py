"""Hosts and GPUs with what runs on them: the board, one GPU, its history, the rows that refresh alone."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_GET

from gpus_app.models import Gpu
from models_app.models import Instance
from models_app.permissions import require_role
from models_app.presentation.board import build_board, build_card, make_row
from models_app.presentation.chart import WINDOWS, chart_of, table_of, window_of
from models_app.views.common import role_for, target_is, trigger


@require_GET
@require_role("viewer")
def gpus(request: HttpRequest) -> HttpResponse:
    board = build_board(role_for(request))
    context = {
        "board": board,
        "windows": WINDOWS,
        "any_live": any(row.instance.is_live for row in board.rows),
    }
    template = "models_app/_gpus_body.html" if target_is(request, "gpus-body") else "models_app/gpus.html"
    return render(request, template, context)


@require_GET
@require_role("viewer")
def gpu(request: HttpRequest, gpu_id: int) -> HttpResponse:
    """One GPU: its bar, table, large chart, the chart's figures as a table, the processes that are not ours."""
    row = get_object_or_404(Gpu.objects.select_related("host", "policy"), pk=gpu_id)
    window = window_of(request.GET.get("window"))
    names, lines = table_of(row, window)
    context = {
        "card": build_card(row, role_for(request)),
        "gpu": row,
        "window": window,
        "windows": WINDOWS,
        "names": names,
        "lines": lines,
    }
    template = "models_app/_gpu_body.html" if target_is(request, "gpu-body") else "models_app/gpu.html"
    return render(request, template, context)


@require_GET
@require_role("viewer")
def gpu_chart(request: HttpRequest, gpu_id: int) -> JsonResponse:
    row = get_object_or_404(Gpu, pk=gpu_id)
    return JsonResponse(chart_of(row, window_of(request.GET.get("window"))))


@require_GET
@require_role("viewer")
def instance_row(request: HttpRequest, instance_id: int) -> HttpResponse:
    """One line of a table, fetched again when its instance changes. Gone, or ended: an empty answer removes it."""
    instance = get_object_or_404(
        Instance.objects.select_related("model", "model__memory_policy", "host"), pk=instance_id
    )
    wanted = request.GET.get("gpu", "")
    on = Gpu.objects.select_related("host", "policy").filter(pk=wanted).first() if wanted.isdecimal() else None
    if on is not None:
        rows = build_card(on, role_for(request)).rows
        found = next((row for row in rows if row.instance.pk == instance.pk), None)
    else:
        found = make_row(instance, None, {}, role_for(request))
        if request.GET.get("table") != "model" and (instance.gpu_uuids or not instance.is_live):
            found = None
    if found is None:  # it has moved to another table, or left: the board knows where
        return trigger(HttpResponse(""), changed={"names": ["board"]})
    template = "models_app/_instance_line.html" if request.GET.get("table") == "model" else "models_app/_row.html"
    return render(request, template, {"row": found})
