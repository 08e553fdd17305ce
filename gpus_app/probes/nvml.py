"""NVIDIA GPUs through NVML. Whatever goes wrong becomes a reading with a sentence; the probe itself never gives up.

Opened in the process that uses it (handles do not survive a fork). Memory is read with info version 2: version 1 counts
what the driver keeps for itself (615 MiB on an empty H200) as used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gpus_app.probes.base import GpuProcess, GpuReading
from gpus_app.probes.grades import Grade
from gpus_app.probes.xid import XidWatch

log = logging.getLogger(__name__)

#: Seconds between attempts to open NVML again after it failed as a whole.
REOPEN_S = 5.0
#: Seconds between looks for a card that does not answer.
LOOK_AGAIN_S = 2.0
#: What hardly changes is asked for this seldom.
SLOW_FACTS_S = 30.0


@dataclass(slots=True)
class _Card:
    """A GPU that was seen, with its handle while it answers."""

    uuid: str
    index: int
    name: str
    total_bytes: int
    handle: Any = None
    power_limit_w: float | None = None
    slow_at: float = field(default=float("-inf"))

    def failed(self, error: str, *, missing: bool = False, grade: Grade = Grade.BLIND) -> GpuReading:
        """``missing`` is fatal: what ran there is gone or will be."""
        grade = Grade.FATAL if missing else grade
        return GpuReading(self.uuid, self.index, self.name, self.total_bytes, error=error, missing=missing, grade=grade)


class NvmlProbe:
    """All GPUs that the driver lists, and those that it listed before.

    ``nvml`` is the ``pynvml`` module (tests give another). A card whose handle fails is looked for anew at each read,
    so it returns by itself; a changed device count makes the whole list be read again, since a GPU can fall off the
    bus without an XID line.
    """

    def __init__(self, nvml: Any = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        if nvml is None:
            import pynvml

            nvml = pynvml
        self._nvml = nvml
        self._clock = clock
        self._open = False
        self._open_at = float("-inf")
        self._why_closed = "NVML has not been opened yet."
        self._driver = ""
        self._count = -1
        self._cards: dict[str, _Card] = {}
        self._listed: set[str] = set()
        self._listed_at = float("-inf")
        self._xids = XidWatch(nvml, clock=clock)
        self._quiet: set[str] = set()

    @property
    def driver_version(self) -> str:
        return self._driver

    def close(self) -> None:
        self._xids.close()
        if self._open:
            self._open = False
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError as exc:
                log.debug("NVML did not close: %s", exc)

    def read(self) -> list[GpuReading]:
        if not self._ensure_open():
            return [card.failed(self._why_closed) for card in self._known()]
        try:
            count = int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as exc:
            self._give_up(exc)
            return [card.failed(self._why_closed) for card in self._known()]
        lost = any(card.handle is None for card in self._cards.values())
        if count != self._count or (lost and self._clock() - self._listed_at >= LOOK_AGAIN_S):
            self._enumerate(count)
        self._xids.poll()
        return [self._read(card) for card in self._known()]

    def _known(self) -> list[_Card]:
        return sorted(self._cards.values(), key=lambda card: (card.index, card.uuid))

    # -- opening and listing -------------------------------------------------------------------------------------------

    def _ensure_open(self) -> bool:
        if self._open:
            return True
        now = self._clock()
        if now - self._open_at < REOPEN_S:
            return False
        self._open_at = now
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as exc:
            self._why_closed = self._sentence(exc)
            return False
        self._open = True
        self._count = -1
        for card in self._cards.values():
            card.handle = None
        try:
            self._driver = _text(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError:
            self._driver = ""
        return True

    def _give_up(self, exc: Exception) -> None:
        """NVML failed as a whole: close it and open it again after a while."""
        self._why_closed = self._sentence(exc)
        log.warning("NVML failed: %s", self._why_closed)
        self.close()
        self._open_at = self._clock()

    def _enumerate(self, count: int) -> None:
        """Ask for every device anew; those of before that do not appear stay known, without a handle."""
        if count != self._count and self._count >= 0:
            log.warning("the driver lists %d GPUs, before it listed %d", count, self._count)
        self._count = count
        self._listed_at = self._clock()
        before, self._listed = self._listed, set()
        for index in range(count):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
                name = _text(self._nvml.nvmlDeviceGetName(handle))
                total = int(self._memory(handle).total)
            except self._nvml.NVMLError as exc:
                log.debug("GPU %d does not say who it is: %s", index, exc)
                continue
            self._listed.add(uuid)
            card = self._cards.setdefault(uuid, _Card(uuid, index, name, total))
            if uuid not in before:
                self._xids.forget(uuid)
            if card.handle is None:
                self._xids.watch(uuid, handle)
            card.index, card.name, card.total_bytes, card.handle = index, name, total, handle
        for uuid in self._cards.keys() - self._listed:
            self._cards[uuid].handle = None

    # -- one card ------------------------------------------------------------------------------------------------------

    def _read(self, card: _Card) -> GpuReading:
        if card.handle is None:
            return card.failed(
                f"The driver lists {self._count} GPUs and this one does not answer: it may have left the bus. "
                "Look for XID lines in the kernel's log; the machine may have to be restarted.",
                missing=True,
            )
        nvml = self._nvml
        try:
            memory = self._memory(card.handle)
            processes = self._processes(card.handle)
        except nvml.NVMLError as exc:
            card.handle = None
            lost = exc.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_NOT_FOUND)
            reset = exc.value == nvml.NVML_ERROR_RESET_REQUIRED
            return card.failed(self._sentence(exc), missing=lost, grade=Grade.FATAL if reset else Grade.BLIND)
        fault = self._xids.fault(card.uuid)
        if fault:
            return card.failed(fault[0], grade=fault[1])
        now = self._clock()
        if now - card.slow_at >= SLOW_FACTS_S:
            card.slow_at = now
            limit = self._maybe("nvmlDeviceGetEnforcedPowerLimit", card.handle)
            card.power_limit_w = limit / 1000 if limit is not None else None
        utilization = self._maybe("nvmlDeviceGetUtilizationRates", card.handle)
        power = self._maybe("nvmlDeviceGetPowerUsage", card.handle)
        degrees = self._maybe("nvmlDeviceGetTemperature", card.handle, getattr(nvml, "NVML_TEMPERATURE_GPU", 0))
        return GpuReading(
            uuid=card.uuid,
            index=card.index,
            name=card.name,
            total_bytes=int(memory.total),
            used_bytes=int(memory.used),
            free_bytes=int(memory.free),
            utilization_percent=float(utilization.gpu) if utilization is not None else None,
            temperature_c=float(degrees) if degrees is not None else None,
            power_w=power / 1000 if power is not None else None,
            power_limit_w=card.power_limit_w,
            processes=processes,
        )

    def _memory(self, handle: Any) -> Any:
        try:
            return self._nvml.nvmlDeviceGetMemoryInfo(handle, version=self._nvml.nvmlMemory_v2)
        except self._nvml.NVMLError as exc:
            if exc.value not in (self._nvml.NVML_ERROR_NOT_SUPPORTED, self._nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                raise
            return self._nvml.nvmlDeviceGetMemoryInfo(handle)  # a driver from before version 2

    def _processes(self, handle: Any) -> tuple[GpuProcess, ...]:
        """Compute and graphics processes with their bytes, each pid once. Names are looked up by whoever needs them."""
        found: dict[int, int | None] = {}
        for call in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses"):
            try:
                rows = getattr(self._nvml, call)(handle)
            except self._nvml.NVMLError as exc:
                if exc.value in (self._nvml.NVML_ERROR_GPU_IS_LOST, self._nvml.NVML_ERROR_UNKNOWN):
                    raise
                self._note_once(call, exc)
                continue
            except self._nvml.NVMLLibraryMismatchError as exc:  # no NVMLError: a driver older than these bindings
                self._note_once(call, exc)
                continue
            for row in rows:
                # One that computes and draws is in both lists, with the same bytes.
                found[row.pid] = max(found.get(row.pid) or 0, row.usedGpuMemory or 0) or row.usedGpuMemory
        return tuple(GpuProcess(pid, "", size) for pid, size in sorted(found.items()))

    def _maybe(self, call: str, *arguments: Any) -> Any:
        """A figure that some cards do not have; None then."""
        try:
            return getattr(self._nvml, call)(*arguments)
        except self._nvml.NVMLError as exc:
            self._note_once(call, exc)
            return None

    def _note_once(self, call: str, exc: Exception) -> None:
        if call not in self._quiet:
            self._quiet.add(call)
            log.info("%s is not to be had here: %s", call, exc)

    def _sentence(self, exc: Exception) -> str:
        """What NVML said, with what to do about it where that is known."""
        nvml, value = self._nvml, getattr(exc, "value", None)
        advice = {
            nvml.NVML_ERROR_GPU_IS_LOST: "The GPU has fallen off the bus; the machine has to be restarted.",
            nvml.NVML_ERROR_UNKNOWN: "In a container this mostly means that it has lost its devices (systemd was "
            "reloaded on the host): the container has to be made anew, restarting the engine does not help.",
            nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "The driver was updated under a running kernel module; the "
            "machine has to be restarted.",
            nvml.NVML_ERROR_DRIVER_NOT_LOADED: "The NVIDIA kernel module is not loaded.",
            nvml.NVML_ERROR_LIBRARY_NOT_FOUND: "There is no NVIDIA driver on this machine.",
            nvml.NVML_ERROR_RESET_REQUIRED: "The GPU asks for a reset.",
        }.get(value, "")
        return f"NVML: {str(exc).rstrip('.')}. {advice}".strip()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
