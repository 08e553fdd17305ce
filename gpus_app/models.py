"""Hosts, their GPUs, the memory policy of a GPU, and rolled-up readings. Knows nothing of models and instances."""

from __future__ import annotations

from datetime import timedelta

from django.conf import settings
from django.db import models
from django.utils import timezone

GIB = 1024**3


class Host(models.Model):
    """A machine with a Celery worker on queue ``host.<name>`` and a sampler. Times are the server's."""

    class EngineKind(models.TextChoices):
        VLLM = "vllm"
        SIMULATED = "simulated"

    name = models.CharField(max_length=64, unique=True, help_text="Stable name; also its Celery queue, host.<name>.")
    address = models.CharField(max_length=255, default="127.0.0.1", help_text="Where the router reaches its engines.")
    engine_kind = models.CharField(max_length=16, choices=EngineKind.choices, default=EngineKind.VLLM)
    versions = models.JSONField(default=dict, blank=True, help_text="driver, vllm, kvcached, python …")
    total_ram_bytes = models.BigIntegerField(default=0)
    available_ram_bytes = models.BigIntegerField(default=0)
    total_shm_bytes = models.BigIntegerField(default=0, help_text="Of /dev/shm; 0 where it is not known.")
    available_shm_bytes = models.BigIntegerField(default=0)
    boot_id = models.CharField(max_length=64, blank=True)
    cordoned = models.BooleanField(default=False, help_text="No new instances here.")
    maintenance = models.BooleanField(default=False, help_text="Being emptied or worked on: nothing is restarted here.")
    note = models.CharField(max_length=255, blank=True)
    worker_seen_at = models.DateTimeField(null=True, blank=True)
    sampler_seen_at = models.DateTimeField(null=True, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ["name"]

    def __str__(self) -> str:
        return self.name

    @property
    def queue(self) -> str:
        return f"host.{self.name}"

    @property
    def reachable(self) -> bool:
        """Whether its worker or its sampler was heard of within the heartbeat limit."""
        seen = max((t for t in (self.worker_seen_at, self.sampler_seen_at) if t), default=None)
        return seen is not None and timezone.now() - seen < timedelta(seconds=settings.HOST_HEARTBEAT_LIMIT_S)


class Gpu(models.Model):
    """One GPU, known by its UUID; the index is for display only."""

    class State(models.TextChoices):
        OK = "ok"
        FAULTY = "faulty"
        MISSING = "missing"

    uuid = models.CharField(max_length=64, unique=True)
    host = models.ForeignKey(Host, on_delete=models.CASCADE, related_name="gpus")
    index = models.PositiveSmallIntegerField()
    name = models.CharField(max_length=128)
    total_bytes = models.BigIntegerField()
    state = models.CharField(max_length=16, choices=State.choices, default=State.OK)
    state_reason = models.CharField(max_length=500, blank=True)
    state_since = models.DateTimeField(default=timezone.now)
    grade = models.CharField(max_length=16, blank=True, help_text="How bad the fault is: passing, blind or fatal.")
    cordoned = models.BooleanField(default=False)
    cordon_reason = models.CharField(max_length=500, blank=True, help_text="The fault that closed it; empty: by hand.")
    seen_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["host__name", "index"]

    def __str__(self) -> str:
        return f"{self.host.name} GPU {self.index} {self.name}"


class GpuPolicy(models.Model):
    """What the controller may do on one GPU."""

    class Rebalance(models.TextChoices):
        OFF = "off"
        DRY_RUN = "dry_run", "dry run"
        ON = "on"

    gpu = models.OneToOneField(Gpu, on_delete=models.CASCADE, related_name="policy")
    reserve_bytes = models.BigIntegerField(default=0, help_text="Kept free for the next deploy; never handed out.")
    rebalance = models.CharField(max_length=8, choices=Rebalance.choices, default=Rebalance.ON)
    held_until = models.DateTimeField(null=True, blank=True, help_text="The controller changes nothing before.")
    held_by = models.CharField(max_length=150, blank=True)
    plan = models.JSONField(
        default=dict, blank=True, help_text="What the controller did or would do, at its last look."
    )
    planned_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=models.Q(reserve_bytes__gte=0), name="gpu_policy_reserve_not_negative")
        ]

    def __str__(self) -> str:
        return f"policy of {self.gpu_id}"


class GpuSample(models.Model):
    """A rolled-up reading: 10 s means kept for a day, 60 s means for 30 days. Seconds live in Redis."""

    gpu = models.ForeignKey(Gpu, on_delete=models.CASCADE, related_name="samples")
    at = models.DateTimeField()
    resolution_s = models.PositiveSmallIntegerField()
    used_bytes = models.BigIntegerField()
    utilization_percent = models.FloatField(null=True)
    temperature_c = models.FloatField(null=True)
    power_w = models.FloatField(null=True)
    instances = models.JSONField(default=list, help_text="[{id, name, baseline, used, prealloc, limit}], bytes")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["gpu", "resolution_s", "at"], name="one_sample_per_gpu_time")]
        ordering = ["at"]

    def __str__(self) -> str:
        return f"{self.gpu_id} {self.at:%H:%M:%S}"
