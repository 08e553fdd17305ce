"""Making an API key and changing one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.utils import timezone

from models_app.models import ApiKey, Model

LIVES = [("", "Never"), ("1", "In a day"), ("30", "In 30 days"), ("90", "In 90 days"), ("365", "In a year")]
KEEP = "keep"
#: Seconds for which the secret before goes on, as the rotation offers them.
GRACES = [
    ("0", "It ends at once"),
    ("3600", "For an hour"),
    ("86400", "For a day"),
    ("604800", "For a week"),
    ("2592000", "For 30 days"),
]


class KeyRights(forms.Form):
    """What a key may do. ``may_grant``: the operator may let it capture, since he may himself."""

    role = forms.ChoiceField(choices=ApiKey.Role.choices, initial=ApiKey.Role.VIEWER)
    models = forms.ModelMultipleChoiceField(queryset=Model.objects.none(), required=False)
    expires = forms.ChoiceField(choices=LIVES, required=False)
    requests_per_minute = forms.IntegerField(min_value=1, max_value=10**9, required=False)
    tokens_per_minute = forms.IntegerField(min_value=1, max_value=10**9, required=False)
    max_concurrency = forms.IntegerField(min_value=1, max_value=100_000, required=False)
    priority = forms.IntegerField(min_value=0, max_value=100, required=False, initial=50)
    may_capture = forms.BooleanField(required=False)

    def __init__(self, *args: Any, may_grant: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["models"].queryset = Model.objects.all()  # type: ignore[attr-defined]
        if not may_grant:
            del self.fields["may_capture"]

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        days = data.pop("expires", "")
        if days != KEEP:
            data["expires_at"] = timezone.now() + timedelta(days=int(days)) if days else None
        if data.get("priority") is None:
            data["priority"] = 50
        return data


class KeyForm(KeyRights):
    """A new key."""

    name = forms.CharField(max_length=64)


class KeyEditForm(KeyRights):
    """An existing key; its name stays, since usage is kept by it."""

    expires = forms.ChoiceField(choices=[(KEEP, "As it is"), *LIVES], required=False, initial=KEEP)


class RotateForm(forms.Form):
    grace_s = forms.TypedChoiceField(choices=GRACES, coerce=float, initial="86400")


class CaptureForm(forms.Form):
    """``minutes`` for which requests are captured; how many at most is the service's to say."""

    minutes = forms.IntegerField(min_value=1, initial=60)
