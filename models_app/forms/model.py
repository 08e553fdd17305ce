"""The form of a model. It carries text to the service, which reads and judges every value; nothing is judged twice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from django import forms

from gpus_app.models import Gpu, Host
from models_app.models import MemoryPolicy, Model
from models_app.services.model_fields import DTYPES, LOAD_FORMATS

QUANTIZATIONS = ("", "awq", "awq_marlin", "gptq", "gptq_marlin", "fp8", "bitsandbytes", "compressed-tensors", "gguf")

#: Which visible field holds the weights, by source.
WEIGHTS_FIELD = {
    Model.Source.CATALOGUE: "catalogue_model",
    Model.Source.HUGGINGFACE: "hub_model",
    Model.Source.LOCAL: "local_model",
}
_FLAGS = (
    "enforce_eager",
    "enable_prefix_caching",
    "enable_sleep_mode",
    "kvcached",
    "on_demand",
    "pinned",
    "prefix_affinity",
)
_TEXTS = (
    "hf_revision",
    "served_model_name",
    "aliases",
    "max_model_len",
    "dtype",
    "quantization",
    "tensor_parallel_size",
    "sleep_level",
    "kv_layout",
    "load_format",
    "extra_args",
    "replicas",
    "host",
    "initial_limit_bytes",
    "guarantee_bytes",
    "maximum_bytes",
    "priority",
    "reclaim",
    "idle_shrink_after_s",
    "restart_policy",
    "idle_sleep_after_s",
    "fallback",
    "max_concurrency",
    "first_byte_limit_s",
    "idle_limit_s",
    "request_defaults",
    "alias_defaults",
)
#: Fields that stand under *more*: the section is open when one of them is wrong.
ENGINE_MORE = ("kv_layout", "load_format", "extra_args", "sleep_level", "kvcached")
LIFE_MORE = (
    "fallback",
    "max_concurrency",
    "prefix_affinity",
    "first_byte_limit_s",
    "idle_limit_s",
    "request_defaults",
    "alias_defaults",
)


class Choice(forms.ChoiceField):
    """A select whose value the service judges."""

    def valid_value(self, value: Any) -> bool:
        return True


def size_text(value: int | None) -> str:
    """Bytes as the form writes them: ``3G``, ``512M``, or the plain number."""
    if value is None:
        return ""
    for unit, power in (("G", 3), ("M", 2)):
        if value and value % 1024**power == 0:
            return f"{value // 1024**power}{unit}"
    return str(value)


def _text(initial: str = "", **kwargs: Any) -> forms.CharField:
    return forms.CharField(required=False, initial=initial, **kwargs)


def _flag(initial: bool = False) -> forms.BooleanField:
    return forms.BooleanField(required=False, initial=initial)


def _pairs(values: Iterable[str], empty: str = "automatic") -> list[tuple[str, str]]:
    return [(value, value or empty) for value in values]


class ModelForm(forms.Form):
    """Fields in the order of the page."""

    source = _text(Model.Source.CATALOGUE)
    catalogue_model = _text()
    hub_model = _text()
    hf_revision = _text()
    local_model = _text()
    served_model_name = _text()
    aliases = _text()

    max_model_len = _text()
    dtype = Choice(choices=_pairs(DTYPES), initial="auto", required=False)
    quantization = Choice(choices=_pairs(QUANTIZATIONS, "the model's own"), required=False)
    tensor_parallel_size = _text("1")
    enforce_eager = _flag()
    enable_prefix_caching = _flag(True)
    enable_sleep_mode = _flag()
    sleep_level = Choice(
        choices=[("1", "1: weights to host memory"), ("2", "2: weights dropped")], initial="1", required=False
    )
    kvcached = _flag(True)
    kv_layout = Choice(choices=Model.KvLayout.choices, initial=Model.KvLayout.DEFAULT, required=False)
    load_format = Choice(choices=_pairs(LOAD_FORMATS), required=False)
    extra_args = _text(widget=forms.Textarea)

    replicas = _text("1")
    host = Choice(required=False)
    gpu_uuids = forms.MultipleChoiceField(required=False)

    initial_limit_bytes = _text()
    guarantee_bytes = _text()
    maximum_bytes = _text()
    priority = _text("50")
    reclaim = Choice(choices=MemoryPolicy.Reclaim.choices, initial=MemoryPolicy.Reclaim.WAIT, required=False)
    idle_shrink_after_s = _text()

    restart_policy = Choice(choices=Model.RestartPolicy.choices, initial=Model.RestartPolicy.ON_FAILURE, required=False)
    on_demand = _flag()
    pinned = _flag()
    idle_sleep_after_s = _text()
    fallback = Choice(required=False)
    max_concurrency = _text()
    prefix_affinity = _flag()
    first_byte_limit_s = _text()
    idle_limit_s = _text()
    request_defaults = _text(widget=forms.Textarea)
    alias_defaults = _text(widget=forms.Textarea)

    def __init__(self, *args: Any, hosts: list[Host], models: list[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hosts = hosts
        self.fields["host"].choices = [("", "automatic"), *((host.name, host.name) for host in hosts)]  # type: ignore[attr-defined]
        self.fields["fallback"].choices = [("", "none"), *((name, name) for name in models)]  # type: ignore[attr-defined]
        self.gpus: list[Gpu] = [gpu for host in hosts for gpu in host.gpus.all()]
        for name in ("quantization", "load_format", "dtype"):  # a saved value that is none of the usual ones stays
            value = str(self[name].value() or "")
            field: Any = self.fields[name]
            if value not in {key for key, _text in field.choices}:
                field.choices = [*field.choices, (value, value)]
        uuids = {gpu.uuid for gpu in self.gpus}
        extra = [uuid for uuid in self._raw_uuids() if uuid not in uuids]
        self.fields["gpu_uuids"].choices = [(uuid, uuid) for uuid in [*uuids, *extra]]  # type: ignore[attr-defined]

    def _raw_uuids(self) -> list[str]:
        if self.is_bound:
            return list(self.data.getlist("gpu_uuids")) if hasattr(self.data, "getlist") else []
        return list(self.initial.get("gpu_uuids") or [])

    @property
    def chosen_uuids(self) -> list[str]:
        return self._raw_uuids()

    @property
    def chosen_source(self) -> str:
        value = self["source"].value() or Model.Source.CATALOGUE
        return value if value in Model.Source.values else Model.Source.CATALOGUE

    def service_fields(self) -> dict[str, Any]:
        """What was typed, by the service's names."""
        data: Mapping[str, Any] = self.data
        fields: dict[str, Any] = {name: data.get(name, "") for name in _TEXTS}
        fields |= {name: name in data for name in _FLAGS}
        fields["source"] = self.chosen_source
        fields["model"] = str(data.get(WEIGHTS_FIELD[Model.Source(self.chosen_source)], "")).strip()
        fields["gpu_uuids"] = self.chosen_uuids
        for name, default in (("guarantee_bytes", "0"), ("priority", "50"), ("tensor_parallel_size", "1")):
            fields[name] = str(fields[name]).strip() or default
        fields["replicas"] = str(fields["replicas"]).strip() or "1"
        fields["sleep_level"] = fields["sleep_level"] or "1"
        for name, default in (
            ("dtype", "auto"),
            ("kv_layout", "default"),
            ("restart_policy", "on_failure"),
            ("reclaim", "wait"),
        ):
            fields[name] = fields[name] or default
        return fields

    def take_errors(self, errors: Mapping[str, list[str]]) -> None:
        """Put the service's sentences at the fields that the reader sees."""
        for name, sentences in errors.items():
            shown = WEIGHTS_FIELD[Model.Source(self.chosen_source)] if name == "model" else name
            self.add_error(shown if shown in self.fields else None, list(sentences))

    @property
    def engine_open(self) -> bool:
        return self._touched(ENGINE_MORE)

    @property
    def life_open(self) -> bool:
        return self._touched(LIFE_MORE)

    def _touched(self, names: Iterable[str]) -> bool:
        """Whether a folded section holds an error or a value other than the default."""
        if any(name in self.errors for name in names):
            return True
        for name in names:
            value, usual = self[name].value(), self.fields[name].initial
            if str("" if value is None else value) != str("" if usual is None else usual):
                return True
        return False


