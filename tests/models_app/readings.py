"""Sample records for tests, as the sampler would leave them: what each instance holds is written down by the test."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest

from gpus_app import selectors
from gpus_app.models import Gpu, Host
from models_app.models import Instance
from tests.builders import GIB

BUNDLE = 117_440_512


def whole(size: int | float) -> int:
    """So many bytes in whole bundles."""
    return int(size) // BUNDLE * BUNDLE


class Readings:
    """The newest record of every host. ``part`` writes what one instance holds on each of its cards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts: dict[tuple[str, int], dict[str, Any]] = {}
        self.other: dict[str, int] = {}
        self.processes: dict[str, list[dict[str, Any]]] = {}
        self.leftover: dict[str, list[dict[str, Any]]] = {}
        self.error: dict[str, str] = {}
        self.age_s = 0.5
        monkeypatch.setattr(selectors, "latest_all", self.latest_all)

    def part(self, row: Instance, uuids: Iterable[str] | None = None, **fields: Any) -> None:
        """``used``, ``prealloc``, ``baseline``, ``limit``, ``running`` … ; what is left out stays as it was."""
        for uuid in uuids or row.gpu_uuids:
            part = self.parts.setdefault(
                (uuid, row.pk),
                {
                    "id": row.pk,
                    "name": row.model.served_model_name,
                    "ipc": row.ipc_name,
                    "baseline": 2 * GIB,
                    "used": 0,
                    "prealloc": 0,
                    "limit": row.effective_limit_bytes,
                    "running": 0,
                    "waiting": 0,
                    "gen_tokens": 0,
                    "state": "ok",
                },
            )
            part |= fields
            if "resident" not in fields:
                part["resident"] = part["baseline"] + (part["used"] or 0) + (part["prealloc"] or 0)

    def gone(self, row: Instance) -> None:
        for key in [key for key in self.parts if key[1] == row.pk]:
            del self.parts[key]

    def free(self, gpu: Gpu) -> int:
        held = sum(part["resident"] for (uuid, _), part in self.parts.items() if uuid == gpu.uuid)
        left = sum(part["resident"] for part in self.leftover.get(gpu.uuid, ()))
        return gpu.total_bytes - held - left - self.other.get(gpu.uuid, 0)

    def latest_all(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        hosts = Host.objects.all() if names is None else Host.objects.filter(name__in=list(names))
        return {host.name: self._record(host) for host in hosts}

    def _record(self, host: Host) -> dict[str, Any]:
        gpus = [
            {
                "uuid": gpu.uuid,
                "index": gpu.index,
                "name": gpu.name,
                "total": gpu.total_bytes,
                "used": gpu.total_bytes - self.free(gpu),
                "free": self.free(gpu),
                "error": self.error.get(gpu.uuid),
                "other": self.other.get(gpu.uuid, 0),
                "other_processes": self.processes.get(gpu.uuid, []),
                "instances": [
                    *self.leftover.get(gpu.uuid, []),
                    *(part for (uuid, _), part in self.parts.items() if uuid == gpu.uuid),
                ],
            }
            for gpu in host.gpus.all()
        ]
        now = time.time()
        return {"host": host.name, "t": now - self.age_s, "age_s": self.age_s, "source": "broker", "gpus": gpus}
