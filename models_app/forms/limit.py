"""Asking for a KV limit."""

from __future__ import annotations

from typing import Any

from django import forms

from models_app.errors import InvalidInput
from models_app.models import MemoryPolicy
from models_app.services.memory.kvcache import parse_percent, parse_size


class LimitForm(forms.Form):
    """Size as a person writes it; ``asked_bytes`` after validation when the GPU's size is known."""

    size = forms.CharField(max_length=40, strip=True)
    reclaim = forms.ChoiceField(choices=MemoryPolicy.Reclaim.choices, required=False)
    force = forms.BooleanField(required=False)

    def __init__(self, *args: Any, total_bytes: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.total_bytes = total_bytes
        self.asked_bytes = 0

    def clean_size(self) -> str:
        text: str = self.cleaned_data["size"]
        try:
            percent = parse_percent(text)
            if percent is None:
                self.asked_bytes = parse_size(text)
            elif self.total_bytes:
                self.asked_bytes = int(self.total_bytes * percent / 100)
        except InvalidInput as exc:
            raise forms.ValidationError([sentence for group in exc.fields.values() for sentence in group]) from exc
        return text
