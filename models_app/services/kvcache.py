"""KV limits: say what is wanted (bytes + rising revision), let the host worker tell the engine, store its answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from models_app.models import Instance


@dataclass(frozen=True)
class LimitAnswer:
    """What is wanted and what the engine said of it. Bytes are per GPU."""

    instance_id: int
    status: str  # LimitStatus: applied, deferred, pending, starved, stale, conflict, rejected, unavailable
    message: str
    revision: int
    requested_bytes: int | None
    limit_bytes: int | None
    effective_limit_bytes: int | None
    used_bytes: int | None = None
    prealloc_bytes: int | None = None
    freed_bytes: int | None = None
    overage_bytes: int | None = None
    capacity_bytes: int | None = None
    bundle_bytes: int | None = None
    hard_minimum_bytes: int | None = None
    safety_floor_bytes: int | None = None
    full_context_floor_bytes: int | None = None
    clamped: bool = False
    warnings: list[str] = field(default_factory=list)
    preempted: dict[str, Any] | None = None
    set_by: str = ""
    set_at: datetime | None = None
    wire: dict[str, Any] = field(default_factory=dict)  # the engine's whole answer


@dataclass(frozen=True)
class SafetyFloor:
    """The lowest sensible limits of one instance, bytes per GPU; None where the engine has not said."""

    safety_floor_bytes: int | None
    hard_minimum_bytes: int | None
    full_context_floor_bytes: int | None
    bundle_bytes: int | None
    capacity_bytes: int | None
    source: str  # "engine", or "estimate" from the model's architecture


def parse_size(size: str | int | float) -> int:
    """Bytes of ``3G``, ``512MiB``, ``1.5 GiB``, ``1073741824``; units are powers of 1024. Raises InvalidInput."""
    raise NotImplementedError


def parse_percent(size: str | int | float) -> float | None:
    """``"40%"`` → 40.0; None when the text has no percent sign. Raises InvalidInput outside (0, 100]."""
    raise NotImplementedError


def kvcache_limit_set(
    instance: Instance,
    *,
    size: str | int | float,
    actor: str,
    force: bool = False,
    reclaim: str | None = None,
    wait_s: float = 12.0,
) -> LimitAnswer:
    """Set the KV limit (bytes, ``3G``, ``40%`` of the own GPU) and wait up to ``wait_s`` for the engine's answer.

    While the instance starts or sleeps, the limit is kept (status pending) and applied as soon as it can be.
    Raises InvalidInput, BelowFloor (without ``force``), Conflict (no longer live), BrokerAway before anything is written.
    """
    raise NotImplementedError


def kvcache_limit_percent_set(
    instance: Instance,
    *,
    percent: float,
    actor: str,
    force: bool = False,
    reclaim: str | None = None,
    wait_s: float = 12.0,
) -> LimitAnswer:
    """The same, in percent of the total memory of its own GPU (of the smallest, when it has several)."""
    raise NotImplementedError


def kvcache_trim(instance: Instance, *, actor: str, wait_s: float = 12.0) -> LimitAnswer:
    """Give idle KV memory back without changing the limit; ``freed_bytes`` is measured."""
    raise NotImplementedError


def kvcache_safety_floor(instance: Instance) -> SafetyFloor:
    """Floors as the engine told them, or an estimate from the architecture while it has not."""
    raise NotImplementedError


def limit_apply(instance_id: int, chain: str = "") -> bool:
    """Tell the engine the wanted limit and store its answer. True: still shrinking, look again. Host worker."""
    raise NotImplementedError


def trim_apply(instance_id: int, request_id: str = "", actor: str = "system") -> None:
    """Have the engine trim and store its answer under ``request_id``. Host worker."""
    raise NotImplementedError
