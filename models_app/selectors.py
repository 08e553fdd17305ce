"""Shared reads. Each costs a fixed number of queries, however many rows there are."""

from __future__ import annotations

from typing import Any

from models_app.models import Instance, InstanceQuerySet, LaunchAttempt


def instances_for_dashboard() -> InstanceQuerySet:
    """Live and failed instances with model, host and attempt: one query."""
    raise NotImplementedError


def routes_snapshot() -> dict[str, Any]:
    """What the router needs: names, ready instances with their tokens, keys by digest."""
    raise NotImplementedError


def instance_log(instance: Instance, lines: int = 500, attempt: LaunchAttempt | None = None) -> list[str]:
    """The last ``lines`` lines of an attempt's log (default: the newest attempt), also after its end."""
    raise NotImplementedError
