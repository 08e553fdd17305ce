"""What the REST door takes and gives. KV bytes are per GPU unless a name says total; times are ISO 8601 in UTC."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from ninja import Field, Schema
from pydantic import AfterValidator, ConfigDict, StrictBool, StrictFloat, StrictInt, StringConstraints

from models_app.models import Instance, LaunchAttempt, Model, Operation

MAX_ID = 2**63 - 1
MAX_BYTES = 2**53


def _no_nul(text: str) -> str:
    if "\x00" in text:
        raise ValueError("The character NUL is not allowed.")
    return text


Text = Annotated[str, AfterValidator(_no_nul)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=128), AfterValidator(_no_nul)]
Bytes = Annotated[int, Field(ge=0, le=MAX_BYTES)]
Seconds = Annotated[int, Field(ge=0, le=10**9)]


class Strict(Schema):
    """Input: an unknown field is an error, never dropped."""

    model_config = ConfigDict(extra="forbid")


class Empty(Strict):
    """An empty JSON object."""


class MemoryPolicyIO(Strict):
    guarantee_bytes: Bytes = 0
    maximum_bytes: Bytes | None = None
    priority: Annotated[int, Field(ge=0, le=100)] = 50
    idle_shrink_after_s: Seconds | None = None
    reclaim: Literal["wait", "preempt", "abort"] = "wait"


class ModelFields(Strict):
    aliases: list[Name] | None = None
    hf_revision: Text | None = None
    max_model_len: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    dtype: Text | None = None
    quantization: Text | None = None
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] | None = None
    enforce_eager: StrictBool | None = None
    enable_sleep_mode: StrictBool | None = None
    enable_prefix_caching: StrictBool | None = None
    kvcached: StrictBool | None = None
    kv_layout: Literal["default", "contiguous", "non_contiguous"] | None = None
    extra_args: Text | None = None
    load_format: Text | None = None
    replicas: Annotated[int, Field(ge=1, le=64)] | None = None
    host: Text | None = None
    gpu_uuids: list[Text] | None = None
    initial_limit_bytes: Bytes | None = None
    restart_policy: Literal["always", "on_failure", "never"] | None = None
    on_demand: StrictBool | None = None
    pinned: StrictBool | None = None
    idle_sleep_after_s: Seconds | None = None
    sleep_level: Literal[1, 2] | None = None
    request_defaults: dict[str, Any] | None = None
    alias_defaults: dict[str, dict[str, Any]] | None = Field(
        None, description="Per alias: options of requests that have none; they come before the model's own."
    )
    fallback: Text | None = None
    prefix_affinity: StrictBool | None = Field(
        None, description="Prompts that begin alike go to the same replica, which has them cached."
    )
    first_byte_limit_s: Annotated[int, Field(ge=1, le=86_400)] | None = Field(
        None, description="How long an answer may take to begin; null: the router's own limits."
    )
    idle_limit_s: Annotated[int, Field(ge=1, le=86_400)] | None = Field(
        None, description="Longest silence within an answer; null: the router's own limit."
    )
    max_concurrency: Annotated[int, Field(ge=1, le=100_000)] | None = None
    memory_policy: MemoryPolicyIO | None = None


class ModelIn(ModelFields):
    served_model_name: Name
    source: Literal["catalogue", "huggingface", "local"]
    model: Annotated[str, StringConstraints(min_length=1, max_length=1024), AfterValidator(_no_nul)]


class ModelPatch(ModelFields):
    expected_revision: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None


class ModelOut(Schema):
    served_model_name: str
    aliases: list[str]
    source: str
    model: str
    hf_revision: str
    max_model_len: int | None
    dtype: str
    quantization: str
    tensor_parallel_size: int
    enforce_eager: bool
    enable_sleep_mode: bool
    enable_prefix_caching: bool
    kvcached: bool
    kv_layout: str
    extra_args: str
    load_format: str
    replicas: int
    host: str | None
    gpu_uuids: list[str]
    initial_limit_bytes: int | None
    restart_policy: str
    on_demand: bool
    pinned: bool
    idle_sleep_after_s: int | None
    sleep_level: int
    request_defaults: dict[str, Any]
    alias_defaults: dict[str, dict[str, Any]]
    fallback: str | None
    prefix_affinity: bool
    first_byte_limit_s: int | None
    idle_limit_s: int | None
    max_concurrency: int | None
    memory_policy: MemoryPolicyIO
    spec_revision: int
    facts: dict[str, Any]
    deployed: bool
    instances: list[int]
    created_by: str
    created_at: datetime
    updated_at: datetime

    @staticmethod
    def resolve_aliases(obj: Model) -> list[str]:
        return [alias.name for alias in obj.aliases.all()]

    @staticmethod
    def resolve_host(obj: Model) -> str | None:
        return obj.host.name if obj.host else None

    @staticmethod
    def resolve_fallback(obj: Model) -> str | None:
        return obj.fallback.served_model_name if obj.fallback else None

    @staticmethod
    def resolve_instances(obj: Model) -> list[int]:
        return [instance.pk for instance in obj.instances.all() if instance.is_live]

    @staticmethod
    def resolve_memory_policy(obj: Model) -> MemoryPolicyIO:
        policy = getattr(obj, "memory_policy", None)
        if policy is None:
            return MemoryPolicyIO()
        return MemoryPolicyIO(**{name: getattr(policy, name) for name in MemoryPolicyIO.model_fields})


class LimitState(Schema):
    """Asked, in force, and what the engine said; bytes per GPU."""

    limit_bytes: int | None
    effective_limit_bytes: int | None
    automatic: bool = Field(description="The controller may move it; False: set by hand.")
    status: str
    message: str
    revision: int
    acknowledged_revision: int
    set_by: str
    set_at: datetime | None
    capacity_bytes: int | None
    bundle_bytes: int | None
    hard_minimum_bytes: int | None
    safety_floor_bytes: int | None
    full_context_floor_bytes: int | None
    provider: str

    @classmethod
    def of(cls, instance: Instance) -> LimitState:
        return cls(
            limit_bytes=instance.limit_bytes,
            effective_limit_bytes=instance.effective_limit_bytes,
            automatic=instance.limit_automatic,
            status=instance.limit_status,
            message=instance.limit_message,
            revision=instance.limit_revision,
            acknowledged_revision=instance.limit_acked_revision,
            set_by=instance.limit_set_by,
            set_at=instance.limit_set_at,
            capacity_bytes=instance.capacity_bytes,
            bundle_bytes=instance.bundle_bytes,
            hard_minimum_bytes=instance.hard_minimum_bytes,
            safety_floor_bytes=instance.safety_floor_bytes,
            full_context_floor_bytes=instance.full_context_floor_bytes,
            provider=instance.provider,
        )


class InstanceOut(Schema):
    id: int
    model: str
    replica_index: int
    state: Literal[
        "pending", "scheduled", "starting", "ready", "unreachable",
        "draining", "sleeping", "stopping", "stopped", "failed",
    ]  # fmt: skip
    desired_state: Literal["running", "sleeping", "stopped"]
    state_since: datetime
    reason: str
    stage: str
    stage_progress: float | None
    health: str
    health_reason: str
    host: str | None
    gpu_uuids: list[str]
    port: int | None
    reserved_bytes: int
    spec_revision: int
    saved_revision: int
    sleep_level: int | None
    limit: LimitState
    restart_count: int
    next_restart_at: datetime | None
    first_cause: str
    last_cause: str
    created_by: str
    created_at: datetime
    ready_at: datetime | None
    ended_at: datetime | None

    @staticmethod
    def resolve_model(obj: Instance) -> str:
        return obj.model.served_model_name

    @staticmethod
    def resolve_last_cause(obj: Instance) -> str:
        return obj.attempt.cause if obj.attempt else ""

    @staticmethod
    def resolve_host(obj: Instance) -> str | None:
        return obj.host.name if obj.host else None

    @staticmethod
    def resolve_saved_revision(obj: Instance) -> int:
        return obj.model.spec_revision

    @staticmethod
    def resolve_limit(obj: Instance) -> LimitState:
        return LimitState.of(obj)


class LaunchIn(Strict):
    replicas: Annotated[int, Field(ge=1, le=64)] | None = None
    host: Text | None = None
    gpu_uuids: list[Text] | None = None
    anyway: StrictBool = Field(False, description="Launch although the estimate says that it does not fit.")


class LaunchOut(InstanceOut):
    """The first instance, with all of this launch under ``instances``."""

    instances: list[InstanceOut] = []


class StopIn(Strict):
    force: StrictBool = Field(False, description="End at once, without draining.")


class SleepIn(Strict):
    level: Literal[1, 2] | None = None


class LimitIn(Strict):
    """Exactly one of ``size`` (bytes or text such as ``3G``) and ``percent`` (of the instance's own GPU)."""

    size: StrictInt | StrictFloat | Text | None = Field(
        None, description="Bytes, or text such as '3G' or '512MiB' (powers of 1024)."
    )
    percent: StrictInt | StrictFloat | None = Field(
        None, description="0 < percent <= 100, of the memory of the instance's own GPU."
    )
    force: StrictBool = Field(False, description="Go below the safety floor (never below the hard minimum).")
    reclaim: Literal["wait", "preempt", "abort"] | None = None
    expected_revision: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None


class LimitOut(Schema):
    """``status`` is applied, deferred, pending or starved; ``overage_bytes`` is what still has to shrink."""

    status: str
    message: str
    revision: int
    requested_bytes: int | None
    limit_bytes: int | None
    effective_limit_bytes: int | None
    used_bytes: int | None
    prealloc_bytes: int | None
    freed_bytes: int | None
    overage_bytes: int | None
    capacity_bytes: int | None
    bundle_bytes: int | None
    hard_minimum_bytes: int | None
    safety_floor_bytes: int | None
    full_context_floor_bytes: int | None
    clamped: bool
    warnings: list[str]
    preempted: dict[str, Any] | None
    set_by: str
    set_at: datetime | None


class TrimOut(Schema):
    status: str
    message: str
    freed_bytes: int | None
    used_bytes: int | None
    prealloc_bytes: int | None
    limit_bytes: int | None


class SafetyFloorOut(Schema):
    """``source`` is engine, or estimate while the engine has not said."""

    hard_minimum_bytes: int | None
    safety_floor_bytes: int | None
    full_context_floor_bytes: int | None
    bundle_bytes: int | None
    capacity_bytes: int | None
    source: str


class EventOut(Schema):
    at: datetime
    kind: str
    from_state: str
    to_state: str
    reason: str
    actor: str
    facts: dict[str, Any]


class AttemptOut(Schema):
    number: int
    started_at: datetime
    ready_at: datetime | None
    ended_at: datetime | None
    exit_code: int | None
    signal: int | None
    cause_code: str
    cause: str
    advice: str
    argv: list[str]
    memory: dict[str, Any]

    @staticmethod
    def resolve_argv(obj: LaunchAttempt) -> list[str]:
        return [str(part) for part in obj.argv]


class ProposalOut(Schema):
    """``kind``: room, context or limit. ``changes``: options that are saved when it is taken."""

    kind: str
    title: str
    why: str
    changes: dict[str, Any]
    page: str


class LogOut(Schema):
    lines: list[str]
    attempt: int | None
    truncated: bool


class CommandOut(Schema):
    argv: list[str] = Field(description="Exact command line; secrets are masked.")
    text: str


class OperationOut(Schema):
    id: int
    kind: str
    title: str
    state: str
    phase: str
    progress: float | None
    message: str
    steps: list[Any]
    model: str | None
    instance: int | None
    created_by: str
    created_at: datetime
    ended_at: datetime | None

    @staticmethod
    def resolve_model(obj: Operation) -> str | None:
        return obj.model.served_model_name if obj.model else None

    @staticmethod
    def resolve_instance(obj: Operation) -> int | None:
        return obj.instance_id


class AuditOut(Schema):
    at: datetime
    actor: str
    action: str
    target: str
    outcome: str
    detail: str
