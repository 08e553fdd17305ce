"""Who may ask, what they asked and used: API keys, remembered answers, usage, audit."""

from __future__ import annotations

from datetime import datetime

from django.core.validators import MaxValueValidator
from django.db import models
from django.db.models import Q
from django.utils import timezone

from models_app.models.model import Model


class ApiKeyQuerySet(models.QuerySet["ApiKey"]):
    def valid(self, now: datetime) -> ApiKeyQuerySet:
        """Neither revoked nor expired at ``now``."""
        return self.filter(Q(expires_at=None) | Q(expires_at__gt=now), revoked_at=None)


class ApiKey(models.Model):
    """A bearer key for REST and /v1. Only its SHA-256 is stored; the key itself is shown once.

    After a rotation the secret before goes on until ``previous_until``. What it asks is captured until
    ``capture_until``; ``may_capture`` lets a key of an admin switch that on and read what was captured.
    """

    class Role(models.TextChoices):
        VIEWER = "viewer"
        OPERATOR = "operator"
        ADMIN = "admin"

    name = models.CharField(max_length=64, unique=True)
    prefix = models.CharField(max_length=16, help_text="First characters, to recognise it by.")
    digest = models.CharField(max_length=64, unique=True)
    role = models.CharField(max_length=16, choices=Role.choices, default=Role.VIEWER)
    allowed_models = models.ManyToManyField(Model, blank=True, related_name="+", help_text="None chosen: every model.")
    is_scoped = models.BooleanField(
        default=False, editable=False, help_text="Good for the chosen models only, also when none of them is left."
    )
    requests_per_minute = models.PositiveIntegerField(null=True, blank=True)
    tokens_per_minute = models.PositiveIntegerField(null=True, blank=True)
    max_concurrency = models.PositiveIntegerField(null=True, blank=True)
    priority = models.PositiveSmallIntegerField(
        default=50, validators=[MaxValueValidator(100)], help_text="Who waits for a model is served highest first."
    )
    previous_prefix = models.CharField(max_length=16, blank=True)
    previous_digest = models.CharField(max_length=64, unique=True, null=True, blank=True)
    previous_until = models.DateTimeField(null=True, blank=True, help_text="Until when the secret before works.")
    rotated_at = models.DateTimeField(null=True, blank=True)
    may_capture = models.BooleanField(default=False, help_text="May switch capture on and read what was captured.")
    capture_until = models.DateTimeField(null=True, blank=True, help_text="Requests are captured until then.")
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True)
    created_by = models.CharField(max_length=150, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = ApiKeyQuerySet.as_manager()

    class Meta:
        ordering = ["name"]
        permissions = [("capture_prompts", "Can capture the requests of a key and read them")]

    def __str__(self) -> str:
        return self.name

    @property
    def is_valid(self) -> bool:
        return self.revoked_at is None and (self.expires_at is None or self.expires_at > timezone.now())

    @property
    def in_grace(self) -> bool:
        """Whether the secret from before the last rotation still works."""
        return self.previous_until is not None and self.previous_until > timezone.now()

    @property
    def is_captured(self) -> bool:
        return self.capture_until is not None and self.capture_until > timezone.now()


class IdempotencyRecord(models.Model):
    """The answer already given to a POST with this Idempotency-Key, kept for a day."""

    caller = models.CharField(max_length=150)
    key = models.CharField(max_length=255)
    fingerprint = models.CharField(max_length=64, help_text="Of method, path and body.")
    status = models.PositiveSmallIntegerField(null=True)
    body = models.JSONField(default=dict)
    at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["caller", "key"], name="one_answer_per_idempotency_key")]

    def __str__(self) -> str:
        return self.key


class UsageRecord(models.Model):
    """Requests and tokens of one key on one model in one day, added up in batches by the router."""

    day = models.DateField()
    key_name = models.CharField(max_length=64, blank=True)
    served_model_name = models.CharField(max_length=128)
    requests = models.BigIntegerField(default=0)
    errors = models.BigIntegerField(default=0)
    prompt_tokens = models.BigIntegerField(default=0)
    completion_tokens = models.BigIntegerField(default=0)
    ttft_ms_sum = models.BigIntegerField(default=0)
    ttft_histogram = models.JSONField(default=dict, blank=True)
    inter_token_histogram = models.JSONField(default=dict, blank=True)

    class Meta:
        ordering = ["-day", "key_name", "served_model_name"]
        constraints = [
            models.UniqueConstraint(fields=["day", "key_name", "served_model_name"], name="one_usage_row_per_day")
        ]

    def __str__(self) -> str:
        return f"{self.day} {self.key_name} {self.served_model_name}"


class UsageSender(models.Model):
    """A router process that sends usage, and the last batch of it that was added to the rows: none counts twice."""

    sender = models.CharField(max_length=64, unique=True)
    sequence = models.BigIntegerField()
    at = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return f"{self.sender} {self.sequence}"


class AuditEntry(models.Model):
    """An act of an operator, key or policy, and what came of it."""

    at = models.DateTimeField(default=timezone.now, db_index=True)
    actor = models.CharField(max_length=150)
    action = models.CharField(max_length=64)
    target = models.CharField(max_length=255, blank=True)
    outcome = models.CharField(max_length=16, default="ok", help_text="ok, refused, failed")
    detail = models.CharField(max_length=1000, blank=True)
    address = models.GenericIPAddressField(null=True, blank=True)

    class Meta:
        ordering = ["-at", "-pk"]
        verbose_name_plural = "audit entries"

    def __str__(self) -> str:
        return f"{self.actor} {self.action} {self.target}"
