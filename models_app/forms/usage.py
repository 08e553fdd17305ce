"""Which usage to show."""

from __future__ import annotations

from typing import Any

from django import forms

from models_app.errors import InvalidInput
from models_app.usage_report import By, UsageFilter, days_of


class UsageForm(forms.Form):
    """Days (UTC, both included), a key, a model, and what a line is. Nothing given: the last seven days."""

    GROUPINGS: tuple[tuple[By, str], ...] = (
        ("all", "day, key and model"),
        ("day", "day"),
        ("key", "key"),
        ("model", "model"),
    )

    start = forms.DateField(required=False, error_messages={"invalid": "Give the first day as YYYY-MM-DD."})
    end = forms.DateField(required=False, error_messages={"invalid": "Give the last day as YYYY-MM-DD."})
    key = forms.CharField(required=False, max_length=64)
    model = forms.CharField(required=False, max_length=128)
    by = forms.ChoiceField(required=False, choices=GROUPINGS)

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        if not self.errors:
            try:
                data["start"], data["end"] = days_of(data.get("start"), data.get("end"))
            except InvalidInput as exc:
                self.add_error("start", exc.fields["start"])
        return data

    def sentences(self) -> list[str]:
        """What is wrong, if anything."""
        return [str(text) for texts in self.errors.values() for text in texts]

    def wanted(self) -> tuple[UsageFilter, By]:
        """What is meant; the default for a form that is not valid."""
        if not self.is_valid():
            return UsageFilter(*days_of()), "all"
        data = self.cleaned_data
        wanted = UsageFilter(data["start"], data["end"], data["key"] or None, data["model"] or None)
        return wanted, data["by"] or "all"
