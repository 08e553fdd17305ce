"""What is served: models with their options, other names, memory policy, measured footprint, presets."""

from __future__ import annotations

import re
from typing import Any

from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models

from gpus_app.models import Host

SERVED_NAME_RE = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,126}[A-Za-z0-9]$|^[A-Za-z0-9]$")
served_name_validator = RegexValidator(
    SERVED_NAME_RE,
    "Use letters, digits and . _ - / : (at most 128, beginning and ending with a letter or digit).",
)


class Model(models.Model):
    """What is served: weights and the options to serve them with."""

    class Source(models.TextChoices):
        CATALOGUE = "catalogue"
        HUGGINGFACE = "huggingface", "Hugging Face"
        LOCAL = "local", "local folder"

    class RestartPolicy(models.TextChoices):
        ALWAYS = "always"
        ON_FAILURE = "on_failure", "on failure"
        NEVER = "never"

    class KvLayout(models.TextChoices):
        DEFAULT = "default", "kvcached's default"
        CONTIGUOUS = "contiguous"
        NON_CONTIGUOUS = "non_contiguous", "non-contiguous"

    served_model_name = models.CharField(max_length=128, unique=True, validators=[served_name_validator])
    source = models.CharField(max_length=16, choices=Source.choices)
    model = models.CharField(max_length=1024, help_text="Hugging Face id, or the real path of a local folder.")
    hf_revision = models.CharField(max_length=128, blank=True)
    max_model_len = models.PositiveIntegerField(null=True, blank=True, help_text="Empty: the model's own.")
    dtype = models.CharField(max_length=16, default="auto")
    quantization = models.CharField(max_length=32, blank=True)
    tensor_parallel_size = models.PositiveSmallIntegerField(default=1, validators=[MinValueValidator(1)])
    enforce_eager = models.BooleanField(default=False)
    enable_sleep_mode = models.BooleanField(default=False)
    enable_prefix_caching = models.BooleanField(default=True)
    kvcached = models.BooleanField(default=True, help_text="Elastic KV memory; off means a static reservation.")
    kv_layout = models.CharField(max_length=16, choices=KvLayout.choices, default=KvLayout.DEFAULT)
    extra_args = models.TextField(blank=True, help_text="More vllm serve arguments, split as a shell would.")
    load_format = models.CharField(max_length=16, blank=True, help_text="'dummy' for random weights; empty: auto.")
    replicas = models.PositiveSmallIntegerField(default=1, validators=[MinValueValidator(1), MaxValueValidator(64)])
    host = models.ForeignKey(Host, null=True, blank=True, on_delete=models.SET_NULL, related_name="+")
    gpu_uuids = models.JSONField(default=list, blank=True, help_text="Chosen by hand; empty: the placer chooses.")
    initial_limit_bytes = models.BigIntegerField(null=True, blank=True, help_text="KV limit at start, per GPU.")
    restart_policy = models.CharField(max_length=16, choices=RestartPolicy.choices, default=RestartPolicy.ON_FAILURE)
    on_demand = models.BooleanField(default=False, help_text="A request starts or wakes it.")
    pinned = models.BooleanField(default=False, help_text="Never slept or stopped to make room.")
    idle_sleep_after_s = models.PositiveIntegerField(null=True, blank=True)
    sleep_level = models.PositiveSmallIntegerField(default=1, validators=[MinValueValidator(1), MaxValueValidator(2)])
    request_defaults = models.JSONField(default=dict, blank=True, help_text="Used when a request has none.")
    fallback = models.ForeignKey("self", null=True, blank=True, on_delete=models.SET_NULL, related_name="+")
    max_concurrency = models.PositiveIntegerField(null=True, blank=True)
    prefix_affinity = models.BooleanField(
        default=False, help_text="Prompts that begin alike go to the same replica, which has them cached."
    )
    first_byte_limit_s = models.PositiveIntegerField(
        null=True, blank=True, help_text="How long an answer may take to begin; empty: the router's own limits."
    )
    idle_limit_s = models.PositiveIntegerField(
        null=True, blank=True, help_text="Longest silence within an answer; empty: the router's own limit."
    )
    demand_facts = models.JSONField(
        default=dict, blank=True, editable=False, help_text="Why a request could not bring it up: code, reason, times."
    )
    facts = models.JSONField(default=dict, blank=True, help_text="Architecture facts (engines.facts.ModelFacts).")
    spec_revision = models.PositiveIntegerField(default=1, help_text="Rises when an option of the engine changes.")
    deployed = models.BooleanField(
        default=False, help_text="Wanted: its replicas are kept running until it is stopped."
    )
    created_by = models.CharField(max_length=150, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["served_model_name"]
        permissions = [
            ("operate", "Can launch, stop, limit and sleep models"),
            ("administer", "Can manage models, keys, users and hosts"),
            ("risky_arguments", "Can use engine arguments that run code or read files"),
        ]

    def __str__(self) -> str:
        return self.served_model_name

    @property
    def alias_defaults(self) -> dict[str, dict[str, Any]]:
        """Per alias that has them: the options of requests that have none."""
        return {alias.name: alias.request_defaults for alias in self.aliases.all() if alias.request_defaults}


class ModelAlias(models.Model):
    """Another name under which clients may ask for a model. A name is never both an alias and a served model name."""

    name = models.CharField(max_length=128, unique=True, validators=[served_name_validator])
    model = models.ForeignKey(Model, on_delete=models.CASCADE, related_name="aliases")
    request_defaults = models.JSONField(
        default=dict, blank=True, help_text="Used when a request by this name has none; before the model's own."
    )

    class Meta:
        ordering = ["name"]
        verbose_name_plural = "model aliases"

    def __str__(self) -> str:
        return self.name


class MemoryPolicy(models.Model):
    """What the controller owes to, and may take from, the instances of one model. Bytes are per GPU."""

    class Reclaim(models.TextChoices):
        WAIT = "wait"
        PREEMPT = "preempt"
        ABORT = "abort"

    model = models.OneToOneField(Model, on_delete=models.CASCADE, related_name="memory_policy")
    guarantee_bytes = models.BigIntegerField(default=0, validators=[MinValueValidator(0)])
    maximum_bytes = models.BigIntegerField(null=True, blank=True, validators=[MinValueValidator(0)])
    priority = models.PositiveSmallIntegerField(default=50, validators=[MaxValueValidator(100)])
    idle_shrink_after_s = models.PositiveIntegerField(null=True, blank=True)
    reclaim = models.CharField(max_length=8, choices=Reclaim.choices, default=Reclaim.WAIT)

    class Meta:
        verbose_name_plural = "memory policies"

    def __str__(self) -> str:
        return f"memory policy of {self.model}"


class MemoryProfile(models.Model):
    """What one model really took on one kind of GPU with given options: recorded at ready."""

    key = models.CharField(max_length=64, unique=True, help_text="Digest of model, GPU name and options.")
    model = models.CharField(max_length=1024)
    gpu_name = models.CharField(max_length=128)
    options = models.JSONField(default=dict)
    baseline_bytes = models.BigIntegerField(help_text="Resident minus KV footprint, per GPU, highest seen.")
    weights_bytes = models.BigIntegerField(null=True)
    bundle_bytes = models.BigIntegerField(null=True)
    safety_floor_bytes = models.BigIntegerField(null=True)
    load_s = models.FloatField(null=True)
    runs = models.PositiveIntegerField(default=1)
    updated_at = models.DateTimeField(auto_now=True)

    def __str__(self) -> str:
        return f"{self.model} on {self.gpu_name}"


class Preset(models.Model):
    """A named set of models with all their options, applied as a difference."""

    name = models.CharField(max_length=64, unique=True)
    entries = models.JSONField(default=list)
    created_by = models.CharField(max_length=150, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name
