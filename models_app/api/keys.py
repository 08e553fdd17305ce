"""/keys: making, changing, rotating and revoking API keys, and capturing what is asked with them."""

from __future__ import annotations

from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from ninja import Path, Router, Status

from gpus_app.api import ERRORS
from models_app.api.auth import caller_of
from models_app.api.schemas_access import CapturedOut, CaptureIn, KeyIn, KeyOut, KeyPatch, NewKeyOut, RotateIn
from models_app.errors import Forbidden, InvalidInput, NotFound
from models_app.models import ApiKey, Model
from models_app.services.capture import capture_start, capture_stop, captures_read
from models_app.services.keys import api_key_create, api_key_revoke, api_key_rotate, api_key_update

router = Router()
KeyName = Annotated[str, Path(max_length=64)]


def _models(names: list[str]) -> list[Model]:
    """The models that a key is for. Raises InvalidInput that names those which are not there."""
    found = list(Model.objects.filter(served_model_name__in=names))
    missing = sorted(set(names) - {model.served_model_name for model in found})
    if missing:
        raise InvalidInput({"models": f"There is no model named {', '.join(map(repr, missing))}."})
    return found


def _key_named(name: str) -> ApiKey:
    row = ApiKey.objects.prefetch_related("allowed_models").filter(name=name).first() if "\x00" not in name else None
    if row is None:
        raise NotFound(f"There is no key named {name!r}.")
    return row


def _check_grant(request: HttpRequest, wanted: object) -> None:
    """Nobody gives away what he does not have."""
    if wanted and not caller_of(request).may_capture:
        raise Forbidden("Only who may capture the requests of keys can let a key do so.")


def _check_capture(request: HttpRequest) -> None:
    if not caller_of(request).may_capture:
        raise Forbidden("This needs the permission to capture the requests of a key; the role admin is not enough.")


def _with_secret(row: ApiKey, secret: str, status: int) -> HttpResponse:
    response = JsonResponse(KeyOut.from_orm(row).model_dump(mode="json") | {"key": secret}, status=status)
    response.headers["Cache-Control"] = "no-store"
    return response


@router.get("/keys", response={200: list[KeyOut], **ERRORS})
def list_keys(request: HttpRequest) -> Any:
    return ApiKey.objects.prefetch_related("allowed_models")


@router.post("/keys", response={201: NewKeyOut, **ERRORS})
def create_key(request: HttpRequest, payload: KeyIn) -> Any:
    """The key is in this answer and nowhere else."""
    _check_grant(request, payload.may_capture)
    fields = payload.dict() | {"models": _models(payload.models)}
    row, secret = api_key_create(actor=caller_of(request).actor, **fields)
    return _with_secret(row, secret, 201)


@router.patch("/keys/{name}", response={200: KeyOut, **ERRORS})
def update_key(request: HttpRequest, name: KeyName, payload: KeyPatch) -> Any:
    """What is sent is changed, from the key's next request on."""
    changes = payload.dict(exclude_unset=True)
    _check_grant(request, changes.get("may_capture"))
    row = _key_named(name)
    models = _models(changes.pop("models")) if "models" in changes else None
    api_key_update(row, actor=caller_of(request).actor, changes=changes, models=models)
    return _key_named(name)


@router.post("/keys/{name}/rotate", response={200: NewKeyOut, **ERRORS})
def rotate_key(request: HttpRequest, name: KeyName, payload: RotateIn) -> Any:
    """A new secret for the same key, in this answer and nowhere else; the old one goes on for ``grace_s``."""
    row, secret = api_key_rotate(_key_named(name), grace_s=payload.grace_s, actor=caller_of(request).actor)
    return _with_secret(row, secret, 200)


@router.delete("/keys/{name}", response={204: None, **ERRORS})
def revoke_key(request: HttpRequest, name: KeyName) -> Any:
    api_key_revoke(_key_named(name), actor=caller_of(request).actor)
    return Status(204, None)


@router.put("/keys/{name}/capture", response={200: KeyOut, **ERRORS})
def start_capture(request: HttpRequest, name: KeyName, payload: CaptureIn) -> Any:
    """Record the newest requests of this key and their answers, for a time; again moves the end."""
    _check_capture(request)
    capture_start(_key_named(name), actor=caller_of(request).actor, seconds=payload.seconds)
    return _key_named(name)


@router.delete("/keys/{name}/capture", response={204: None, **ERRORS})
def stop_capture(request: HttpRequest, name: KeyName) -> Any:
    """What was captured is deleted."""
    _check_capture(request)
    capture_stop(_key_named(name), actor=caller_of(request).actor)
    return Status(204, None)


@router.get("/keys/{name}/capture", response={200: list[CapturedOut], **ERRORS})
def read_capture(request: HttpRequest, name: KeyName) -> Any:
    """Newest first; empty when capture is off. Reading is on record."""
    _check_capture(request)
    return captures_read(_key_named(name), actor=caller_of(request).actor)
