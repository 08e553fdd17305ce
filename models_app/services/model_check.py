"""Judging a model before anything starts: names, weights, context, GPUs, arguments. One sentence for each fault."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.conf import settings
from django.db.models import Q

from gpus_app.models import Gpu, Host
from gpus_app.policies.base import gib
from models_app.engines import facts as engine_facts
from models_app.engines.facts import ModelFacts
from models_app.models import Model, ModelAlias, WeightedRoute
from models_app.services import specs
from models_app.services.memory import placement
from models_app.services.memory.memory_rules import memory_policy_check
from models_app.services.model_fields import is_hub_id, read_fields

Errors = dict[str, list[str]]

#: A change of one of these makes other facts, or other figures from them.
_FACTS_FIELDS = ("source", "model", "hf_revision", "tensor_parallel_size", "max_model_len", "dtype", "quantization")


@dataclass
class Judgement:
    """What was read, what is wrong with it, and the facts that were found on the way."""

    values: dict[str, Any]
    errors: Errors = field(default_factory=dict)
    facts: dict[str, Any] | None = None  # None: as before, or not known

    def wrong(self, name: str, sentence: str) -> None:
        self.errors.setdefault(name, []).append(sentence)


def judge(fields: Mapping[str, Any], *, model: Model | None = None, allow_risky: bool = False) -> Judgement:
    """Read and judge the fields of a new model, or the changed ones of ``model``."""
    values, errors = read_fields(fields, model=model)
    found = Judgement(values, errors)
    candidate = _candidate(values, model)
    aliases = values["aliases"] if "aliases" in values else _aliases_of(model)
    _names(found, candidate, aliases, model)
    if "served_model_name" in errors or "source" in errors or "model" in errors:
        return found
    known = _weights(found, candidate, model)
    candidate.facts = found.facts if found.facts is not None else candidate.facts
    _gpus(found, candidate)
    _relations(found, candidate, model)
    if "model" not in errors:
        _engine(found, candidate, aliases, allow_risky)
        if known is not None:
            _fit(found, candidate)
    return found


def candidate_of(values: Mapping[str, Any], model: Model | None = None) -> Model:
    """The model as it would be, never saved."""
    return _candidate(values, model)


def _candidate(values: Mapping[str, Any], model: Model | None) -> Model:
    names = [one.attname if one.name in ("host", "fallback") else one.name for one in Model._meta.concrete_fields]
    candidate = Model(**{name: getattr(model, name) for name in names}) if model else Model()
    for name, value in values.items():
        if name != "aliases" and name in {one.name for one in Model._meta.concrete_fields}:
            setattr(candidate, name, value)
    return candidate


def _aliases_of(model: Model | None) -> list[str]:
    return [] if model is None else list(model.aliases.values_list("name", flat=True))


# --- names -----------------------------------------------------------------------------------------


def taken_names(
    names: list[str], *, besides: Model | None = None, besides_route: WeightedRoute | None = None
) -> dict[str, str]:
    """Names that clients use already, with a sentence: unique over served names, aliases, routes."""
    models = Model.objects.filter(served_model_name__in=names)
    aliases = ModelAlias.objects.filter(name__in=names).select_related("model")
    routes = WeightedRoute.objects.filter(name__in=names)
    if besides is not None:
        models, aliases = models.exclude(pk=besides.pk), aliases.exclude(model=besides)
    if besides_route is not None:
        routes = routes.exclude(pk=besides_route.pk)
    found = {row.served_model_name: f"There is a model named {row.served_model_name!r} already." for row in models}
    found |= {row.name: f"{row.name!r} is an alias of {row.model.served_model_name} already." for row in aliases}
    return found | {row.name: f"{row.name!r} is a weighted route already." for row in routes}


def _names(found: Judgement, candidate: Model, aliases: list[str], model: Model | None) -> None:
    name = candidate.served_model_name
    if name in aliases:
        found.wrong("aliases", f"{name!r} is the served name itself.")
    taken = taken_names([name, *aliases], besides=model)
    if name in taken:
        found.wrong("served_model_name", taken[name])
    for alias in aliases:
        if alias in taken:
            found.wrong("aliases", taken[alias])
    for strange in sorted(found.values.get("alias_defaults", {}).keys() - set(aliases)):
        found.wrong("alias_defaults", f"{strange[:60]!r} is no alias of this model.")


# --- weights and what they tell ----------------------------------------------------------------------


def _weights(found: Judgement, candidate: Model, model: Model | None) -> ModelFacts | None:
    """Find the weights, and their architecture's facts; None when these are not known."""
    look: dict[str, Callable[[Judgement, Model], ModelFacts | None]] = {
        Model.Source.CATALOGUE: _from_catalogue,
        Model.Source.LOCAL: _from_folder,
        Model.Source.HUGGINGFACE: _from_hub,
    }
    changed = model is None or any(getattr(model, name) != getattr(candidate, name) for name in _FACTS_FIELDS)
    if not changed:
        return ModelFacts.from_json(candidate.facts) if candidate.facts else None
    facts = look[candidate.source](found, candidate)
    if facts is not None:
        found.facts = facts_json(facts, candidate)
    elif not found.errors.get("model"):
        found.facts = {}
    return facts


