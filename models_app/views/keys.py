"""API keys: making, changing, rotating and revoking them. A secret is shown once, in the answer to its POST."""

from __future__ import annotations

from typing import Any

from django.forms import Form
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_http_methods

from models_app.errors import InvalidInput, SardeenzError
from models_app.forms.keys import KeyEditForm, KeyForm, RotateForm
from models_app.models import ApiKey
from models_app.permissions import may_capture, require_role
from models_app.services.keys import CHANGEABLE, api_key_create, api_key_revoke, api_key_rotate, api_key_update
from models_app.views.common import act, actor_of, dialog, done, refused

BACK = "/keys/"


@require_http_methods(["GET", "POST"])
@require_role("admin")
def keys(request: HttpRequest) -> HttpResponse:
    """The list of keys and the form for a new one; a new key is shown once, in the answer to its POST."""
    token = None
    status = 200
    may_grant = may_capture(request.user)
    form = KeyForm(request.POST or None, may_grant=may_grant)
    if request.method == "POST":
        status = 422
        if form.is_valid():
            data = form.cleaned_data
            try:
                _key, token = api_key_create(
                    data["name"], actor=actor_of(request), models=data["models"], **_rights(data)
                )
                status, form = 200, KeyForm(may_grant=may_grant)
            except InvalidInput as exc:
                _tell(form, exc)
            except SardeenzError as exc:
                form.add_error("name", exc.message)
    context = {
        "keys": ApiKey.objects.prefetch_related("allowed_models").order_by("revoked_at", "name"),
        "form": form,
        "token": token,
        "base": f"{request.scheme}://{request.get_host()}",
    }
    return _unkept(render(request, "models_app/keys.html", context, status=status))


def _rights(data: dict[str, Any]) -> dict[str, Any]:
    return {name: data[name] for name in CHANGEABLE if name in data}


def _tell(form: Form, exc: InvalidInput) -> None:
    for field, sentences in exc.fields.items():
        form.add_error(field if field in form.fields else None, sentences)


def _unkept(response: HttpResponse) -> HttpResponse:
    """A page that may show a secret lies in no cache."""
    response.headers["Cache-Control"] = "no-store"
    return response


@require_http_methods(["GET", "POST"])
@require_role("admin")
def key_edit(request: HttpRequest, key_id: int) -> HttpResponse:
    """What a key may do; in force from its next request on."""
    key = get_object_or_404(ApiKey.objects.prefetch_related("allowed_models"), pk=key_id)
    initial = {name: getattr(key, name) for name in CHANGEABLE} | {"models": list(key.allowed_models.all())}
    form = KeyEditForm(request.POST or None, initial=initial, may_grant=may_capture(request.user))
    if request.method == "POST" and form.is_valid():
        data = form.cleaned_data
        try:
            api_key_update(key, actor=actor_of(request), changes=_rights(data), models=data["models"])
        except InvalidInput as exc:
            _tell(form, exc)
        except SardeenzError as exc:
            return refused(request, exc, back=BACK)
        else:
            return done(request, f"{key.name} is changed.", back=BACK, go=True)
    context = {"key": key, "form": form, "heading": f"Change {key.name}"}
    status = 422 if request.method == "POST" else 200
    return dialog(request, "models_app/_key_edit.html", context, back=BACK, status=status)


@require_http_methods(["GET", "POST"])
@require_role("admin")
def key_rotate(request: HttpRequest, key_id: int) -> HttpResponse:
    """A new secret for the same key; the answer to the POST shows it once."""
    key = get_object_or_404(ApiKey, pk=key_id)
    context: dict[str, Any] = {"key": key, "heading": f"New secret for {key.name}"}
    form = RotateForm(request.POST or None)
    status = 422 if request.method == "POST" else 200
    if request.method == "POST" and form.is_valid():
        try:
            row, token = api_key_rotate(key, grace_s=form.cleaned_data["grace_s"], actor=actor_of(request))
        except SardeenzError as exc:
            return refused(request, exc, back=BACK)
        context |= {"key": row, "token": token}
        status = 200
    return _unkept(dialog(request, "models_app/_key_rotate.html", context | {"form": form}, back=BACK, status=status))


@require_http_methods(["GET", "POST"])
@require_role("admin")
def key_revoke(request: HttpRequest, key_id: int) -> HttpResponse:
    key = get_object_or_404(ApiKey, pk=key_id)
    if request.method == "GET":
        context = {"key": key, "heading": f"Revoke {key.name}"}
        return dialog(request, "models_app/_key_revoke.html", context, back=BACK)

    def work() -> str:
        api_key_revoke(key, actor=actor_of(request))
        return f"{key.name} is revoked: requests with it are refused from now on."

    return act(request, work, back=BACK, go=True)
