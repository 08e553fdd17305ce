"""Models: the list, one model's page, adding, changing and deleting, and the questions before launch and stop."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from django.core.paginator import Paginator
from django.db.models import Prefetch, Q
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from gpus_app.models import Gpu
from gpus_app.selectors import hosts_with_gpus
from models_app.errors import DoesNotFit, InvalidInput, SardeenzError
from models_app.models import Instance, Model
from models_app.permissions import require_role
from models_app.presentation import words
from models_app.presentation.board import Row, build_board, make_row
from models_app.presentation.demand import wish_sentence
from models_app.presentation.launching import Fit, fit_of
from models_app.services.lifecycle.launch import model_launch
from models_app.services.lifecycle.stop import instance_stop
from models_app.services.memory.placement import Wish
from models_app.services.models import CommandPreview, command_preview, model_delete, model_facts
from models_app.services.plans.rollout import model_roll
from models_app.services.plans.room import room_make
from models_app.states import TERMINAL, InstanceState
from models_app.views.common import act, actor_of, back_address, dialog, done, refused, role_for, target_is, under_way

PAGE = 50
EARLIER_SHOWN = 8


@dataclass(slots=True)
class ModelLine:
    """One model of the list. ``counts``: its instances by word, worst first."""

    model: Model
    counts: list[tuple[words.Word, int]] = field(default_factory=list)
    why: str = ""
    outdated: bool = False
    live: int = 0

    @property
    def context(self) -> int | None:
        return self.model.max_model_len or (self.model.facts or {}).get("max_position_embeddings")


def _line(model: Model, instances: list[Instance]) -> ModelLine:
    """Failures count before successes, so that no replica that is down hides behind one that is up."""
    found = Counter(words.state_word(instance) for instance in instances)
    worst = next((row for row in instances if row.state == InstanceState.FAILED), None)
    return ModelLine(
        model,
        counts=[(word, found[word]) for word in words.ORDER if found[word]],
        why=words.why(worst) if worst else "",
        outdated=any(0 < row.spec_revision < model.spec_revision for row in instances if row.is_live),
        live=sum(row.is_live for row in instances),
    )


@require_GET
@require_role("viewer")
def models(request: HttpRequest) -> HttpResponse:
    """The list, searched and paged on the server; a fixed number of queries."""
    wanted = request.GET.get("q", "").strip()
    now = Instance.objects.exclude(state=InstanceState.STOPPED).select_related("model")
    rows = Model.objects.select_related("memory_policy", "host").prefetch_related(
        "aliases", Prefetch("instances", queryset=now, to_attr="present")
    )
    if wanted:
        rows = rows.filter(
            Q(served_model_name__icontains=wanted) | Q(model__icontains=wanted) | Q(aliases__name__icontains=wanted)
        ).distinct()
    page = Paginator(rows, PAGE).get_page(request.GET.get("page"))
    lines = [_line(model, _shown(list(getattr(model, "present", ())))) for model in page]
    context = {"page": page, "lines": lines, "q": wanted}
    template = "models_app/_models.html" if target_is(request, "models") else "models_app/models.html"
    return render(request, template, context)


def _shown(instances: list[Instance]) -> list[Instance]:
    """Live rows, and a failed one only while no newer row of its replica took over."""
    newest: dict[int, Instance] = {}
    for row in sorted(instances, key=lambda row: row.pk):
        newest[row.replica_index] = row
    return [row for row in instances if row.is_live or newest[row.replica_index] is row]


@require_GET
@require_role("viewer")
def model(request: HttpRequest, model_id: int) -> HttpResponse:
    row = get_object_or_404(Model.objects.select_related("memory_policy", "host", "fallback"), pk=model_id)
    everything = list(
        row.instances.select_related("model", "model__memory_policy", "host", "attempt").order_by("-pk")[:100]
    )
    present = sorted(_shown([one for one in everything if one.state != InstanceState.STOPPED]), key=lambda one: one.pk)
    board = build_board(role_for(request))
    by_pk: dict[int, Row] = {}
    for line in board.rows:
        by_pk.setdefault(line.instance.pk, line)
    context: dict[str, Any] = {
        "model": row,
        "line": _line(row, present),
        "rows": [by_pk.get(one.pk) or make_row(one, None, {}, role_for(request)) for one in present],
        "earlier": [one for one in everything if one.state in TERMINAL and one not in present][:EARLIER_SHOWN],
        "aliases": row.aliases.all(),
        "wish": wish_sentence(row),
        "shares": row.route_targets.select_related("route"),
        "policy": getattr(row, "memory_policy", None),
        "facts": model_facts(row),
        "preview": _preview(row),
        "ready": any(one.is_routable for one in present),
        "history": "[]",
        "chosen": row.served_model_name,
        "inline_chat": True,
    }
    template = "models_app/_model.html" if target_is(request, "model") else "models_app/model.html"
    return render(request, template, context)


def _preview(row: Model) -> CommandPreview | None:
    try:
        return command_preview(row)
    except SardeenzError:
        return None


@require_http_methods(["GET", "POST"])
@require_role("operator")
def launch(request: HttpRequest, model_id: int) -> HttpResponse:
    """Before a launch: does it fit, where, after making how much room; then the launch, or the operation."""
    row = get_object_or_404(Model.objects.select_related("memory_policy", "host"), pk=model_id)
    back = back_address(request, f"/models/{row.pk}/")
    wish = _wish(request)
    if request.method == "POST":
        return _launch(request, row, wish, back)
    return _launch_dialog(request, row, wish, back)


def _wish(request: HttpRequest) -> dict[str, Any]:
    """Where this launch should go: ``place`` is a GPU's id, or empty for the model's own choice."""
    data = request.POST if request.method == "POST" else request.GET
    place = data.get("place", "")
    gpu = Gpu.objects.select_related("host").filter(pk=place).first() if place.isdecimal() else None
    replicas = data.get("replicas", "")
    return {
        "gpu": gpu,
        "host": gpu.host.name if gpu else None,
        "gpu_uuids": [gpu.uuid] if gpu else None,
        "replicas": int(replicas) if replicas.isdecimal() and len(replicas) < 4 else None,
    }


def _launch_dialog(
    request: HttpRequest, row: Model, wish: dict[str, Any], back: str, error: str = "", status: int = 200
) -> HttpResponse:
    fit: Fit | None = None
    try:
        fit = fit_of(row, wish=Wish.of(row, {"host": wish["host"], "gpu_uuids": wish["gpu_uuids"]}))
    except SardeenzError as exc:
        error = error or exc.message
    live = row.instances.live().filter(replaces=None).count()
    context = {
        "model": row,
        "heading": f"Launch {row.served_model_name}",
        "fit": fit,
        "error": error,
        "live": live,
        "missing": max(0, row.replicas - live),
        "wish": wish,
        "hosts": hosts_with_gpus() if row.tensor_parallel_size == 1 else [],
        "preview": _preview(row),
    }
    template = "models_app/_fit.html" if target_is(request, "launch-fit") else "models_app/_launch.html"
    return dialog(request, template, context, back=back, status=status)


def _launch(request: HttpRequest, row: Model, wish: dict[str, Any], back: str) -> HttpResponse:
    here = f"/models/{row.pk}/"
    try:
        if "make_room" in request.POST:
            operation = room_make(row, actor=actor_of(request), host=wish["host"], gpu_uuids=wish["gpu_uuids"])
            return under_way(request, operation)
        made = model_launch(
            row,
            actor=actor_of(request),
            replicas=wish["replicas"],
            host=wish["host"],
            gpu_uuids=wish["gpu_uuids"],
            anyway="anyway" in request.POST and role_for(request) == "admin",
        )
    except DoesNotFit as exc:
        return _launch_dialog(request, row, wish, back, error=exc.message, status=422)
    except InvalidInput as exc:
        text = " ".join(sentence for group in exc.fields.values() for sentence in group)
        return _launch_dialog(request, row, wish, back, error=text, status=422)
    except SardeenzError as exc:
        return refused(request, exc, back=here)
    goal = f"/instances/{made[0].pk}/" if len(made) == 1 else here
    text = f"{row.served_model_name} is being launched."
    return done(request, text, back=goal, go=True, changed={"names": ["board", "models"]})


@require_http_methods(["GET", "POST"])
@require_role("operator")
def stop(request: HttpRequest, model_id: int) -> HttpResponse:
    """Stop every replica of a model."""
    row = get_object_or_404(Model, pk=model_id)
    back = back_address(request, f"/models/{row.pk}/")
    live = list(row.instances.live().select_related("model"))
    if request.method == "GET":
        context = {"model": row, "heading": f"Stop {row.served_model_name}", "live": len(live)}
        return dialog(request, "models_app/_model_stop.html", context, back=back)

    def work() -> str:
        for one in live:
            instance_stop(one, actor=actor_of(request), force="force" in request.POST)
        return f"{row.served_model_name} is being stopped." if live else f"{row.served_model_name} does not run."

    return act(request, work, back=back, changed={"instances": [one.pk for one in live], "names": ["models"]})


@require_POST
@require_role("operator")
def roll(request: HttpRequest, model_id: int) -> HttpResponse:
    """Bring running instances to the saved options, one after another, without downtime."""
    row = get_object_or_404(Model, pk=model_id)
    try:
        operation = model_roll(row, actor=actor_of(request))
    except SardeenzError as exc:
        return refused(request, exc, back=f"/models/{row.pk}/")
    return under_way(request, operation)


@require_http_methods(["GET", "POST"])
@require_role("operator")
def delete(request: HttpRequest, model_id: int) -> HttpResponse:
    """Delete a model; its name has to be typed, because its history goes too."""
    row = get_object_or_404(Model, pk=model_id)
    here = f"/models/{row.pk}/"
    context = {
        "model": row,
        "heading": f"Delete {row.served_model_name}",
        "live": row.instances.live().count(),
        "past": row.instances.count(),
    }
    if request.method == "GET":
        return dialog(request, "models_app/_model_delete.html", context, back=here)
    if request.POST.get("name", "").strip() != row.served_model_name:
        context["error"] = "Type the served model name to confirm."
        return dialog(request, "models_app/_model_delete.html", context, back=here, status=422)
    try:
        model_delete(row, actor=actor_of(request))
    except SardeenzError as exc:
        return refused(request, exc, back=here)
    return done(request, f"{row.served_model_name} is deleted.", back="/models/", go=True)
