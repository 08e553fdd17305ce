"""Simulated cards as a probe: what NVML would say of the ledger of simulated GPU memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpus_app.probes.base import GpuProcess, GpuReading
from gpus_app.probes.grades import Grade, grade_of, sentence_of
from gpus_app.probes.sim_ledger import LIMIT_W, Ledger, Thermals

#: Name of the process that a card's ``foreign_bytes`` are said to belong to; pid 1 is nobody's engine.
FOREIGN_NAME = "simulated stranger"


class SimulatedProbe:
    """Reads ``SARDEENZ_SIM_DIR``. A card that was seen and is gone from the file stays as a reading with an error."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ledger = Ledger(folder)
        self._thermals = Thermals()
        self._known: dict[str, GpuReading] = {}

    @property
    def driver_version(self) -> str:
        return "simulated"

    def close(self) -> None:
        """Nothing is held open."""

    def read(self) -> list[GpuReading]:
        cards = self._ledger.gpus()
        try:
            holdings = self._ledger.read()
            busy = self._ledger.utilization()
        except OSError as exc:
            error = f"The ledger in {self._folder} cannot be read: {exc.strerror}."
            return [self._lost(known, error) for known in self._known.values()]
        readings = []
        for card in cards:
            identity = GpuReading(card.uuid, card.index, card.name, card.total_bytes)
            self._known[card.uuid] = identity
            error, grade = _fault(card.fault_now)
            if error:
                readings.append(self._lost(identity, error, missing=card.fault_now == "missing", grade=grade))
                continue
            processes = [GpuProcess(row.pid, row.name, row.bytes) for row in holdings.get(card.uuid, [])]
            if card.foreign_bytes > 0:
                processes.append(GpuProcess(1, FOREIGN_NAME, card.foreign_bytes))
            used = min(card.total_bytes, sum(process.bytes or 0 for process in processes))
            percent = busy.get(card.uuid, 0.0)
            degrees, watts = self._thermals.step(card.uuid, percent)
            readings.append(
                GpuReading(
                    uuid=card.uuid,
                    index=card.index,
                    name=card.name,
                    total_bytes=card.total_bytes,
                    used_bytes=used,
                    free_bytes=card.total_bytes - used,
                    utilization_percent=round(percent, 1),
                    temperature_c=degrees,
                    power_w=watts,
                    power_limit_w=LIMIT_W,
                    processes=tuple(processes),
                )
            )
        listed = {card.uuid for card in cards}
        gone = [known for uuid, known in self._known.items() if uuid not in listed]
        said = "The card is no longer listed."
        readings += [self._lost(known, said, missing=True, grade=Grade.FATAL) for known in gone]
        return sorted(readings, key=lambda reading: reading.index)

    @staticmethod
    def _lost(identity: GpuReading, error: str, *, missing: bool = False, grade: Grade = Grade.BLIND) -> GpuReading:
        return replace(identity, error=error, missing=missing, grade=grade)


def _fault(fault: str) -> tuple[str, Grade]:
    """Sentence and grade as NVML's probe would give them; an XID that is a program's own fault is none of the card."""
    if not fault:
        return "", Grade.NONE
    if fault == "missing":
        return "The card has left the bus.", Grade.FATAL
    if fault.startswith("xid:"):
        xid = int(fault[4:])
        return sentence_of(xid), grade_of(xid)
    return "NVML: Unknown Error.", Grade.BLIND
