"""Rules of memory per GPU and per model, the controller's plans, and the acts on hosts and GPUs."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from gpus_app.models import Gpu, Host
from gpus_app.selectors import hosts_with_gpus
from gpus_app.services import gpu_cordon, gpu_hold, gpu_hold_end, gpu_uncordon, host_cordon, host_maintenance_set
from gpus_app.services import host_uncordon as open_host
from models_app.errors import InvalidInput, SardeenzError
from models_app.forms.policy import HOLDS, GpuPolicyForm, MemoryPolicyForm
from models_app.models import Instance, Model
from models_app.permissions import may_risk, require_role
from models_app.presentation import limits_table
from models_app.services.lifecycle.reaping import leftover_reap
from models_app.services.memory.cards import policy_of
from models_app.services.memory.memory_rules import gpu_policy_change
from models_app.services.models import model_update
from models_app.services.plans.host_drain import host_drain
from models_app.services.plans.room import tidy
from models_app.views.common import act, actor_of, back_address, dialog, done, refused, target_is, under_way

BOARD = {"names": ["board", "models"]}


@require_GET
@require_role("viewer")
def policies(request: HttpRequest) -> HttpResponse:
    """Every rule on one page: what the controller may do on each GPU, what each model is owed."""
    now = timezone.now()
    lines = []
    for host in hosts_with_gpus():
        for gpu in host.gpus.all():
            policy = policy_of(gpu)
            held = bool(policy.held_until and policy.held_until > now)
            lines.append({"gpu": gpu, "host": host, "policy": policy, "held": held, "plan": policy.plan or {}})
    context = {
        "lines": lines,
        "any_held": any(line["held"] for line in lines),
        "models": Model.objects.select_related("memory_policy"),
    }
    template = "models_app/_policies.html" if target_is(request, "policies") else "models_app/policies.html"
    return render(request, template, context)


@require_http_methods(["GET", "POST"])
@require_role("operator")
def gpu_policy(request: HttpRequest, gpu_id: int) -> HttpResponse:
    gpu = get_object_or_404(Gpu.objects.select_related("host", "policy"), pk=gpu_id)
    back = back_address(request, "/policies/")
    policy = policy_of(gpu)
    form = GpuPolicyForm(request.POST) if request.method == "POST" else GpuPolicyForm.of(policy)
    if request.method == "POST" and form.is_valid():
        try:
            gpu_policy_change(gpu, actor=actor_of(request), **form.cleaned_data)
        except InvalidInput as exc:
            for field, sentences in exc.fields.items():
                form.add_error(field if field in form.fields else None, sentences)
        except SardeenzError as exc:
            return refused(request, exc, back=back)
        else:
            return done(request, f"The policy of {gpu} is saved.", back=back, changed=BOARD)
    context = {
        "gpu": gpu,
        "form": form,
        "policy": policy,
        "holds": HOLDS,
        "heading": f"Policy of GPU {gpu.index} on {gpu.host.name}",
    }
    return dialog(
        request, "models_app/_gpu_policy.html", context, back=back, status=422 if request.method == "POST" else 200
    )


@require_http_methods(["GET", "POST"])
@require_role("operator")
def model_policy(request: HttpRequest, model_id: int) -> HttpResponse:
    row = get_object_or_404(Model.objects.select_related("memory_policy", "host"), pk=model_id)
    back = back_address(request, "/policies/")
    policy = getattr(row, "memory_policy", None)
    form = MemoryPolicyForm(request.POST) if request.method == "POST" else MemoryPolicyForm.of(policy)
    if request.method == "POST":
        try:
            model_update(row, actor=actor_of(request), allow_risky=may_risk(request.user), **form.service_fields())
        except InvalidInput as exc:
            for field, sentences in exc.fields.items():
                form.add_error(field if field in form.fields else None, sentences)
        except SardeenzError as exc:
            return refused(request, exc, back=back)
        else:
            return done(request, f"The policy of {row} is saved.", back=back, changed=BOARD)
    context = {"model": row, "form": form, "heading": f"Memory policy of {row}"}
    status = 422 if request.method == "POST" else 200
    return dialog(request, "models_app/_model_policy.html", context, back=back, status=status)


@require_POST
@require_role("operator")
def hold(request: HttpRequest) -> HttpResponse:
    """Hold the controller, or let it go on, for one GPU or (``gpu`` empty) for all."""
    wanted = request.POST.get("gpu", "")
    gpus = Gpu.objects.select_related("host")
    rows = list(gpus.filter(pk=wanted)) if wanted.isdecimal() else list(gpus)
    text = request.POST.get("seconds", "")
    seconds = int(text) if text.isdecimal() and len(text) <= 7 else 0

    def work() -> str:
        where = str(rows[0]) if len(rows) == 1 else f"{len(rows)} GPUs"
        if seconds:
            gpu_hold(rows, actor=actor_of(request), seconds=float(seconds))
            return f"The controller changes nothing on {where} until it is let go, or time is up."
        gpu_hold_end(rows, actor=actor_of(request))
        return f"The controller works on {where} again."

    return act(request, work, back=back_address(request, "/policies/"), changed=BOARD)


@require_POST
@require_role("operator")
def gpu_tidy(request: HttpRequest, gpu_id: int) -> HttpResponse:
    """Trim every instance of a GPU, or shrink its idle ones: an operation with measured steps."""
    gpu = get_object_or_404(Gpu.objects.select_related("host"), pk=gpu_id)
    how = "shrink" if request.POST.get("how") == "shrink" else "trim"
    back = back_address(request, f"/gpus/{gpu.pk}/")
    try:
        operation = tidy(gpu.uuid, how=how, actor=actor_of(request))
    except SardeenzError as exc:
        return refused(request, exc, back=back)
    return under_way(request, operation)


@require_POST
@require_role("operator")
def gpu_close(request: HttpRequest, gpu_id: int) -> HttpResponse:
    gpu = get_object_or_404(Gpu.objects.select_related("host"), pk=gpu_id)

    def work() -> str:
        gpu_cordon(gpu, actor=actor_of(request))
        return f"{gpu} takes no new instances; what runs stays."

    return act(request, work, back=back_address(request, f"/gpus/{gpu.pk}/"), changed=BOARD)


@require_POST
@require_role("operator")
def gpu_open(request: HttpRequest, gpu_id: int) -> HttpResponse:
    gpu = get_object_or_404(Gpu.objects.select_related("host"), pk=gpu_id)

    def work() -> str:
        gpu_uncordon(gpu, actor=actor_of(request))
        return f"{gpu} takes new instances again."

    return act(request, work, back=back_address(request, f"/gpus/{gpu.pk}/"), changed=BOARD)


@require_GET
@require_role("viewer")
def limits(request: HttpRequest) -> HttpResponse:
    """Every limit that acts end by, as it is set."""
    return render(request, "models_app/limits.html", {"limits": limits_table.limits()})


@require_http_methods(["GET", "POST"])
@require_role("operator")
def host_close(request: HttpRequest, host_id: int) -> HttpResponse:
    """Cordon a host, drain it, or put it into maintenance, with a note for the others."""
    host = get_object_or_404(Host, pk=host_id)
    back = back_address(request, "/gpus/")
    if request.method == "GET":
        live = Instance.objects.live().filter(host=host).count()
        context = {"host": host, "heading": f"Close {host.name}", "live": live}
        return dialog(request, "models_app/_host_cordon.html", context, back=back)
    note = request.POST.get("note", "").strip()[:255]

    if request.POST.get("how") == "drain":
        return _drain(request, host, note, back)

    def work() -> str:
        if request.POST.get("how") == "maintenance":
            host_maintenance_set(host, on=True, actor=actor_of(request), note=note)
            return f"{host.name} is in maintenance: nothing is placed or restarted there."
        host_cordon(host, actor=actor_of(request), note=note)
        return f"{host.name} takes no new instances; what runs stays."

    return act(request, work, back=back, changed=BOARD)


def _drain(request: HttpRequest, host: Host, note: str, back: str) -> HttpResponse:
    try:
        operation = host_drain(host, actor=actor_of(request), note=note, stop="stop" in request.POST)
    except SardeenzError as exc:
        return refused(request, exc, back=back)
    return under_way(request, operation)


@require_POST
@require_role("operator")
def leftover_end(request: HttpRequest, host_id: int, attempt_id: int) -> HttpResponse:
    """End processes that no instance claims, on whichever host they live: judged there, at that moment."""
    host = get_object_or_404(Host, pk=host_id)

    def work() -> str:
        outcome = leftover_reap(host.name, attempt_id, actor=actor_of(request))
        if outcome == "ended":
            return f"What was left of start {attempt_id} has ended."
        return f"Host {host.name} is asked to end what is left of start {attempt_id}; see its row, or the audit trail."

    return act(request, work, back=back_address(request, "/gpus/"), changed=BOARD)


@require_POST
@require_role("operator")
def host_open(request: HttpRequest, host_id: int) -> HttpResponse:
    host = get_object_or_404(Host, pk=host_id)

    def work() -> str:
        open_host(host, actor=actor_of(request))
        return f"{host.name} takes new instances again."

    return act(request, work, back=back_address(request, "/gpus/"), changed=BOARD)
