"""One instance: its page and the acts on it."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from gpus_app.models import Gpu
from models_app.errors import InvalidInput, SardeenzError
from models_app.forms.limit import LimitForm
from models_app.models import Instance
from models_app.permissions import require_role
from models_app.presentation import words
from models_app.presentation.actions import allowed
from models_app.presentation.asleep import asleep_facts
from models_app.presentation.board import GpuCard, build_board, build_card, label_of, make_row
from models_app.presentation.limits import limit_answer_text, preview, trim_answer_text
from models_app.services.lifecycle.launch import instance_restart
from models_app.services.lifecycle.sleep import instance_sleep, instance_wake
from models_app.services.lifecycle.stop import instance_stop, stop_all
from models_app.services.memory.kvcache import kvcache_limit_set, kvcache_safety_floor, kvcache_trim
from models_app.services.plans.rebalancing import hand_back
from models_app.services.plans.rollout import instance_move
from models_app.services.plans.stop_then_start import instance_move_stopped
from models_app.services.proposals import proposal_take, proposals_of
from models_app.views.common import (
    act,
    actor_of,
    back_address,
    dialog,
    done,
    refused,
    role_for,
    target_is,
    under_way,
)
from models_app.views.logs import log_context

EVENTS_SHOWN = 60


def _get(instance_id: int) -> Instance:
    return get_object_or_404(
        Instance.objects.select_related("model", "model__memory_policy", "host", "attempt"), pk=instance_id
    )


def _card(instance: Instance, role: str | None) -> GpuCard | None:
    """The instance's (first) GPU with everything on it."""
    if not instance.gpu_uuids:
        return None
    gpu = Gpu.objects.select_related("host", "policy").filter(uuid=instance.gpu_uuids[0]).first()
    return build_card(gpu, role) if gpu else None


def _back(request: HttpRequest, instance: Instance) -> str:
    return back_address(request, f"/instances/{instance.pk}/")


@require_GET
@require_role("viewer")
def instance(request: HttpRequest, instance_id: int) -> HttpResponse:
    """State, stages, KV memory, starts and history; the log beside it. The head refreshes alone."""
    row = _get(instance_id)
    context = _page(row, role_for(request))
    if target_is(request, "instance-head"):
        return render(request, "models_app/_instance_head.html", context)
    return render(request, "models_app/instance.html", context | log_context(row, None))


def _page(row: Instance, role: str | None) -> dict[str, Any]:
    card = _card(row, role)
    found = next((line for line in card.rows if line.instance.pk == row.pk), None) if card else None
    return {
        "i": row,
        "row": found or make_row(row, None, {}, role),
        "card": card,
        "gpus": list(Gpu.objects.filter(uuid__in=row.gpu_uuids).select_related("host")),
        "label": label_of(row),
        "steps": words.steps(row),
        "starting": words.is_starting(row),
        "attempts": list(row.attempts.all()[:20]),
        "asleep": asleep_facts(row),
        "causes": words.causes(row),
        "proposals": proposals_of(row),
        "events": list(row.events.all()[:EVENTS_SHOWN]),
        "enforcer": words.ENFORCERS.get(row.provider, words.ENFORCERS[""]),
    }


# --- acts ------------------------------------------------------------------------------------------


@require_http_methods(["GET", "POST"])
@require_role("operator")
def limit(request: HttpRequest, instance_id: int) -> HttpResponse:
    """Ask for another KV limit: asked, in force and mapped side by side, the bar now and after."""
    row = _get(instance_id)
    card = _card(row, role_for(request))
    total = card.bar.total_bytes if card else None
    back = _back(request, row)
    errors: list[str] = []
    if request.method == "POST":
        form = LimitForm(request.POST, total_bytes=total)
        if form.is_valid():
            data = form.cleaned_data
            try:
                answer = kvcache_limit_set(
                    row,
                    size=data["size"],
                    actor=actor_of(request),
                    force=data["force"],
                    reclaim=data["reclaim"] or None,
                )
            except InvalidInput as exc:
                form.add_error("size", [sentence for group in exc.fields.values() for sentence in group])
            except SardeenzError as exc:
                errors.append(exc.message)
            else:
                text, tone = limit_answer_text(answer)
                return done(request, text, back=back, tone=tone, changed={"instances": [row.pk]})
    else:
        policy = getattr(row.model, "memory_policy", None)
        current = row.limit_bytes or row.effective_limit_bytes or row.capacity_bytes
        form = LimitForm(
            initial={
                "size": f"{current / 1024**3:.2f}".rstrip("0").rstrip(".") + "G" if current else "",
                "reclaim": request.GET.get("reclaim") or (policy.reclaim if policy else "wait"),
            },
            total_bytes=total,
        )
    context = _limit_context(row, card, form) | {"errors": errors}
    return dialog(request, "models_app/_limit.html", context, back=back, status=422 if form.is_bound or errors else 200)


