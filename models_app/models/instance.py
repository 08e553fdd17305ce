"""What runs: instances, their starts and their history.

``Instance.state`` is written by ``transitions.move`` alone. Everything else that an operator wants is written by the
services; everything that was observed is written by the host worker through ``transitions.report``.
"""

from __future__ import annotations

import secrets
from collections import Counter
from typing import Any

from django.db import models
from django.utils import timezone

from gpus_app.models import Host
from models_app.models.model import Model
from models_app.states import LIVE, ROUTABLE, DesiredState, InstanceState, LimitStatus, Stage


def new_engine_token() -> str:
    """The secret with which our processes, and nobody else, speak to one engine."""
    return secrets.token_urlsafe(32)


#: Eight hues in four patterns: as many instances can be told apart in one picture.
COLOUR_SLOTS = 32


def free_colour_slot() -> int:
    """The colour that the fewest live instances wear, lowest first: two on one GPU look alike only beyond 32."""
    taken = Counter(Instance.objects.live().values_list("colour_slot", flat=True))
    return min(range(COLOUR_SLOTS), key=lambda slot: (taken[slot], slot))


class InstanceQuerySet(models.QuerySet["Instance"]):
    def live(self) -> InstanceQuerySet:
        return self.filter(state__in=LIVE)

    def on_gpu(self, uuid: str) -> InstanceQuerySet:
        """Live instances on one GPU. JSON containment is not portable, so the few live rows are filtered here."""
        ids = [pk for pk, uuids in self.live().values_list("pk", "gpu_uuids") if uuid in uuids]
        return self.filter(pk__in=ids)


