"""Which usage to show."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from typing import Any

from django import forms

from models_app.usage_report import MOST_DAYS, By, UsageFilter

DEFAULT_DAYS = 7


def today() -> date:
    return datetime.now(UTC).date()


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
        end = data.get("end") or today()
        start = data.get("start") or end - timedelta(days=DEFAULT_DAYS - 1)
        if start > end:
            self.add_error("start", "The first day lies after the last one.")
        elif (end - start).days >= MOST_DAYS:
            self.add_error("start", f"Choose at most {MOST_DAYS} days.")
        return data | {"start": start, "end": end}

    def sentences(self) -> list[str]:
        """What is wrong, if anything."""
        return [str(text) for texts in self.errors.values() for text in texts]

    def wanted(self) -> tuple[UsageFilter, By]:
        """What is meant; the default for a form that is not valid."""
        if not self.is_valid():
            end = today()
            return UsageFilter(end - timedelta(days=DEFAULT_DAYS - 1), end), "all"
        data = self.cleaned_data
        wanted = UsageFilter(data["start"], data["end"], data["key"] or None, data["model"] or None)
        return wanted, data["by"] or "all"
