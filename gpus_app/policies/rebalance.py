"""Divide the KV memory of one GPU among its instances."""

from __future__ import annotations

from collections.abc import Sequence

from gpus_app.policies.base import GpuView, InstanceView, Plan


def rebalance(gpu: GpuView, instances: Sequence[InstanceView], now: float) -> Plan:
    """The limits that the rules ask for, as the steps that lead there."""
    raise NotImplementedError