def _limit_context(row: Instance, card: GpuCard | None, form: LimitForm) -> dict[str, Any]:
    floor = kvcache_safety_floor(row)
    line = next((line for line in card.rows if line.instance.pk == row.pk), None) if card else None
    top = row.capacity_bytes or (card.bar.total_bytes if card else 0)
    bottom = floor.hard_minimum_bytes or 0
    current = row.limit_bytes or row.effective_limit_bytes or top
    return {
        "i": row,
        "label": label_of(row),
        "heading": f"KV limit of {label_of(row)}",
        "row": line or make_row(row, None, {}, None),
        "form": form,
        "floor": floor,
        "enforcer": words.ENFORCERS.get(row.provider, words.ENFORCERS[""]),
        "range_min": bottom // 1024**2,
        "range_max": top // 1024**2,
        "range_now": current // 1024**2,
        "reclaims": [
            ("wait", "Wait", "Running requests finish; memory comes back as they do."),
            ("preempt", "Preempt", "The youngest running requests are set back and recomputed; none fails."),
            ("abort", "Abort", "The youngest running requests are ended with an error."),
        ],
    }


@require_POST
@require_role("operator")
def limit_preview(request: HttpRequest, instance_id: int) -> HttpResponse:
    """What the typed limit would mean; nothing is changed."""
    row = _get(instance_id)
    card = _card(row, role_for(request))
    form = LimitForm(request.POST, total_bytes=card.bar.total_bytes if card else None)
    found = None
    if form.is_valid() and form.asked_bytes:
        data = form.cleaned_data
        found = preview(row, form.asked_bytes, force=data["force"], reclaim=data["reclaim"] or "wait", card=card)
    return render(request, "models_app/_limit_preview.html", {"preview": found, "form": form})


@require_POST
@require_role("operator")
def trim(request: HttpRequest, instance_id: int) -> HttpResponse:
    row = _get(instance_id)
    back = _back(request, row)
    try:
        text, tone = trim_answer_text(kvcache_trim(row, actor=actor_of(request)))
    except SardeenzError as exc:
        return refused(request, exc, back=back)
    return done(request, text, back=back, tone=tone, changed={"instances": [row.pk]})


@require_POST
@require_role("operator")
def wake(request: HttpRequest, instance_id: int) -> HttpResponse:
    row = _get(instance_id)

    def work() -> str:
        instance_wake(row, actor=actor_of(request))
        return f"{label_of(row)} is waking."

    return act(request, work, back=_back(request, row), changed={"instances": [row.pk]})


@require_http_methods(["GET", "POST"])
@require_role("operator")
def sleep(request: HttpRequest, instance_id: int) -> HttpResponse:
    row = _get(instance_id)
    back = _back(request, row)
    if request.method == "GET":
        return dialog(
            request,
            "models_app/_sleep.html",
            {"i": row, "label": label_of(row), "heading": f"Put {label_of(row)} to sleep", **_load(row)},
            back=back,
        )
    level = request.POST.get("level", "")

    def work() -> str:
        instance_sleep(
            row,
            actor=actor_of(request),
            level=int(level) if level in ("1", "2") else None,
            force="force" in request.POST,
        )
        return f"{label_of(row)} goes to sleep when its requests are through."

    return act(request, work, back=back, changed={"instances": [row.pk]})


@require_http_methods(["GET", "POST"])
@require_role("operator")
def move(request: HttpRequest, instance_id: int) -> HttpResponse:
    """Move to other GPUs without downtime: the new one starts beside the old one, which drains when it is ready."""
    row = _get(instance_id)
    back = _back(request, row)
    error, status = "", 200
    chosen = [int(one) for one in request.POST.getlist("gpu") if one.isdecimal() and len(one) < 10]
    if request.method == "POST":
        try:
            return _move(request, row, chosen, back)
        except InvalidInput as exc:
            error, status = " ".join(sentence for group in exc.fields.values() for sentence in group), 422
        except SardeenzError as exc:
            error, status = exc.message, 422
    context = {
        "i": row,
        "label": label_of(row),
        "heading": f"Move {label_of(row)}",
        "error": error,
        "board": build_board(None),
        "size": row.model.tensor_parallel_size,
        "chosen": chosen,
        "stop_first": "stop_first" in request.POST,
    }
    return dialog(request, "models_app/_move.html", context, back=back, status=status)


