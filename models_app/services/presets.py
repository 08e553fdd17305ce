"""Presets: named sets of models with all their options. Applying one shows the difference first and does only that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import IntegrityError, transaction

from models_app.errors import Conflict, InvalidInput, SardeenzError
from models_app.models import Instance, MemoryPolicy, Model, Operation, Preset
from models_app.services.audit import audit
from models_app.services.launch import model_launch
from models_app.services.models import model_create, model_update
from models_app.services.operations import Progress, handles, operation_create
from models_app.services.rollout import model_roll
from models_app.services.sleep import instance_sleep
from models_app.services.stop import instance_stop
from models_app.states import DesiredState, InstanceState

PRESET = "preset"

#: Fields of a model that a preset keeps, besides its name, aliases and memory policy.
FIELDS = (
    "source", "model", "hf_revision", "max_model_len", "dtype", "quantization", "tensor_parallel_size",
    "enforce_eager", "enable_sleep_mode", "enable_prefix_caching", "kvcached", "kv_layout", "extra_args",
    "load_format", "replicas", "gpu_uuids", "initial_limit_bytes", "restart_policy", "on_demand", "pinned",
    "idle_sleep_after_s", "sleep_level", "request_defaults", "max_concurrency",
)  # fmt: skip
RULES = ("guarantee_bytes", "maximum_bytes", "priority", "idle_shrink_after_s", "reclaim")


def entry_of(model: Model) -> dict[str, Any]:
    """Everything that makes the model, as it is saved now, and whether it sleeps."""
    rules = getattr(model, "memory_policy", None) or MemoryPolicy(model=model)
    live = [row for row in model.instances.all() if row.is_live]
    return {
        "served_model_name": model.served_model_name,
        "aliases": sorted(alias.name for alias in model.aliases.all()),
        "host": model.host.name if model.host else None,
        "fallback": model.fallback.served_model_name if model.fallback else None,
        "asleep": bool(live) and all(row.desired_state == DesiredState.SLEEPING for row in live),
        **{name: getattr(model, name) for name in FIELDS},
        **{name: getattr(rules, name) for name in RULES},
    }


def _models() -> Any:
    rows = Model.objects.select_related("host", "fallback", "memory_policy")
    return rows.prefetch_related("aliases", "instances")


def preset_save(name: str, *, actor: str, replace: bool = False) -> Preset:
    """Keep what is deployed now under a name. Raises Conflict when the name is taken (without ``replace``)."""
    if not 1 <= len(name.strip()) <= 64:
        raise InvalidInput({"name": "Give it a name of 1 to 64 characters."})
    entries = [entry_of(model) for model in _models().filter(deployed=True)]
    if not entries:
        raise Conflict("Nothing is deployed: there is nothing to keep.")
    try:
        with transaction.atomic():
            if replace:
                preset, _ = Preset.objects.update_or_create(
                    name=name.strip(), defaults={"entries": entries, "created_by": actor[:150]}
                )
            else:
                preset = Preset.objects.create(name=name.strip(), entries=entries, created_by=actor[:150])
    except IntegrityError:
        raise Conflict(f"There is a preset named {name!r} already.") from None
    audit(actor, "preset.save", preset.name)
    return preset


def preset_delete(preset: Preset, *, actor: str) -> None:
    audit(actor, "preset.delete", preset.name)
    preset.delete()


def preset_diff(preset: Preset) -> list[dict[str, Any]]:
    """What applying it would do, one entry a model: kept, create, start, change (with the fields), sleep or stop.

    Models that are not in the preset are stopped, and stay saved.
    """
    models = {model.served_model_name: model for model in _models()}
    diff: list[dict[str, Any]] = []
    for entry in preset.entries:
        name = entry["served_model_name"]
        model = models.pop(name, None)
        if model is None:
            diff.append({"name": name, "act": "create", "fields": {}})
            continue
        now = entry_of(model)
        fields = {
            key: {"from": now[key], "to": value} for key, value in entry.items() if key in now and now[key] != value
        }
        asleep = fields.pop("asleep", None)
        if not model.deployed:
            diff.append({"name": name, "act": "start", "fields": fields})
        elif fields:
            diff.append({"name": name, "act": "change", "fields": fields})
        elif asleep and entry["asleep"]:
            diff.append({"name": name, "act": "sleep", "fields": {}})
        else:
            diff.append({"name": name, "act": "kept", "fields": {}})
    diff += [{"name": name, "act": "stop", "fields": {}} for name, model in models.items() if model.deployed]
    return diff


def preset_apply(preset: Preset, *, actor: str) -> Operation:
    """Carry out the difference: stops first, then changes, then starts. Raises Conflict when there is none."""
    order = {"stop": 0, "change": 1, "create": 2, "start": 3, "sleep": 4}
    steps = [
        {"kind": one["act"], "name": one["name"], "state": "waiting", "reason": _reason(one)}
        for one in sorted(preset_diff(preset), key=lambda one: order.get(one["act"], 9))
        if one["act"] != "kept"
    ]
    if not steps:
        raise Conflict("Everything is as this preset wants it: nothing is restarted.")
    facts = {"entries": {entry["served_model_name"]: entry for entry in preset.entries}}
    return operation_create(
        PRESET, title=f"Apply preset {preset.name}", actor=actor, steps=steps, facts=facts, deadline_s=7200.0
    )


def _reason(one: Mapping[str, Any]) -> str:
    if one["act"] == "change":
        return "Changed: " + ", ".join(sorted(one["fields"]))
    return {"create": "Not saved yet", "start": "Not running", "stop": "Not in the preset", "sleep": "Should sleep"}[
        one["act"]
    ]


@handles(PRESET)
def preset_step(operation: Operation) -> Progress:
    """Begin one step a look; a step that fails is said and the next one goes on.

    Starts run side by side where GPUs allow, one after another where they share one.
    """
    steps: list[dict[str, Any]] = operation.steps
    if operation.cancel_requested:
        for one in steps:
            if one["state"] == "waiting":
                one["state"] = "skipped"
        return Progress(done=True, cancelled=True, message="Cancelled; what was begun goes on.", steps=steps)
    waiting = next((one for one in steps if one["state"] == "waiting"), None)
    if waiting is not None:
        _begin(operation, waiting)
        return Progress(phase=waiting["kind"], message=waiting["name"], progress=_share(steps), steps=steps)
    for one in steps:
        if one["state"] == "running":
            _look(operation, one)
    if any(one["state"] == "running" for one in steps):
        return Progress(phase="waiting", message=_names(steps, "running"), progress=_share(steps), steps=steps)
    failed = _names(steps, "failed")
    message = f"Not everything came up: {failed}" if failed else "Everything is as the preset wants it."
    return Progress(done=True, failed=bool(failed), message=message, progress=1.0, steps=steps)


def _share(steps: list[dict[str, Any]]) -> float:
    return sum(one["state"] in ("done", "failed", "skipped") for one in steps) / max(len(steps), 1)


def _names(steps: list[dict[str, Any]], state: str) -> str:
    return ", ".join(f"{one['name']} ({one.get('message') or one['kind']})" for one in steps if one["state"] == state)


def _begin(operation: Operation, step: dict[str, Any]) -> None:
    """One act. Repeating it after a crash changes nothing: each of the services is idempotent."""
    entry = dict(operation.facts["entries"].get(step["name"], {}))
    actor = operation.created_by
    entry.pop("asleep", None)
    name = entry.pop("served_model_name", step["name"])
    try:
        model = _models().filter(served_model_name=name).first()
        if step["kind"] == "stop":
            for row in Instance.objects.live().filter(model=model):
                instance_stop(row, actor=actor)
        elif step["kind"] == "sleep":
            for row in Instance.objects.live().filter(model=model, state=InstanceState.READY):
                instance_sleep(row, actor=actor)
        else:
            if model is None:
                model = model_create(actor=actor, allow_risky=True, served_model_name=name, **entry)
            else:
                model = model_update(model, actor=actor, allow_risky=True, **entry)
            if step["kind"] == "change":
                _apply_change(model, actor)
            else:
                model_launch(model, actor=actor)
        step["state"] = "running"
    except SardeenzError as exc:
        step |= {"state": "failed", "message": exc.message}


def _apply_change(model: Model, actor: str) -> None:
    """Only a change of the engine's options needs a new engine; replicas and rules are picked up as they are."""
    stale = Instance.objects.filter(model=model, state=InstanceState.READY).exclude(spec_revision=model.spec_revision)
    if stale.exists():
        model_roll(model, actor=actor)


def _look(operation: Operation, step: dict[str, Any]) -> None:
    model = Model.objects.filter(served_model_name=step["name"]).first()
    rows = list(Instance.objects.filter(model=model, replaces=None)) if model else []
    live = [row for row in rows if row.is_live]
    if step["kind"] == "stop":
        if not live:
            step["state"] = "done"
        return
    entry = operation.facts["entries"].get(step["name"], {})
    wanted = int(entry.get("replicas") or 1)
    failed = [row for row in rows if row.state == InstanceState.FAILED and row.next_restart_at is None]
    if failed and len(live) < wanted:
        step |= {"state": "failed", "message": failed[0].reason}
        return
    asleep = [row for row in live if row.state == InstanceState.SLEEPING]
    ready = [row for row in live if row.state == InstanceState.READY and row.spec_revision == row.model.spec_revision]
    if entry.get("asleep"):
        for row in ready:
            if row.desired_state == DesiredState.RUNNING:
                instance_sleep(row, actor=operation.created_by)
        if len(asleep) >= wanted:
            step["state"] = "done"
    elif len(ready) >= wanted:
        step["state"] = "done"
