"""The least harmful way to free bytes on one GPU."""

from __future__ import annotations

from collections.abc import Sequence

from gpus_app.policies.base import GpuView, Harm, InstanceView, Plan


def make_room(
    gpu: GpuView,
    instances: Sequence[InstanceView],
    need_bytes: int,
    now: float,
    *,
    priority: int = 50,
    minimum_residence_s: float = 60.0,
    max_harm: Harm = Harm.STOP_BUSY,
) -> Plan:
    """Steps after which ``need_bytes`` are free and stay free. ``priority`` is the newcomer's."""
    raise NotImplementedError


def trim_all(gpu: GpuView, instances: Sequence[InstanceView]) -> Plan:
    """Drop every cache and reserved page; limits stay."""
    raise NotImplementedError


def shrink_idle(gpu: GpuView, instances: Sequence[InstanceView], now: float) -> Plan:
    """Bring every idle instance down to its lowest limit."""
    raise NotImplementedError
