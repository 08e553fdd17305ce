"""NVML as a module of plain values: cards can break, vanish and come back while a probe looks at them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1024**3


@dataclass
class FakeCard:
    """One card. ``errors`` maps the name of a call to the NVML error code that it raises."""

    uuid: str
    name: str = "NVIDIA H200"
    total: int = 141 * GIB
    used: int = 0
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    graphics: list[tuple[int, int | None]] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)


class FakeNvml:
    """Stands in for the ``pynvml`` module; what is not here comes from the real one (codes, error classes)."""

    def __init__(self, *cards: FakeCard) -> None:
        self.cards = list(cards)
        self.init_error: int | None = None
        self.count_error: int | None = None
        self.events: list[tuple[str, int]] = []
        self.calls: dict[str, int] = {}
        self.no_events = False

    def __getattr__(self, name: str) -> Any:
        return getattr(pynvml, name)

    def _check(self, name: str, card: FakeCard) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        code = card.errors.get(name, card.errors.get("*"))
        if code is not None:
            raise pynvml.NVMLError(code)

    def nvmlInit(self) -> None:
        self.calls["init"] = self.calls.get("init", 0) + 1
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)

    def nvmlShutdown(self) -> None:
        self.calls["shutdown"] = self.calls.get("shutdown", 0) + 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.04"

    def nvmlDeviceGetCount(self) -> int:
        if self.count_error is not None:
            raise pynvml.NVMLError(self.count_error)
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:
        self._check("handle", self.cards[index])
        return self.cards[index]

    def nvmlDeviceGetUUID(self, card: FakeCard) -> str:
        return card.uuid

    def nvmlDeviceGetName(self, card: FakeCard) -> bytes:
        return card.name.encode()

    def nvmlDeviceGetMemoryInfo(self, card: FakeCard, version: int | None = None) -> Any:
        self._check("memory_v2" if version else "memory_v1", card)
        return SimpleNamespace(total=card.total, used=card.used, free=card.total - card.used)

    def nvmlDeviceGetComputeRunningProcesses(self, card: FakeCard) -> list[Any]:
        self._check("processes", card)
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in card.processes]

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: FakeCard) -> list[Any]:
        self._check("graphics", card)
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in card.graphics]

    def nvmlDeviceGetUtilizationRates(self, card: FakeCard) -> Any:
        self._check("utilization", card)
        return SimpleNamespace(gpu=93, memory=10)

    def nvmlDeviceGetTemperature(self, card: FakeCard, sensor: int) -> int:
        self._check("temperature", card)
        return 61

    def nvmlDeviceGetPowerUsage(self, card: FakeCard) -> int:
        self._check("power", card)
        return 512_000

    def nvmlDeviceGetEnforcedPowerLimit(self, card: FakeCard) -> int:
        self._check("power_limit", card)
        return 700_000

    def nvmlEventSetCreate(self) -> object:
        if self.no_events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return object()

    def nvmlEventSetFree(self, events: object) -> None:
        pass

    def nvmlDeviceRegisterEvents(self, card: FakeCard, kinds: int, events: object) -> None:
        assert kinds == pynvml.nvmlEventTypeXidCriticalError

    def nvmlEventSetWait_v2(self, events: object, limit_ms: int) -> Any:
        assert limit_ms == 0, "a look must not wait"
        if not self.events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        uuid, xid = self.events.pop(0)
        return SimpleNamespace(device=next(c for c in self.cards if c.uuid == uuid), eventData=xid)
