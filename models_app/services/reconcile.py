"""Closing the gap between desired, recorded and real."""

from __future__ import annotations


def reconcile_host(host_name: str) -> None:
    """On a host worker: compare run directories (pid + start ticks) with rows; adopt, fail, end, or name orphans."""
    raise NotImplementedError


def reconcile_control() -> None:
    """On the control worker: heartbeats, lost hints, wanted replicas, due restarts, usage, pruning."""
    raise NotImplementedError