def initial_of(model: Model) -> dict[str, Any]:
    """The form's values of a saved model."""
    policy: MemoryPolicy | None = getattr(model, "memory_policy", None)
    values: dict[str, Any] = {
        name: getattr(model, name)
        for name in (
            "source",
            "hf_revision",
            "served_model_name",
            "max_model_len",
            "dtype",
            "quantization",
            "tensor_parallel_size",
            "sleep_level",
            "kv_layout",
            "load_format",
            "extra_args",
            "replicas",
            "restart_policy",
            "idle_sleep_after_s",
            "max_concurrency",
            "first_byte_limit_s",
            "idle_limit_s",
            "gpu_uuids",
            *_FLAGS,
        )
    }
    values[WEIGHTS_FIELD[Model.Source(model.source)]] = model.model
    values["aliases"] = ", ".join(alias.name for alias in model.aliases.all())
    values["host"] = model.host.name if model.host else ""
    values["fallback"] = model.fallback.served_model_name if model.fallback else ""
    values["request_defaults"] = json.dumps(model.request_defaults) if model.request_defaults else ""
    values["alias_defaults"] = json.dumps(model.alias_defaults) if model.alias_defaults else ""
    values["initial_limit_bytes"] = size_text(model.initial_limit_bytes)
    if policy is not None:
        values |= {
            "guarantee_bytes": size_text(policy.guarantee_bytes) if policy.guarantee_bytes else "",
            "maximum_bytes": size_text(policy.maximum_bytes),
            "priority": policy.priority,
            "reclaim": policy.reclaim,
            "idle_shrink_after_s": policy.idle_shrink_after_s,
        }
    return values
