"""Long work with steps: it can be watched, left, resumed and cancelled."""

from __future__ import annotations

from django.db import models

from models_app.models.instance import Instance
from models_app.models.model import Model


class Operation(models.Model):
    """Long work that an operator can watch, leave, come back to and cancel: make room, move, edit, preset, drain.

    ``steps`` is the plan with the outcome of each step; ``fence`` rises whenever a worker takes the operation over,
    so that an older worker's writes are refused.
    """

    class State(models.TextChoices):
        PENDING = "pending"
        RUNNING = "running"
        SUCCEEDED = "succeeded"
        FAILED = "failed"
        CANCELLED = "cancelled"

    kind = models.CharField(max_length=32)
    title = models.CharField(max_length=255)
    state = models.CharField(max_length=16, choices=State.choices, default=State.PENDING)
    phase = models.CharField(max_length=64, blank=True)
    progress = models.FloatField(null=True, blank=True)
    message = models.CharField(max_length=1000, blank=True)
    steps = models.JSONField(default=list, blank=True)
    facts = models.JSONField(default=dict, blank=True)
    model = models.ForeignKey(Model, null=True, blank=True, on_delete=models.SET_NULL, related_name="operations")
    instance = models.ForeignKey(Instance, null=True, blank=True, on_delete=models.SET_NULL, related_name="operations")
    cancel_requested = models.BooleanField(default=False)
    fence = models.PositiveIntegerField(default=0)
    created_by = models.CharField(max_length=150, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)
    deadline_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-created_at", "-pk"]

    def __str__(self) -> str:
        return self.title

    @property
    def is_open(self) -> bool:
        return self.state in (self.State.PENDING, self.State.RUNNING)
