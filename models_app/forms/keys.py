"""Making an API key."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.utils import timezone

from models_app.models import ApiKey, Model

LIVES = [("", "Never"), ("1", "In a day"), ("30", "In 30 days"), ("90", "In 90 days"), ("365", "In a year")]


class KeyForm(forms.Form):
    name = forms.CharField(max_length=64)
    role = forms.ChoiceField(choices=ApiKey.Role.choices, initial=ApiKey.Role.VIEWER)
    models = forms.ModelMultipleChoiceField(queryset=Model.objects.none(), required=False)
    expires = forms.ChoiceField(choices=LIVES, required=False)
    requests_per_minute = forms.IntegerField(min_value=1, required=False)
    tokens_per_minute = forms.IntegerField(min_value=1, required=False)
    max_concurrency = forms.IntegerField(min_value=1, required=False)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["models"].queryset = Model.objects.all()  # type: ignore[attr-defined]

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        days = data.get("expires")
        expires_at: datetime | None = timezone.now() + timedelta(days=int(days)) if days else None
        data["expires_at"] = expires_at
        return data