class Instance(models.Model):
    """One engine process group on one host; a replica when several serve one model."""

    model = models.ForeignKey(Model, on_delete=models.CASCADE, related_name="instances")
    replica_index = models.PositiveSmallIntegerField(default=0)
    desired_state = models.CharField(
        max_length=16, choices=[(s.value, s.value) for s in DesiredState], default=DesiredState.RUNNING
    )
    state = models.CharField(
        max_length=16, choices=[(s.value, s.value) for s in InstanceState], default=InstanceState.PENDING
    )
    state_version = models.PositiveIntegerField(default=0)
    state_since = models.DateTimeField(default=timezone.now)
    reason = models.CharField(max_length=1000, blank=True, help_text="Why it is in this state, for people.")
    stage = models.CharField(max_length=32, default=Stage.QUEUED)
    stage_progress = models.FloatField(null=True, blank=True, help_text="0 to 1 within the stage, when known.")

    host = models.ForeignKey(Host, null=True, blank=True, on_delete=models.PROTECT, related_name="instances")
    gpu_uuids = models.JSONField(default=list, blank=True)
    placement_wish = models.JSONField(
        default=dict, blank=True, help_text="Of the launch: host, gpu_uuids, anyway. Empty: what the model says."
    )
    port = models.PositiveIntegerField(null=True, blank=True)
    ipc_name = models.CharField(max_length=64, blank=True)
    engine_token = models.CharField(max_length=64, default=new_engine_token, editable=False)
    reserved_bytes = models.BigIntegerField(default=0, help_text="Promised per GPU before and while it runs.")
    spec_revision = models.PositiveIntegerField(default=0, help_text="Revision of the model's options that it runs.")
    attempt = models.ForeignKey(
        "LaunchAttempt", null=True, blank=True, on_delete=models.SET_NULL, related_name="+", editable=False
    )
    replaces = models.ForeignKey(
        "self",
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        related_name="replaced_by",
        help_text="The older instance that this one takes over from (move, edit).",
    )

    # KV memory, bytes per GPU. limit_* is wanted; the rest was told by the engine or read from its segment.
    limit_bytes = models.BigIntegerField(null=True, blank=True)
    limit_automatic = models.BooleanField(default=True, help_text="The controller may move it; False: set by hand.")
    limit_revision = models.PositiveIntegerField(default=0)
    limit_set_by = models.CharField(max_length=150, blank=True)
    limit_set_at = models.DateTimeField(null=True, blank=True)
    limit_reclaim = models.CharField(max_length=8, blank=True)
    limit_force = models.BooleanField(default=False)
    limit_acked_revision = models.PositiveIntegerField(default=0)
    limit_status = models.CharField(
        max_length=16, blank=True, choices=[(s.value, s.value) for s in LimitStatus], default=LimitStatus.NONE
    )
    limit_message = models.CharField(max_length=1000, blank=True)
    limit_answer = models.JSONField(default=dict, blank=True, help_text="The engine's last answer to a limit or trim.")
    effective_limit_bytes = models.BigIntegerField(null=True, blank=True)
    awake_limit_bytes = models.BigIntegerField(
        null=True, blank=True, help_text="While its idle rule keeps it small: what it is given as soon as it works."
    )
    capacity_bytes = models.BigIntegerField(null=True, blank=True)
    bundle_bytes = models.BigIntegerField(null=True, blank=True)
    hard_minimum_bytes = models.BigIntegerField(null=True, blank=True)
    safety_floor_bytes = models.BigIntegerField(null=True, blank=True)
    full_context_floor_bytes = models.BigIntegerField(null=True, blank=True)
    provider = models.CharField(max_length=8, blank=True, help_text="Who answers /kvcache: addon, pr324, shm, none.")

    sleep_level = models.PositiveSmallIntegerField(null=True, blank=True)
    stop_force = models.BooleanField(default=False, help_text="End it now: no drain, requests in flight are cut.")
    health = models.CharField(max_length=16, default="unknown", help_text="unknown, ok, busy, hung, stuck")
    health_reason = models.CharField(max_length=500, blank=True)
    health_facts = models.JSONField(default=dict, blank=True, editable=False, help_text="What the last check saw.")
    memory_growth = models.JSONField(
        default=dict, blank=True, editable=False, help_text="Growth without load: attempt, since, bytes_per_hour …"
    )
    last_progress_at = models.DateTimeField(null=True, blank=True)
    restart_count = models.PositiveIntegerField(default=0)
    next_restart_at = models.DateTimeField(null=True, blank=True)
    first_cause = models.CharField(max_length=1000, blank=True)
    colour_slot = models.PositiveSmallIntegerField(
        null=True, blank=True, editable=False, help_text="Colour and pattern in every picture; fixed for its life."
    )
    created_by = models.CharField(max_length=150, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    ready_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    objects = InstanceQuerySet.as_manager()

    class Meta:
        ordering = ["model__served_model_name", "replica_index", "pk"]
        constraints = [
            models.CheckConstraint(
                condition=models.Q(state__in=[s.value for s in InstanceState]), name="instance_state_is_legal"
            ),
            models.UniqueConstraint(
                fields=["model", "replica_index"],
                condition=models.Q(state__in=[s.value for s in sorted(LIVE)], replaces=None),
                name="one_live_instance_per_replica",
            ),
            models.UniqueConstraint(
                fields=["host", "port"],
                condition=models.Q(state__in=[s.value for s in sorted(LIVE)]) & ~models.Q(port=None),
                name="one_live_instance_per_port",
            ),
        ]
        indexes = [models.Index(fields=["state"]), models.Index(fields=["host", "state"])]

    def __str__(self) -> str:
        return f"{self.model.served_model_name}#{self.replica_index} ({self.pk})"

    def save(self, *args: Any, **kwargs: Any) -> None:
        if self._state.adding and self.colour_slot is None:
            self.colour_slot = free_colour_slot()
        super().save(*args, **kwargs)

    @property
    def is_live(self) -> bool:
        return self.state in LIVE

    @property
    def is_routable(self) -> bool:
        return self.state in ROUTABLE

    @property
    def base_url(self) -> str | None:
        return f"http://{self.host.address}:{self.port}" if self.host and self.port else None


class LaunchAttempt(models.Model):
    """One start of an instance, with how it ended. Its run directory holds the log and the guardian's record."""

    instance = models.ForeignKey(Instance, on_delete=models.CASCADE, related_name="attempts")
    number = models.PositiveIntegerField()
    host = models.ForeignKey(Host, on_delete=models.PROTECT, related_name="+")
    run_dir = models.CharField(max_length=1024)
    boot_id = models.CharField(max_length=64, blank=True, help_text="Of the host: another one means that it rebooted.")
    spec = models.JSONField(default=dict, help_text="The engine options of this start.")
    argv = models.JSONField(default=list, help_text="Exact command line, secrets masked.")
    guardian_pid = models.PositiveIntegerField(null=True)
    guardian_start_ticks = models.BigIntegerField(null=True)
    engine_pid = models.PositiveIntegerField(null=True)
    engine_start_ticks = models.BigIntegerField(null=True)
    started_at = models.DateTimeField(auto_now_add=True)
    exec_at = models.DateTimeField(null=True)
    load_started_at = models.DateTimeField(
        null=True, help_text="End of the download: the start limit counts from here."
    )
    ready_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)
    exit_code = models.IntegerField(null=True)
    signal = models.PositiveSmallIntegerField(null=True)
    cause_code = models.CharField(max_length=64, blank=True)
    cause = models.CharField(max_length=1000, blank=True)
    advice = models.CharField(max_length=1000, blank=True)
    log_tail = models.TextField(blank=True)
    memory = models.JSONField(default=dict, help_text="Weights, graphs, baseline … in bytes, from the log and NVML.")

    class Meta:
        ordering = ["-started_at"]
        constraints = [models.UniqueConstraint(fields=["instance", "number"], name="attempts_are_numbered")]

    def __str__(self) -> str:
        return f"start {self.number} of instance {self.instance_id}"


class InstanceEvent(models.Model):
    """Something that happened to an instance, or was decided about it: who, why, with which numbers."""

    instance = models.ForeignKey(Instance, on_delete=models.CASCADE, related_name="events")
    at = models.DateTimeField(default=timezone.now)
    kind = models.CharField(max_length=32, help_text="state, limit, trim, drift, health, plan, sleep, move …")
    from_state = models.CharField(max_length=16, blank=True)
    to_state = models.CharField(max_length=16, blank=True)
    reason = models.CharField(max_length=1000, blank=True)
    actor = models.CharField(max_length=150, blank=True)
    facts = models.JSONField(default=dict, blank=True)

    class Meta:
        ordering = ["-at", "-pk"]
        indexes = [models.Index(fields=["instance", "-at"])]

    def __str__(self) -> str:
        return f"{self.kind} {self.to_state} {self.reason}"
