"""Presets: keep what is deployed under a name, see what applying it would change, and do only that."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse, HttpResponseBase, HttpResponseRedirect
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from models_app.errors import InvalidInput, SardeenzError
from models_app.models import Model, Preset
from models_app.permissions import require_role
from models_app.services.plans.presets import preset_apply, preset_delete, preset_diff, preset_save
from models_app.views.common import act, actor_of, refused, under_way

#: What each act of a difference is called, and its tone.
ACTS = {
    "kept": ("stays as it is", "calm"),
    "create": ("is added and launched", "info"),
    "start": ("is launched", "info"),
    "change": ("is changed", "warn"),
    "sleep": ("goes to sleep", "warn"),
    "wake": ("wakes", "info"),
    "stop": ("is stopped", "bad"),
}


@require_http_methods(["GET", "POST"])
@require_role("viewer")
def presets(request: HttpRequest) -> HttpResponseBase:
    """The list; its POST keeps what is deployed now."""
    return _save(request) if request.method == "POST" else _list(request)


def _list(request: HttpRequest, *, error: str = "", name: str = "", status: int = 200) -> HttpResponse:
    context = {
        "presets": Preset.objects.all(),
        "deployed": Model.objects.filter(deployed=True).count(),
        "error": error,
        "name": name,
    }
    return render(request, "models_app/presets.html", context, status=status)


@require_role("operator")
def _save(request: HttpRequest) -> HttpResponse:
    name = request.POST.get("name", "").strip()
    try:
        preset = preset_save(name, actor=actor_of(request), replace="replace" in request.POST)
    except InvalidInput as exc:
        return _list(request, error=exc.fields.get("name", [exc.message])[0], name=name, status=422)
    except SardeenzError as exc:
        return _list(request, error=exc.message, name=name, status=422)
    return HttpResponseRedirect(f"/presets/{preset.pk}/")


@require_GET
@require_role("viewer")
def preset(request: HttpRequest, preset_id: int) -> HttpResponse:
    row = get_object_or_404(Preset, pk=preset_id)
    lines = []
    for line in preset_diff(row):
        word, tone = ACTS.get(line["act"], (line["act"], "info"))
        lines.append({**line, "word": word, "tone": tone})
    context = {"preset": row, "lines": lines, "nothing": all(line["act"] == "kept" for line in lines)}
    return render(request, "models_app/preset.html", context)


@require_POST
@require_role("operator")
def apply(request: HttpRequest, preset_id: int) -> HttpResponse:
    row = get_object_or_404(Preset, pk=preset_id)
    try:
        operation = preset_apply(row, actor=actor_of(request))
    except SardeenzError as exc:
        return refused(request, exc, back=f"/presets/{row.pk}/")
    return under_way(request, operation)


@require_POST
@require_role("operator")
def delete(request: HttpRequest, preset_id: int) -> HttpResponse:
    row = get_object_or_404(Preset, pk=preset_id)

    def work() -> str:
        preset_delete(row, actor=actor_of(request))
        return f"The preset {row.name} is deleted; its models stay."

    return act(request, work, back="/presets/", go=True)
