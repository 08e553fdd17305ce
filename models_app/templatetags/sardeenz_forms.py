"""One form field with its label, hint and errors, tied together for screen readers; no styles in the markup."""

from __future__ import annotations

from typing import Any

from django import forms, template
from django.forms import BoundField
from django.utils.safestring import SafeString

register = template.Library()


#: What the form calls its fields, for sentences that stand away from them.
_TITLES = {
    "model": "Weights",
    "served_model_name": "Served model name",
    "max_model_len": "Context length",
    "tensor_parallel_size": "Tensor parallel size",
    "gpu_uuids": "GPUs",
    "extra_args": "More arguments",
    "hf_revision": "Revision",
    "initial_limit_bytes": "Limit at start",
    "guarantee_bytes": "Guarantee",
    "maximum_bytes": "Maximum",
    "idle_shrink_after_s": "Shrink when idle",
    "idle_sleep_after_s": "Sleep when idle",
}


@register.filter
def field_title(name: str) -> str:
    return _TITLES.get(name, name.replace("_", " ").capitalize())


def _choices(source: Any) -> list[tuple[Any, str]]:
    return list(source.choices)


@register.inclusion_tag("models_app/_field.html")
def field(
    bound: BoundField,
    label: str,
    hint: str | SafeString = "",
    required: bool = False,
    css: str = "",
    placeholder: str = "",
    mono: bool = False,
    rows: int = 3,
) -> dict[str, Any]:
    """Context of ``_field.html``. The kind of control follows from the form's field."""
    errors = list(bound.errors)
    identity = f"id_{bound.html_name}"
    described = " ".join(name for name, there in ((f"{identity}-errors", errors), (f"{identity}-hint", hint)) if there)
    value = bound.value()
    context: dict[str, Any] = {
        "id": identity,
        "name": bound.html_name,
        "label": label,
        "hint": hint,
        "required": required,
        "css": css,
        "placeholder": placeholder,
        "mono": mono,
        "errors": errors,
        "described": described,
        "value": "" if value is None else value,
        "kind": "input",
        "type": "text",
        "rows": rows,
    }
    source = bound.field
    if isinstance(source, forms.BooleanField):
        context["kind"] = "check"
        context["value"] = value in (True, "on", "true", "True", "1")
    elif isinstance(source, (forms.ModelMultipleChoiceField, forms.MultipleChoiceField)):
        chosen = {str(getattr(one, "pk", one)) for one in value or ()}
        options = [{"value": str(key), "label": text, "chosen": str(key) in chosen} for key, text in _choices(source)]
        context |= {"kind": "multiple", "options": options, "rows": min(6, max(2, len(options)))}
    elif isinstance(source, forms.ChoiceField):
        context |= {
            "kind": "select",
            "options": [
                {"value": key, "label": text, "chosen": str(key) == str("" if value is None else value)}
                for key, text in _choices(source)
            ],
        }
    elif isinstance(source.widget, forms.Textarea):
        context["kind"] = "area"
    elif isinstance(source, forms.IntegerField):
        context |= {"type": "number", "min": source.min_value, "max": source.max_value}
    return context