def facts_json(facts: ModelFacts, model: Model) -> dict[str, Any]:
    """``Model.facts``: the architecture, and the figures per GPU that follow from the model's options."""
    tp = model.tensor_parallel_size
    context = model.max_model_len or facts.max_position_embeddings
    return {
        **facts.to_json(),
        "kv_bytes_per_token_per_gpu": engine_facts.kv_bytes_per_token(facts, tp),
        "bundle_bytes": engine_facts.bundle_bytes(facts, tp),
        "safety_floor_bytes": engine_facts.safety_floor_bytes(facts, context, tp) if context else None,
    }


def _from_catalogue(found: Judgement, candidate: Model) -> ModelFacts | None:
    entries = {entry.model: entry for entry in engine_facts.catalogue()}
    if candidate.model not in entries:
        found.wrong(
            "model", f"{candidate.model!r} is not in the catalogue; use the source huggingface for other models."
        )
        return None
    return entries[candidate.model].facts


def _from_folder(found: Judgement, candidate: Model) -> ModelFacts | None:
    try:
        folder = model_folder(candidate.model)
        candidate.model = found.values["model"] = str(folder)
        return engine_facts.facts_from_folder(folder)
    except (ValueError, OSError) as exc:
        found.wrong("model", str(exc))
        return None


def model_folder(text: str) -> Path:
    """The real folder behind a path, symlinks resolved. Raises ValueError with a sentence.

    The roots are resolved too, and compared with the resolved path: a link inside a root that leads out of it, and
    ``..``, are outside.
    """
    roots = [root.expanduser().resolve() for root in settings.SARDEENZ_MODEL_ROOTS]
    shown = ", ".join(map(str, roots))
    path = Path(text).expanduser()
    if not path.is_absolute():
        raise ValueError(f"Give the whole path, beginning with /; model folders lie under {shown}.")
    real = path.resolve()
    if not any(real.is_relative_to(root) for root in roots):
        raise ValueError(f"The folder is outside of the model roots ({shown}). Set SARDEENZ_MODEL_ROOTS to allow more.")
    if not real.is_dir():
        raise ValueError("There is no such folder on this machine.")
    if not (real / "config.json").is_file():
        raise ValueError("This is no model folder: it has no config.json.")
    return real


def _from_hub(found: Judgement, candidate: Model) -> ModelFacts | None:
    """Facts of a Hugging Face model: from the catalogue, the local cache, or the hub. Unknown is no error."""
    if not is_hub_id(candidate.model):
        found.wrong("model", "Give a Hugging Face id such as Qwen/Qwen3-8B.")
        return None
    entry = next((one for one in engine_facts.catalogue() if one.model == candidate.model), None)
    if entry is not None:
        return entry.facts
    try:
        return engine_facts.facts_from_hub(candidate.model, settings.SARDEENZ_HF_TOKEN)
    except (ValueError, OSError):
        return None


# --- GPUs and engine ---------------------------------------------------------------------------------


