"""Presets: named sets of models with all their options. Applying one shows the difference first and does only that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import IntegrityError, transaction

from models_app import events, selectors
from models_app.errors import Conflict, InvalidInput, SardeenzError
from models_app.models import Instance, MemoryPolicy, Model, Operation, Preset
from models_app.services.audit import audit
from models_app.services.lifecycle.launch import model_launch
from models_app.services.lifecycle.sleep import instance_sleep, instance_wake
from models_app.services.lifecycle.stop import instance_stop
from models_app.services.model_fields import POLICY_READERS, READERS
from models_app.services.models import model_create, model_update
from models_app.services.plans.operations import OPEN, Progress, handles, operation_create
from models_app.services.plans.rollout import REPLACE, REPLACEABLE, model_roll
from models_app.states import DesiredState, InstanceState

PRESET = "preset"

#: Everything that a model can be given, besides what is kept by name: its options, those to come too, and its rules.
FIELDS = tuple(name for name in READERS if name not in ("served_model_name", "aliases", "host", "fallback"))
RULES = tuple(POLICY_READERS)


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
    name = name.strip()
    if not 1 <= len(name) <= 64:
        raise InvalidInput({"name": "Give it a name of 1 to 64 characters."})
    entries = [entry_of(model) for model in _models().filter(deployed=True)]
    if not entries:
        raise Conflict("Nothing is deployed: there is nothing to keep.")
    try:
        with transaction.atomic():
            if replace:
                preset, _ = Preset.objects.update_or_create(
                    name=name, defaults={"entries": entries, "created_by": actor[:150]}
                )
            else:
                preset = Preset.objects.create(name=name, entries=entries, created_by=actor[:150])
    except IntegrityError:
        raise Conflict(f"There is a preset named {name!r} already.") from None
    audit(actor, "preset.save", preset.name)
    return preset


def preset_delete(preset: Preset, *, actor: str) -> None:
    audit(actor, "preset.delete", preset.name)
    preset.delete()


def preset_diff(preset: Preset) -> list[dict[str, Any]]:
    """What applying it would do, one entry a model: kept, create, start, change (with the fields), sleep, wake, stop.

    Models that are not in the preset are stopped, and stay saved.
    """
    models = {model.served_model_name: model for model in _models()}
    diff: list[dict[str, Any]] = []
    for entry in preset.entries:
        name = entry["served_model_name"]
        model = models.pop(name, None)
        act, fields = ("create", {}) if model is None else _act(entry, model)
        diff.append({"name": name, "act": act, "fields": fields})
    diff += [{"name": name, "act": "stop", "fields": {}} for name, model in models.items() if _is_wanted(model)]
    return diff


def _is_wanted(model: Model) -> bool:
    return model.deployed or any(row.is_live for row in model.instances.all())


def _act(entry: Mapping[str, Any], model: Model) -> tuple[str, dict[str, Any]]:
    """What one saved model needs. What runs with older options than those saved is a change too."""
    now = entry_of(model)
    fields = {key: {"from": now[key], "to": value} for key, value in entry.items() if key in now and now[key] != value}
    asleep = fields.pop("asleep", None)
    live = [row for row in model.instances.all() if row.is_live]
    if not model.deployed or not live:
        return "start", fields
    also = {"asleep": asleep} if asleep else {}
    if fields:
        return "change", fields | also
    if older := [row for row in live if row.state in REPLACEABLE and row.spec_revision != model.spec_revision]:
        revisions = {"from": older[0].spec_revision, "to": model.spec_revision}
        return "change", {"running options": revisions} | also
    if asleep:
        return "sleep" if entry["asleep"] else "wake", {}
    return "kept", {}


def preset_apply(preset: Preset, *, actor: str) -> Operation:
    """Carry out the difference: stops first, then changes, then starts.

    Raises Conflict when there is none, or while a preset is being applied.
    """
    order = {"stop": 0, "change": 1, "create": 2, "start": 3, "wake": 4, "sleep": 5}
    entries = {entry["served_model_name"]: entry for entry in preset.entries}
    steps = [
        {"kind": one["act"], "name": one["name"], "state": "waiting", "reason": _reason(one)}
        for one in sorted(preset_diff(preset), key=lambda one: (order.get(one["act"], 9), _depth(one["name"], entries)))
        if one["act"] != "kept"
    ]
    if not steps:
        raise Conflict("Everything is as this preset wants it: nothing is restarted.")
    facts = {"entries": entries}
    with transaction.atomic():
        Preset.objects.select_for_update().get(pk=preset.pk)
        if (other := Operation.objects.filter(kind=PRESET, state__in=OPEN).first()) is not None:
            raise Conflict(f"“{other}” is under way; wait for it, or cancel it.")
        return operation_create(PRESET, title=f"Apply preset {preset.name}", actor=actor, steps=steps, facts=facts)


def _depth(name: str, entries: Mapping[str, Mapping[str, Any]]) -> int:
    """How many fallbacks stand behind it: those have to be there first."""
    depth = 0
    while depth < len(entries) and (name := entries.get(name, {}).get("fallback") or ""):
        depth += 1
    return depth


_REASONS = {
    "create": "Not saved yet",
    "start": "Not running",
    "stop": "Not in the preset",
    "sleep": "Should sleep",
    "wake": "Should be awake",
}


def _reason(one: Mapping[str, Any]) -> str:
    return _REASONS.get(one["act"]) or "Changed: " + ", ".join(sorted(one["fields"]))


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
    step["state"] = "running"
    try:
        _act_on(operation, step)
    except SardeenzError as exc:
        step |= {"state": "failed", "message": exc.message}


def _act_on(operation: Operation, step: dict[str, Any]) -> None:
    entry = dict(operation.facts["entries"].get(step["name"], {}))
    actor = operation.created_by
    entry.pop("asleep", None)
    name = entry.pop("served_model_name", step["name"])
    model = _models().filter(served_model_name=name).first()
    if step["kind"] == "stop":
        _stop(model, actor)
    elif step["kind"] == "sleep":
        for row in Instance.objects.live().filter(model=model, state=InstanceState.READY):
            instance_sleep(row, actor=actor)
    elif step["kind"] == "wake":
        for row in Instance.objects.live().filter(model=model, state=InstanceState.SLEEPING):
            _wake_up(step, row, actor)
    else:
        if model is None:
            model = model_create(actor=actor, allow_risky=True, **{"served_model_name": name, **entry})
        else:
            model = model_update(model, actor=actor, allow_risky=True, **entry)
        if step["kind"] == "change":
            _roll(operation, step, model)
        else:
            model_launch(model, actor=actor)


def _stop(model: Model | None, actor: str) -> None:
    """Every instance, failed ones too: their restart policy would bring them back."""
    if model is None:
        return
    with transaction.atomic():
        # A launch comes before all of this or after it: in between it would be half undone.
        Model.objects.select_for_update(of=("self",), no_key=True).get(pk=model.pk)
        if Model.objects.filter(pk=model.pk, deployed=True).update(deployed=False):
            events.publish_models_on_commit()
        for row in Instance.objects.filter(model=model).exclude(state=InstanceState.STOPPED):
            instance_stop(row, actor=actor)


def _stale(model: Model) -> bool:
    """Whether something runs with other options than those saved: only that needs a new engine; replicas and rules
    are picked up as they are."""
    rows = Instance.objects.filter(model=model, replaces=None, state__in=REPLACEABLE)
    return rows.exclude(spec_revision=model.spec_revision).exists()


def _roll(operation: Operation, step: dict[str, Any], model: Model) -> None:
    """Renew what runs older options. A sleeper that the preset wants awake gets a successor that stays awake."""
    if not _stale(model):
        return
    running = Operation.objects.filter(kind=REPLACE, model=model, state__in=OPEN).first()
    entry = operation.facts["entries"].get(step["name"], {})
    step["operation"] = (running or model_roll(model, actor=operation.created_by, awake=not entry.get("asleep"))).pk


def _look(operation: Operation, step: dict[str, Any]) -> None:
    """How far a step has got; what an engine or a service refuses fails this step alone."""
    try:
        done = _is_done(operation, step)
    except SardeenzError as exc:
        step |= {"state": "failed", "message": exc.message}
        return
    if done:
        step["state"] = "done"


def _is_done(operation: Operation, step: dict[str, Any]) -> bool:
    model = Model.objects.filter(served_model_name=step["name"]).first()
    if model is None:
        if step["kind"] != "stop":
            step |= {"state": "failed", "message": "The model was deleted meanwhile."}
        return bool(step["kind"] == "stop")
    rows = list(Instance.objects.filter(model=model, replaces=None))
    live = [row for row in rows if row.is_live]
    if step["kind"] == "stop":
        if live and model.deployed:
            step |= {"state": "failed", "message": "It was launched again meanwhile."}
        return not live
    if _roll_failed(operation, step, model):
        return False
    entry = operation.facts["entries"].get(step["name"], {})
    wanted = int(entry.get("replicas") or 1)
    if not entry.get("asleep"):
        for row in live:
            _wake_up(step, row, operation.created_by)
    if overruled := _overruled(model, rows, entry, wanted):
        step |= {"state": "failed", "message": overruled}
        return False
    failed = [row for row in rows if row.state == InstanceState.FAILED and row.next_restart_at is None]
    if failed and len(live) < wanted:
        step |= {"state": "failed", "message": failed[0].reason}
        return False
    asleep = [row for row in live if row.state == InstanceState.SLEEPING and row.spec_revision == model.spec_revision]
    ready = [row for row in live if row.state == InstanceState.READY and row.spec_revision == model.spec_revision]
    if not entry.get("asleep"):
        return len(ready) >= wanted
    for row in ready:
        _fall_asleep(step, row, operation.created_by)
    return len(asleep) >= wanted


def _overruled(model: Model, rows: list[Instance], entry: Mapping[str, Any], wanted: int) -> str:
    """What somebody asked for meanwhile, against this preset: it counts, and waiting for the contrary would not end."""
    if not model.deployed:
        return "It was stopped meanwhile."
    if model.replicas < wanted:
        return f"It was scaled to {model.replicas} meanwhile."
    if Operation.objects.filter(kind=REPLACE, model=model, state__in=OPEN).exists():
        return ""  # the old one is not wanted, its successor takes over
    newest = selectors.newest_by_replica(rows).values()
    if any(row.desired_state == DesiredState.STOPPED and row.replica_index < wanted for row in newest):
        return "One of its instances was stopped meanwhile."
    if not entry.get("asleep"):
        sleeper = next((row for row in newest if row.desired_state == DesiredState.SLEEPING), None)
        if sleeper is not None:
            why = sleeper.reason if sleeper.state == InstanceState.SLEEPING else ""
            return f"It sleeps, and the preset wants it awake. {why}".strip()
    return ""


def _roll_failed(operation: Operation, step: dict[str, Any], model: Model) -> bool:
    """Whether a change's renewal ended with something still on the old options; one that is due yet is begun."""
    if step["kind"] != "change" or not _stale(model):
        return False
    begun = Operation.objects.filter(pk=step.get("operation") or 0).first()
    if begun is None:
        _roll(operation, step, model)  # what was starting with the old options has become ready
    elif not begun.is_open:
        step |= {"state": "failed", "message": begun.message or "The renewal was cancelled."}
        return True
    return False


def _wake_up(step: dict[str, Any], row: Instance, actor: str) -> None:
    """Asked once: one that was put to sleep again, or whose waking failed, ends this step with its reason.

    A sleeper with older options than those saved is left to its renewal.
    """
    asleep = row.state == InstanceState.SLEEPING and row.desired_state == DesiredState.SLEEPING
    if not asleep or row.pk in step.get("woken", ()) or row.spec_revision != row.model.spec_revision:
        return
    step["woken"] = [*step.get("woken", ()), row.pk]
    instance_wake(row, actor=actor)
    row.refresh_from_db()


def _fall_asleep(step: dict[str, Any], row: Instance, actor: str) -> None:
    """Asked once: one that would not sleep (a request in flight for too long) is a failure of this step, not a loop."""
    if row.desired_state != DesiredState.RUNNING:
        return
    if row.pk in step.get("put_to_sleep", ()):
        step |= {"state": "failed", "message": row.reason}
        return
    instance_sleep(row, actor=actor)
    step["put_to_sleep"] = [*step.get("put_to_sleep", ()), row.pk]
