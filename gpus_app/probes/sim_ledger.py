"""The shared book of simulated GPU memory: which process holds how many bytes of which simulated card.

One folder per host (``SARDEENZ_SIM_DIR``):

``gpus.json``
    the cards: ``[{"uuid", "index", "name", "total_bytes"}]``; an entry may also carry ``"fault"``
    (``missing``, ``nvml_error``, ``xid:79``), ``"fault_at"`` (epoch seconds from which on it holds) and
    ``"foreign_bytes"`` (memory of a process that is none of ours).
``ledger.lock``
    ``flock`` for writers; readers need none, since every file is replaced as a whole.
``alloc/<pid>-<start_ticks>.json``
    what one process holds: ``{"pid", "start_ticks", "name", "bytes": {uuid: n}, "util": {uuid: percent}}``.

As on a real card, memory belongs to a process: when the process is gone (or a zombie), so is its claim, without
anyone tidying up. A pid counts only together with its start ticks, because pids are used again.

Plain Python, standard library only: the simulated engine and the sampler both read this.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import uuid as uuid_module
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

GIB = 1024**3
MODE_FILE = 0o644
#: Power of an idle and of a busy card, and temperatures: an H100 SXM at rest and under full load, roughly.
IDLE_W, LIMIT_W = 72.0, 700.0
IDLE_C, BUSY_C = 31.0, 71.0
#: Seconds in which a card's temperature covers 63 % of the way to where its load will bring it.
THERMAL_TIME_S = 25.0


class Holding(NamedTuple):
    """Memory of one process on one card. ``name`` is what NVML would call it, ``VLLM::EngineCore``."""

    pid: int
    start_ticks: int
    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class SimGpu:
    """One simulated card, as ``gpus.json`` describes it."""

    uuid: str
    index: int
    name: str
    total_bytes: int
    fault: str = ""
    fault_at: float = 0.0
    foreign_bytes: int = 0

    @property
    def fault_now(self) -> str:
        """The fault, once its time has come."""
        return self.fault if time.time() >= self.fault_at else ""


@dataclass(slots=True)
class _Allocation:
    """One ``alloc`` file in memory, with the stamp of the version that was read."""

    pid: int
    start_ticks: int
    name: str
    bytes: dict[str, int]
    util: dict[str, float]
    stamp: tuple[int, int] = (0, 0)


def start_ticks(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot (field 22 of ``/proc/<pid>/stat``).

    None when it is gone or a zombie: neither holds GPU memory.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def gpu_name(total_bytes: int) -> str:
    """A name that says plainly that the card is simulated."""
    gib = round(total_bytes / GIB)
    return {80: "Simulated H100 80GB", 141: "Simulated H200 141GB"}.get(gib, f"Simulated GPU {gib}GB")


def ensure_gpus(folder: Path | str, count: int, total_bytes: int, host_name: str = "localhost") -> list[SimGpu]:
    """Lay down ``gpus.json`` with ``count`` cards unless there is one; the UUIDs follow from host name and index.

    An existing file wins, so that cards survive a restart with their faults and sizes.
    """
    ledger = Ledger(folder)
    with ledger.locked():
        if not ledger.gpus():
            _write_json(ledger.gpus_path, [_fresh(index, total_bytes, host_name) for index in range(count)])
    return ledger.gpus()


def _fresh(index: int, total_bytes: int, host_name: str) -> dict[str, Any]:
    identity = uuid_module.uuid5(uuid_module.NAMESPACE_DNS, f"{host_name}.gpu{index}.sim")
    return {
        "uuid": f"GPU-sim-{identity}",
        "index": index,
        "name": gpu_name(total_bytes),
        "total_bytes": int(total_bytes),
    }


def _write_json(path: Path, content: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, separators=(",", ":")))
    temporary.chmod(MODE_FILE)
    temporary.replace(path)


class Ledger:
    """The book in one folder, seen from one process.

    Claims are made in the name of ``pid`` (this process unless told otherwise). Not thread-safe: one per thread.
    """

    def __init__(self, folder: Path | str, *, pid: int | None = None, name: str = "VLLM::EngineCore") -> None:
        self.folder = Path(folder)
        self.gpus_path = self.folder / "gpus.json"
        self.alloc_path = self.folder / "alloc"
        self.alloc_path.mkdir(parents=True, exist_ok=True)
        self.pid = pid or os.getpid()
        self.name = name
        self._ticks = start_ticks(self.pid) or 0
        self._known: dict[str, _Allocation] = {}
        self._gpus: tuple[tuple[int, int], list[SimGpu]] | None = None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the writers' lock; a process that dies in here gives it back by dying."""
        descriptor = os.open(self.folder / "ledger.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE_FILE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    # -- cards ---------------------------------------------------------------------------------------------------

    def gpus(self) -> list[SimGpu]:
        """The cards, in index order; empty when there is no (readable) ``gpus.json``."""
        try:
            stat = self.gpus_path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino)
            if self._gpus is None or self._gpus[0] != stamp:
                rows = json.loads(self.gpus_path.read_text())
                known = SimGpu.__dataclass_fields__
                cards = [SimGpu(**{key: value for key, value in row.items() if key in known}) for row in rows]
                self._gpus = (stamp, sorted(cards, key=lambda card: card.index))
        except (OSError, ValueError, TypeError):
            return []
        return self._gpus[1]

    def gpu(self, uuid: str) -> SimGpu | None:
        """One card by UUID, None when there is no such card or it has fallen off the bus."""
        return next((card for card in self.gpus() if card.uuid == uuid and card.fault_now != "missing"), None)

    def change_gpu(self, uuid: str, **changes: Any) -> None:
        """Switch a fault or the foreign bytes of one card: ``fault="xid:79"``; ``fault=""`` ends it."""
        with self.locked():
            rows = json.loads(self.gpus_path.read_text())
            for row in rows:
                if row["uuid"] == uuid:
                    row.update(changes)
            _write_json(self.gpus_path, rows)

    # -- what processes hold -------------------------------------------------------------------------------------

    def read(self) -> dict[str, list[Holding]]:
        """Who holds what, for every card; files of dead processes are removed on the way."""
        answer: dict[str, list[Holding]] = {card.uuid: [] for card in self.gpus()}
        for row in self._living():
            for uuid, amount in row.bytes.items():
                if amount > 0 and uuid in answer:
                    answer[uuid].append(Holding(row.pid, row.start_ticks, row.name, amount))
        return answer

    def utilization(self) -> dict[str, float]:
        """Percent busy of every card: the sum over its processes, at most 100."""
        answer = {card.uuid: 0.0 for card in self.gpus()}
        for row in self._living():
            for uuid, percent in row.util.items():
                if uuid in answer:
                    answer[uuid] = min(100.0, answer[uuid] + max(0.0, percent))
        return answer

    def used_bytes(self, uuid: str) -> int:
        """Bytes taken on one card by everyone, foreign processes included."""
        card = self.gpu(uuid)
        foreign = card.foreign_bytes if card else 0
        return foreign + sum(row.bytes.get(uuid, 0) for row in self._living())

    def free_bytes(self, uuid: str) -> int:
        """Bytes free on one card, as ``cudaMemGetInfo`` would say; 0 for a card that is not there."""
        card = self.gpu(uuid)
        return max(0, card.total_bytes - self.used_bytes(uuid)) if card else 0

    def held_bytes(self, uuid: str) -> int:
        """Bytes that this ledger's own process holds on the card."""
        row = self._load(self._own_path.name)
        return row.bytes.get(uuid, 0) if row else 0

    # -- claims --------------------------------------------------------------------------------------------------

    def claim(self, uuid: str, delta: int) -> bool:
        """Take ``delta`` more bytes of one card, or give some back (negative). False: no room, nothing changed."""
        return self.claim_all({uuid: delta})

    def claim_all(self, deltas: Mapping[str, int]) -> bool:
        """The same on several cards at once: all or nothing, as a tensor-parallel engine needs it."""
        with self.locked():
            # Claims come with every page bundle, so the dead are looked for only when room is short.
            if not self._fits(deltas, self._all()) and not self._fits(deltas, self._living()):
                return False
            own = self._own()
            for uuid, delta in deltas.items():
                own.bytes[uuid] = max(0, own.bytes.get(uuid, 0) + delta)
            self._save(own)
            return True

    def _fits(self, deltas: Mapping[str, int], rows: list[_Allocation]) -> bool:
        for uuid, delta in deltas.items():
            card = self.gpu(uuid)
            if delta <= 0:
                continue
            if card is None or card.fault.startswith("xid"):
                return False
            taken = card.foreign_bytes + sum(row.bytes.get(uuid, 0) for row in rows)
            if taken + delta > card.total_bytes:
                return False
        return True

    def set(
        self,
        *,
        bytes_held: Mapping[str, int] | None = None,
        utilization: Mapping[str, float] | None = None,
        name: str | None = None,
    ) -> None:
        """Write this process's own figures without asking whether they fit (giving back, or utilisation)."""
        with self.locked():
            own = self._own()
            own.name = name or own.name
            own.bytes.update(bytes_held or {})
            own.util.update(utilization or {})
            self._save(own)

    def release(self) -> None:
        """Give everything back, as the end of the process would."""
        with self.locked():
            self._own_path.unlink(missing_ok=True)
            self._known.pop(self._own_path.name, None)

    # -- files ---------------------------------------------------------------------------------------------------

    @property
    def _own_path(self) -> Path:
        return self.alloc_path / f"{self.pid}-{self._ticks}.json"

    def _own(self) -> _Allocation:
        row = self._load(self._own_path.name)
        # A copy: what is read stays as read until the file is really replaced.
        return _Allocation(
            self.pid,
            self._ticks,
            row.name if row else self.name,
            dict(row.bytes) if row else {},
            dict(row.util) if row else {},
        )

    def _save(self, row: _Allocation) -> None:
        content = {
            "pid": row.pid,
            "start_ticks": row.start_ticks,
            "name": row.name,
            "bytes": row.bytes,
            "util": row.util,
        }
        _write_json(self._own_path, content)

    def _all(self) -> list[_Allocation]:
        """Every readable allocation, parsed again only when its file changed."""
        names = [entry.name for entry in os.scandir(self.alloc_path) if entry.name[:1] != "."]
        for gone in self._known.keys() - set(names):
            del self._known[gone]
        return [row for name in names if (row := self._load(name))]

    def _load(self, name: str) -> _Allocation | None:
        path = self.alloc_path / name
        try:
            stat = path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino)
            row = self._known.get(name)
            if row is None or row.stamp != stamp:
                data = json.loads(path.read_text())
                row = self._known[name] = _Allocation(
                    pid=int(data["pid"]),
                    start_ticks=int(data["start_ticks"]),
                    name=str(data["name"]),
                    bytes={str(uuid): int(amount) for uuid, amount in data["bytes"].items()},
                    util={str(uuid): float(percent) for uuid, percent in data.get("util", {}).items()},
                    stamp=stamp,
                )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return row

    def _living(self) -> list[_Allocation]:
        rows = []
        for row in self._all():
            if start_ticks(row.pid) == row.start_ticks:
                rows.append(row)
                continue
            # Safe without the lock: nobody else ever writes the file of this pid with these start ticks.
            (self.alloc_path / f"{row.pid}-{row.start_ticks}.json").unlink(missing_ok=True)
        return rows


@dataclass(slots=True)
class Thermals:
    """Temperature and power of the cards as a function of their load, with a card's inertia; kept by the reader."""

    _last: dict[str, tuple[float, float]] = field(default_factory=dict)

    def step(self, uuid: str, utilization: float, *, now: float | None = None) -> tuple[float, float]:
        """Degrees Celsius and watts of one card under ``utilization`` percent, at ``now`` (monotonic seconds)."""
        now = time.monotonic() if now is None else now
        load = min(1.0, max(0.0, utilization / 100))
        target = IDLE_C + (BUSY_C - IDLE_C) * load
        temperature, then = self._last.get(uuid, (IDLE_C, now))
        temperature += (target - temperature) * min(1.0, max(0.0, now - then) / THERMAL_TIME_S)
        self._last[uuid] = (temperature, now)
        # Power follows at once; the square root because a half-busy card draws well over half of its power.
        return round(temperature, 1), round(IDLE_W + (LIMIT_W - IDLE_W) * 0.93 * load**0.5, 1)
