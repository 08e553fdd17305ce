"""Host memory of sleepers: at level 1 their weights stay in it, counted for each host and capped.

The cap is SLEEP_RAM_BYTES, or half of the host's memory. Simulated engines keep nothing there, so a simulated host has
a cap only when one is set. A sleep is counted from the moment at which it is decided.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.db.models import Q

from gpus_app.models import Host
from gpus_app.policies.base import gib
from models_app.models import Instance
from models_app.states import DesiredState, InstanceState

S = InstanceState
_LEVEL = 1
#: Left to the host's programs when weights move into its memory.
_KEEP_FREE_BYTES = 1024**3


@dataclass(frozen=True)
class SleepRam:
    """``cap_bytes`` None: no cap. ``available_bytes`` is what the host said last."""

    host: str
    held_bytes: int
    cap_bytes: int | None
    total_bytes: int
    available_bytes: int
    sleepers: int


def weights_bytes(row: Instance) -> int:
    """Bytes of host memory that a sleep of level 1 takes, over all its GPUs: its weights."""
    facts: dict[str, Any] = row.model.facts or {}
    memory: dict[str, Any] = row.attempt.memory if row.attempt else {}
    measured = int(memory.get("weights_bytes") or 0) * row.model.tensor_parallel_size
    return measured or int(facts.get("weights_bytes") or 0)


def cap_bytes(host: Host) -> int | None:
    if settings.SLEEP_RAM_BYTES:
        return int(settings.SLEEP_RAM_BYTES)
    if host.engine_kind == Host.EngineKind.SIMULATED or not host.total_ram_bytes:
        return None
    return host.total_ram_bytes // 2


def sleep_ram(hosts: Iterable[Host]) -> dict[str, SleepRam]:
    """What sleepers hold of each host's memory, by the host's name. One query."""
    held: dict[int, list[int]] = {}
    for row in _sleepers().filter(host__in=list(hosts)):
        held.setdefault(row.host_id or 0, []).append(weights_bytes(row))
    return {
        host.name: SleepRam(
            host=host.name,
            held_bytes=sum(held.get(host.pk, ())),
            cap_bytes=cap_bytes(host),
            total_bytes=host.total_ram_bytes,
            available_bytes=host.available_ram_bytes,
            sleepers=len(held.get(host.pk, ())),
        )
        for host in hosts
    }


def _sleepers() -> Any:
    """Those that sleep at level 1, or are about to."""
    asleep = Q(state__in=(S.SLEEPING, S.UNREACHABLE), sleep_level=_LEVEL)
    falling = Q(state=S.DRAINING, desired_state=DesiredState.SLEEPING, sleep_level=_LEVEL)
    return Instance.objects.filter(asleep | falling).select_related("model", "attempt")


def ram_refusal(row: Instance, level: int) -> str:
    """Empty when the host has the memory for this sleep; else a sentence with the numbers and the way out."""
    if level != _LEVEL or row.host is None:
        return ""
    now, need = sleep_ram([row.host])[row.host.name], weights_bytes(row)
    way_out = "Use level 2, which drops the weights, or wake or stop a sleeper."
    if now.cap_bytes is not None and now.held_bytes + need > now.cap_bytes:
        return (
            f"Host {now.host} keeps {gib(now.held_bytes)} of at most {gib(now.cap_bytes)} for sleepers "
            f"(SARDEENZ_SLEEP_RAM_BYTES), and these weights take {gib(need)} more. {way_out}"
        )
    real = row.host.engine_kind != Host.EngineKind.SIMULATED
    if real and now.available_bytes and need > now.available_bytes - _KEEP_FREE_BYTES:
        return (
            f"Host {now.host} has {gib(now.available_bytes)} of memory free, these weights take {gib(need)}. {way_out}"
        )
    return ""
