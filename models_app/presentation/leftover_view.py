"""Leftovers of earlier starts as the pages show them: whose they are, how old, and what they hold on which GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from models_app.services.lifecycle.leftovers import Orphan


@dataclass(slots=True)
class Leftover:
    """``bytes_by_gpu``: by UUID, what the newest reading counts to its processes; empty when no reading names them."""

    orphan: Orphan
    bytes_by_gpu: dict[str, int] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return self.orphan.served_model_name or self.orphan.name

    @property
    def since(self) -> datetime | None:
        at = self.orphan.started_at
        return None if at is None else datetime.fromtimestamp(at, UTC)

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_gpu.values())


@dataclass(frozen=True, slots=True)
class Holding:
    """A leftover on one GPU."""

    leftover: Leftover
    bytes: int


def leftovers_of(host_name: str, orphans: Iterable[Orphan], record: Mapping[str, Any] | None) -> list[Leftover]:
    """Those of one host, with the bytes of its newest record (None: no reading)."""
    found = [Leftover(one) for one in orphans if one.host == host_name]
    for gpu in record["gpus"] if record else ():
        for one in found:
            held = _held(one.orphan, gpu)
            if held:
                one.bytes_by_gpu[gpu["uuid"]] = held
    return found


def _held(orphan: Orphan, gpu: Mapping[str, Any]) -> int:
    """By the start in the segment's name while its run directory is there, else by the pids that the driver names."""
    mark = f"-i{orphan.instance_id}-a{orphan.attempt_id}"
    parts = [one.get("resident") or 0 for one in gpu.get("instances", ()) if str(one.get("ipc", "")).endswith(mark)]
    others = [one["bytes"] or 0 for one in gpu.get("other_processes", ()) if one["pid"] in orphan.pids]
    return sum(parts) + sum(others)


def unclaimed_bytes(reading: Mapping[str, Any], shown: Iterable[int]) -> int:
    """What the reading counts to instances that are not shown on this GPU: no row has them there."""
    known = set(shown)
    return sum(part.get("resident") or 0 for part in reading.get("instances", ()) if part["id"] not in known)
