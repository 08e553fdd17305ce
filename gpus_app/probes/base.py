"""What a probe answers: one reading per GPU; what could not be read is a reading with ``error``, never an exception."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gpus_app.probes.grades import Grade


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with memory on a GPU. ``bytes`` is None where the driver does not tell (WSL, some containers)."""

    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU at one moment, from the driver. Bytes exclude what the driver reserves for itself (NVML memory info v2).

    With ``error`` set the other figures are the last known identity and zeros. ``missing``: the driver no longer lists
    it, or says that it has left the bus. ``grade``: what follows from the error.
    """

    uuid: str
    index: int
    name: str
    total_bytes: int
    used_bytes: int = 0
    free_bytes: int = 0
    utilization_percent: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    processes: tuple[GpuProcess, ...] = ()
    error: str | None = None
    missing: bool = False
    grade: Grade = Grade.NONE


class Probe(Protocol):
    """Reads every GPU of this machine. Opened in the process and thread that use it; never raises from ``read``."""

    @property
    def driver_version(self) -> str: ...

    def read(self) -> list[GpuReading]: ...

    def close(self) -> None: ...