def _gpus(found: Judgement, candidate: Model) -> None:
    """Tensor parallel size and choice by hand against the cards that there are."""
    tp = candidate.tensor_parallel_size
    facts = found.facts or candidate.facts or {}
    for key, what in (("num_attention_heads", "attention heads"),):
        heads = facts.get(key)
        if heads and heads % tp:
            found.wrong("tensor_parallel_size", f"{tp} does not divide the model's {heads} {what}.")
    counts: dict[str, int] = {}
    for name in Gpu.objects.values_list("host__name", flat=True):
        counts[name] = counts.get(name, 0) + 1
    host = candidate.host.name if candidate.host else None
    most = counts.get(host, 0) if host else max(counts.values(), default=0)
    if counts and tp > most:
        where = f"host {host} has" if host else "the largest host has"
        found.wrong("tensor_parallel_size", f"{tp} GPUs are asked for, but {where} {most}.")
    elif candidate.gpu_uuids:
        for name, sentence in specs.gpu_choice_errors(candidate.gpu_uuids, tp, host).items():
            found.wrong(name, sentence)


def _engine(found: Judgement, candidate: Model, aliases: list[str], allow_risky: bool) -> None:
    """What the engine itself would refuse: arguments, context, dtype, quantisation, pairs of versions.

    With a host chosen, by that host; else it is enough that one host takes it.
    """
    spec = specs.spec_of(candidate, aliases)
    hosts: list[Host | None] = [candidate.host] if candidate.host else [*Host.objects.all()]
    verdicts = [
        specs.engine_of(host).check(spec, host.versions if host else None, allow_risky=allow_risky)
        for host in hosts or [None]
    ]
    for error in min(verdicts, key=len):
        found.wrong(error.field or "__all__", error.message)


def _fit(found: Judgement, candidate: Model) -> None:
    """Weights that no card can hold, however empty it is."""
    cards = Gpu.objects.filter(Q(host=candidate.host) if candidate.host else Q())
    kinds = set(cards.values_list("name", "total_bytes"))
    if not kinds or found.errors.get("tensor_parallel_size"):
        return
    needs = [(placement.need_on(candidate, gpu_name=name, gpu_total_bytes=total), total) for name, total in kinds]
    if any(need.total_bytes <= total for need, total in needs):
        return
    need, total = min(needs, key=lambda one: one[0].total_bytes - one[1])
    sentence = f"It needs {placement.need_sentence(need)}; the largest card has {gib(total)}."
    count = max(Gpu.objects.filter(host=host).count() for host in Host.objects.all())
    if candidate.tensor_parallel_size < count:
        sentence += " A larger tensor parallel size spreads the weights over more GPUs."
    found.wrong("model", sentence)


# --- one field against another -------------------------------------------------------------------------


def _relations(found: Judgement, candidate: Model, model: Model | None) -> None:
    values = found.values
    if candidate.idle_sleep_after_s and not (candidate.enable_sleep_mode or candidate.on_demand):
        found.wrong("idle_sleep_after_s", "Falling asleep when idle needs sleep mode, or loading on demand to stop.")
    if candidate.initial_limit_bytes and not candidate.kvcached:
        found.wrong("initial_limit_bytes", "A KV limit needs kvcached; without it KV memory is a fixed reservation.")
    policy = getattr(model, "memory_policy", None) if model else None
    guarantee = values.get("guarantee_bytes", policy.guarantee_bytes if policy else 0)
    maximum = values.get("maximum_bytes", policy.maximum_bytes if policy else None)
    if maximum is not None and maximum < guarantee:
        found.wrong("maximum_bytes", f"The maximum lies below the guarantee of {gib(guarantee)}.")
    elif {"guarantee_bytes", "maximum_bytes"} & values.keys():
        rules = memory_policy_check(candidate, guarantee_bytes=guarantee, maximum_bytes=maximum)
        for name, sentences in rules.items():
            for sentence in sentences:
                found.wrong(name, sentence)
    _fallback(found, candidate, model)


def _fallback(found: Judgement, candidate: Model, model: Model | None) -> None:
    """A chain of fallbacks must end."""
    seen = {model.pk} if model else set()
    following = candidate.fallback
    while following is not None:
        if following.pk in seen:
            found.wrong("fallback", "The fallbacks would lead in a circle.")
            return
        seen.add(following.pk)
        following = following.fallback
