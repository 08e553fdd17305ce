"""Adding and changing a model, with the verdict and the command line beside the form while it is filled in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from gpus_app.selectors import hosts_with_gpus
from models_app.engines.facts import ModelFacts, catalogue
from models_app.errors import InvalidInput, SardeenzError, StaleRevision
from models_app.forms.model import ModelForm, initial_of
from models_app.models import Model
from models_app.permissions import may_risk, require_role
from models_app.presentation.folders import browse
from models_app.presentation.launching import Fit, fit_of
from models_app.services.lifecycle.launch import model_launch
from models_app.services.model_check import candidate_of, judge
from models_app.services.models import CommandPreview, command_preview, model_create, model_update
from models_app.views.common import actor_of, is_fragment

SOURCES = (
    ("catalogue", "Catalogue", "Well-known models; works offline."),
    ("huggingface", "Hugging Face", "Any id of the Hub."),
    ("local", "Local folder", "Weights on this machine."),
)


@dataclass(slots=True)
class Check:
    """What is known of the model as it is typed."""

    errors: dict[str, list[str]] = field(default_factory=dict)
    facts: ModelFacts | None = None
    context: int | None = None
    per_token: int | None = None
    floor_bytes: int | None = None
    fit: Fit | None = None
    fit_error: str = ""
    command: CommandPreview | None = None


def _form(request: HttpRequest, row: Model | None) -> ModelForm:
    names = Model.objects.exclude(pk=row.pk) if row else Model.objects.all()
    shared: dict[str, Any] = {
        "hosts": hosts_with_gpus(),
        "models": list(names.values_list("served_model_name", flat=True)),
    }
    if request.method == "POST":
        return ModelForm(request.POST, **shared)
    initial = initial_of(row) if row else {}
    wanted = request.GET.get("catalogue")
    if row is None and wanted:
        initial |= {"catalogue_model": wanted, "served_model_name": wanted.rsplit("/", 1)[-1].lower()}
    return ModelForm(initial=initial, **shared)


def _check(request: HttpRequest, form: ModelForm, row: Model | None) -> Check:
    """Judge what was typed without saving it."""
    fields = form.service_fields()
    found = judge(fields, model=row, allow_risky=may_risk(request.user))
    check = Check(errors=found.errors)
    if "model" in found.errors or "model" not in found.values:
        return check
    candidate = candidate_of(found.values, row)
    if found.facts is not None:
        candidate.facts = found.facts
    known = candidate.facts or {}
    check.facts = ModelFacts.from_json(known) if known else None
    check.context = candidate.max_model_len or known.get("max_position_embeddings")
    check.per_token = known.get("kv_bytes_per_token_per_gpu")
    check.floor_bytes = known.get("safety_floor_bytes")
    try:
        check.command = command_preview(fields)
    except SardeenzError:
        check.command = None
    if known and "tensor_parallel_size" not in found.errors and "gpu_uuids" not in found.errors:
        try:
            check.fit = fit_of(candidate)
        except SardeenzError as exc:
            check.fit_error = exc.message
    return check


def _page(
    request: HttpRequest, form: ModelForm, row: Model | None, *, status: int = 200, check: Check | None = None
) -> HttpResponse:
    context: dict[str, Any] = {
        "form": form,
        "model": row,
        "check": check,
        "sources": SOURCES,
        "catalogue": catalogue(),
        "listing": browse(str(form["local_model"].value() or "")) if form.chosen_source == "local" else browse(""),
        "live": row.instances.live().count() if row else 0,
    }
    template = "models_app/_model_form.html" if is_fragment(request) else "models_app/model_form.html"
    return render(request, template, context, status=status)


@require_http_methods(["GET", "POST"])
@require_role("operator")
def model_new(request: HttpRequest) -> HttpResponse:
    form = _form(request, None)
    if request.method == "GET":
        return _page(request, form, None)
    if "check" in request.POST:
        check = _check(request, form, None)
        form.take_errors(check.errors)
        return _page(request, form, None, check=check)
    try:
        row = model_create(actor=actor_of(request), allow_risky=may_risk(request.user), **form.service_fields())
    except InvalidInput as exc:
        form.take_errors(exc.fields)
        return _page(request, form, None, status=422)
    except SardeenzError as exc:
        form.add_error(None, exc.message)
        return _page(request, form, None, status=422)
    if "launch" in request.POST:
        return _go(request, _launch_at_once(request, row))
    return _go(request, f"/models/{row.pk}/")


def _launch_at_once(request: HttpRequest, row: Model) -> str:
    """Launch what fits; anything else is asked about on the launch page."""
    try:
        made = model_launch(row, actor=actor_of(request))
    except SardeenzError:
        return f"/models/{row.pk}/launch/"
    return f"/instances/{made[0].pk}/" if len(made) == 1 else f"/models/{row.pk}/"


@require_http_methods(["GET", "POST"])
@require_role("operator")
def model_edit(request: HttpRequest, model_id: int) -> HttpResponse:
    """Change a model. Its instances run on with the options of their start until they are restarted."""
    row = get_object_or_404(Model.objects.select_related("memory_policy", "host", "fallback"), pk=model_id)
    form = _form(request, row)
    if request.method == "GET":
        return _page(request, form, row)
    if "check" in request.POST:
        check = _check(request, form, row)
        form.take_errors(check.errors)
        return _page(request, form, row, check=check)
    revision = request.POST.get("revision", "")
    try:
        model_update(
            row,
            actor=actor_of(request),
            expected_revision=int(revision) if revision.isdecimal() else None,
            allow_risky=may_risk(request.user),
            **form.service_fields(),
        )
    except InvalidInput as exc:
        form.take_errors(exc.fields)
        return _page(request, form, row, status=422)
    except (StaleRevision, SardeenzError) as exc:
        form.add_error(None, exc.message)
        return _page(request, form, row, status=422)
    return _go(request, f"/models/{row.pk}/")


def _go(request: HttpRequest, address: str) -> HttpResponse:
    if is_fragment(request):
        return HttpResponse(status=204, headers={"HX-Redirect": address})
    return HttpResponseRedirect(address)


@require_POST
@require_role("operator")
def model_check(request: HttpRequest) -> HttpResponse:
    """The box beside the form: facts, verdict, command line. Nothing is saved and nothing starts."""
    text = request.POST.get("model_id", "")
    row = Model.objects.select_related("memory_policy", "host").filter(pk=text).first() if text.isdecimal() else None
    form = _form(request, row)
    blank = row is None and not any(form.service_fields()[name] for name in ("model", "served_model_name"))
    check = None if blank else _check(request, form, row)
    return render(request, "models_app/_check.html", {"check": check, "form": form})


@require_GET
@require_role("operator")
def folders(request: HttpRequest) -> HttpResponse:
    """One folder of the roots on this machine."""
    listing = browse(request.GET.get("path", ""))
    template = "models_app/_folders.html" if is_fragment(request) else "models_app/folders.html"
    return render(request, template, {"listing": listing})
