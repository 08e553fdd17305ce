"""Rules of memory: of one GPU, and of one model. Sizes are written as people write them; the services judge."""

from __future__ import annotations

from typing import Any

from django import forms

from gpus_app.models import GpuPolicy
from models_app.forms.model import Choice, size_text
from models_app.models import MemoryPolicy
from models_app.services.model_fields import POLICY_READERS

HOLDS = [("0", "Not held"), ("900", "15 minutes"), ("3600", "1 hour"), ("28800", "8 hours"), ("86400", "1 day")]


class GpuPolicyForm(forms.Form):
    reserve_bytes = forms.CharField(required=False)
    rebalance = Choice(choices=GpuPolicy.Rebalance.choices)

    @classmethod
    def of(cls, policy: GpuPolicy) -> GpuPolicyForm:
        return cls(initial={"reserve_bytes": size_text(policy.reserve_bytes), "rebalance": policy.rebalance})

    def clean_reserve_bytes(self) -> int:
        text = self.cleaned_data["reserve_bytes"].strip() or "0"
        try:
            value: int = POLICY_READERS["guarantee_bytes"](text)
        except ValueError as exc:
            raise forms.ValidationError(str(exc)) from exc
        return value


class MemoryPolicyForm(forms.Form):
    guarantee_bytes = forms.CharField(required=False)
    maximum_bytes = forms.CharField(required=False)
    priority = forms.CharField(required=False)
    reclaim = Choice(choices=MemoryPolicy.Reclaim.choices)
    idle_shrink_after_s = forms.CharField(required=False)

    @classmethod
    def of(cls, policy: MemoryPolicy | None) -> MemoryPolicyForm:
        policy = policy or MemoryPolicy()
        return cls(
            initial={
                "guarantee_bytes": size_text(policy.guarantee_bytes) if policy.guarantee_bytes else "",
                "maximum_bytes": size_text(policy.maximum_bytes),
                "priority": policy.priority,
                "reclaim": policy.reclaim,
                "idle_shrink_after_s": policy.idle_shrink_after_s or "",
            }
        )

    def service_fields(self) -> dict[str, Any]:
        data = self.data
        return {
            "guarantee_bytes": str(data.get("guarantee_bytes", "")).strip() or "0",
            "maximum_bytes": str(data.get("maximum_bytes", "")).strip(),
            "priority": str(data.get("priority", "")).strip() or "50",
            "reclaim": data.get("reclaim") or MemoryPolicy.Reclaim.WAIT,
            "idle_shrink_after_s": str(data.get("idle_shrink_after_s", "")).strip(),
        }
