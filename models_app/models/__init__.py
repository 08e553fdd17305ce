"""The tables of this app, one module a subject."""

from __future__ import annotations

from models_app.models.access import ApiKey, AuditEntry, IdempotencyRecord, UsageRecord, UsageSender
from models_app.models.instance import (
    COLOUR_SLOTS,
    Instance,
    InstanceEvent,
    InstanceQuerySet,
    LaunchAttempt,
    new_engine_token,
)
from models_app.models.model import (
    SERVED_NAME_RE,
    MemoryPolicy,
    MemoryProfile,
    Model,
    ModelAlias,
    Preset,
    served_name_validator,
)
from models_app.models.operation import Operation
from models_app.models.route import MAX_WEIGHT, RouteTarget, WeightedRoute

__all__ = [
    "COLOUR_SLOTS",
    "MAX_WEIGHT",
    "SERVED_NAME_RE",
    "ApiKey",
    "AuditEntry",
    "IdempotencyRecord",
    "Instance",
    "InstanceEvent",
    "InstanceQuerySet",
    "LaunchAttempt",
    "MemoryPolicy",
    "MemoryProfile",
    "Model",
    "ModelAlias",
    "Operation",
    "Preset",
    "RouteTarget",
    "UsageRecord",
    "UsageSender",
    "WeightedRoute",
    "new_engine_token",
    "served_name_validator",
]