def _move(request: HttpRequest, row: Instance, chosen: list[int], back: str) -> HttpResponse:
    """Side by side, which is an operation to watch; or stopped first, which the instance's own state tells."""
    gpus = list(Gpu.objects.select_related("host").filter(pk__in=chosen))
    where: dict[str, Any] = {
        "host": gpus[0].host.name if gpus else None,
        "gpu_uuids": [gpu.uuid for gpu in gpus],
    }
    if "stop_first" in request.POST:
        instance_move_stopped(row, actor=actor_of(request), **where)
        return done(request, f"{label_of(row)} stops, then starts there.", back=back, changed={"instances": [row.pk]})
    operation = instance_move(row, actor=actor_of(request), **where)
    return under_way(request, operation)


@require_POST
@require_role("operator")
def automatic(request: HttpRequest, instance_id: int) -> HttpResponse:
    """Give a limit that was set by hand back to the controller."""
    row = _get(instance_id)

    def work() -> str:
        hand_back(row, actor=actor_of(request))
        return f"The limit of {label_of(row)} follows its policy again."

    return act(request, work, back=_back(request, row), changed={"instances": [row.pk]})


@require_POST
@require_role("operator")
def propose(request: HttpRequest, instance_id: int, kind: str) -> HttpResponse:
    """Take one of the proposals after a start that lacked memory."""
    row = _get(instance_id)

    def work() -> str:
        taken = proposal_take(row, kind, actor=actor_of(request))
        return f"Saved, and {label_of(row)} is started again: {taken.title[0].lower()}{taken.title[1:]}."

    return act(request, work, back=_back(request, row), changed={"instances": [row.pk]})


@require_http_methods(["GET", "POST"])
@require_role("operator")
def stop(request: HttpRequest, instance_id: int) -> HttpResponse:
    row = _get(instance_id)
    back = _back(request, row)
    if request.method == "GET":
        verb = "Cancel the start of" if words.is_starting(row) else "Stop"
        return dialog(
            request,
            "models_app/_stop.html",
            {
                "i": row,
                "label": label_of(row),
                "heading": f"{verb} {label_of(row)}",
                "verb": "Cancel the start" if words.is_starting(row) else "Stop it",
                "starting": words.is_starting(row),
                "failed": not row.is_live,
                **_load(row),
            },
            back=back,
        )

    def work() -> str:
        instance_stop(row, actor=actor_of(request), force="force" in request.POST)
        return f"{label_of(row)} is being stopped."

    return act(request, work, back=back, changed={"instances": [row.pk]})


@require_http_methods(["GET", "POST"])
@require_role("operator")
def restart(request: HttpRequest, instance_id: int) -> HttpResponse:
    row = _get(instance_id)
    back = _back(request, row)
    if request.method == "GET" and allowed(row, "restart"):
        return dialog(
            request,
            "models_app/_restart.html",
            {"i": row, "label": label_of(row), "heading": f"Restart {label_of(row)}", **_load(row)},
            back=back,
        )

    def work() -> str:
        instance_restart(row, actor=actor_of(request), force="force" in request.POST)
        return f"{label_of(row)} is being restarted with the saved options."

    return act(request, work, back=back, changed={"instances": [row.pk]})


@require_http_methods(["GET", "POST"])
@require_role("operator")
def stop_everything(request: HttpRequest) -> HttpResponse:
    """Stop all, after a question that names what it ends."""
    back = back_address(request, "/gpus/")
    live = list(Instance.objects.live().select_related("model").order_by("pk"))
    if request.method == "GET":
        return dialog(
            request,
            "models_app/_stop_all.html",
            {"labels": [label_of(row) for row in live], "heading": "Stop all instances"},
            back=back,
        )

    def work() -> str:
        stopped = stop_all(actor=actor_of(request), force="force" in request.POST)
        return f"{len(stopped)} instances are being stopped." if stopped else "Nothing was running."

    return act(request, work, back=back, changed={"instances": [row.pk for row in live]})


def _load(row: Instance) -> dict[str, Any]:
    """Requests in flight by the last reading, for the questions that end them."""
    card = _card(row, None)
    line = next((line for line in card.rows if line.instance.pk == row.pk), None) if card else None
    return {"running": line.running if line else None, "waiting": line.waiting if line else None}
