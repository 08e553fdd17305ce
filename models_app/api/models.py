"""/models: what is served, and launching it."""

from __future__ import annotations

from typing import Annotated, Any

from django.db.models import Prefetch
from django.http import HttpRequest, JsonResponse
from ninja import Path, Query, Router, Status

from gpus_app.api import ERRORS
from models_app.api.auth import caller_of, operator
from models_app.api.idempotency import once
from models_app.api.schemas import CommandOut, InstanceOut, LaunchIn, LaunchOut, ModelIn, ModelOut, ModelPatch
from models_app.errors import NotFound
from models_app.models import Instance, Model
from models_app.services.lifecycle.launch import model_launch
from models_app.services.models import command_preview, model_create, model_delete, model_update

router = Router()
ServedName = Annotated[str, Path(max_length=128, description="The served model name, or one of its aliases.")]


def _rows() -> Any:
    return Model.objects.select_related("host", "fallback", "memory_policy").prefetch_related(
        "aliases", Prefetch("instances", Instance.objects.live().order_by("pk"))
    )


def model_named(name: str) -> Model:
    """The model with this served name or alias. Raises NotFound."""
    rows = _rows() if "\x00" not in name else Model.objects.none()
    model: Model | None = rows.filter(served_model_name=name).first() or rows.filter(aliases__name=name).first()
    if model is None:
        raise NotFound(f"There is no model named {name!r}.")
    return model


def _fields(payload: Any) -> dict[str, Any]:
    """Only what the caller sent: a field left out keeps its value, a null empties it."""
    fields: dict[str, Any] = payload.dict(exclude_unset=True)
    fields.pop("expected_revision", None)
    return fields | (fields.pop("memory_policy", None) or {})


@router.get("", response={200: list[ModelOut], **ERRORS})
def list_models(
    request: HttpRequest,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, le=10**9)] = 0,
) -> Any:
    return _rows()[offset : offset + limit]


@router.post("", auth=operator, response={201: ModelOut, **ERRORS})
def create_model(request: HttpRequest, payload: ModelIn) -> Any:
    caller = caller_of(request)
    model = model_create(actor=caller.actor, **_fields(payload))
    return Status(201, model_named(model.served_model_name))


# Served names may hold slashes, so the paths with an ending come first.
@router.post("/{path:served_model_name}/launch", auth=operator, response={202: LaunchOut, **ERRORS})
def launch_model(request: HttpRequest, served_model_name: ServedName, payload: LaunchIn) -> Any:
    """Make the missing replicas. Launching what runs already changes nothing and answers what is there."""
    caller = caller_of(request)
    model = model_named(served_model_name)

    def act() -> tuple[int, dict[str, Any]]:
        started = model_launch(model, actor=caller.actor, **payload.dict())
        found = Instance.objects.select_related("model", "host", "attempt").filter(pk__in=[i.pk for i in started])
        rows = found.order_by("pk")
        all_of_them = [InstanceOut.from_orm(row).model_dump(mode="json") for row in rows]
        return 202, all_of_them[0] | {"instances": all_of_them}

    status, body = once(request, act)
    return JsonResponse(body, status=status)


@router.get("/{path:served_model_name}/command", response={200: CommandOut, **ERRORS})
def preview_command(request: HttpRequest, served_model_name: ServedName) -> Any:
    """The exact command line that a launch would run, secrets masked."""
    preview = command_preview(model_named(served_model_name))
    return {"argv": preview.argv, "text": preview.text}


@router.get("/{path:served_model_name}", response={200: ModelOut, **ERRORS})
def get_model(request: HttpRequest, served_model_name: ServedName) -> Any:
    return model_named(served_model_name)


@router.patch("/{path:served_model_name}", auth=operator, response={200: ModelOut, **ERRORS})
def change_model(request: HttpRequest, served_model_name: ServedName, payload: ModelPatch) -> Any:
    """Change options. Running instances keep their revision until they are restarted or rolled."""
    caller = caller_of(request)
    model = model_named(served_model_name)
    changed = model_update(model, actor=caller.actor, expected_revision=payload.expected_revision, **_fields(payload))
    return model_named(changed.served_model_name)


@router.delete("/{path:served_model_name}", auth=operator, response={204: None, **ERRORS})
def delete_model(request: HttpRequest, served_model_name: ServedName) -> Any:
    """Refused with 409 while an instance of it lives."""
    model_delete(model_named(served_model_name), actor=caller_of(request).actor)
    return Status(204, None)
