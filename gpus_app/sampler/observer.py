"""One look at this host: GPUs, segments and engines, put together into a record. No database, no broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gpus_app.errors import SegmentInvalid, SegmentMissing, SegmentUnreadable
from gpus_app.probes import segments
from gpus_app.probes.base import GpuReading, Probe
from gpus_app.probes.engine_metrics import EngineNumbers, parse_metrics, parse_status
from gpus_app.probes.engine_poll import Answer, EnginePoll
from gpus_app.probes.owners import Owners
from gpus_app.probes.rundirs import Attempt, RunDirs
from gpus_app.probes.segments import Segment
from gpus_app.sampler.record import GpuPart, HostRecord, InstancePart, InstanceState, ProcessPart

METRICS, STATUS = "/metrics", "/kvcache/status"
#: Seconds that one look waits for engines at most.
COLLECT_LIMIT_S = 0.8
#: Engines asked for their metrics in one look; with more, each is asked every other look or less often.
MOST_ASKED = 64
#: Numbers of an engine that has not answered for so long are not shown any more.
NUMBERS_LAST_S = 5.0
#: An engine is asked anew for its limit and capacity so often, and this soon while a stranger's limit stands.
STATUS_EVERY_S, DRIFT_EVERY_S = 30.0, 2.0
#: After an answer other than 200 the question is not repeated for so long: this engine has no such page.
NO_STATUS_S = 60.0
#: A hint that still holds is given again after so many seconds.
HINT_AGAIN_S = 10.0
#: What ended before the sampler's own start is no news, unless it is this young; and old news is not told for longer.
NEWS_S = 60.0
#: Other processes named per GPU at most, the largest first: the record must stay small.
MOST_OTHERS = 16
STALE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Hint:
    """Something that a reconciler should look at now."""

    kind: str
    instance_id: int | None


@dataclass(slots=True)
class Look:
    """What one look found."""

    record: HostRecord
    readings: list[GpuReading]
    hints: list[Hint]


@dataclass(slots=True)
class _Engine:
    """What is remembered of one attempt between looks."""

    numbers: EngineNumbers | None = None
    numbers_at: float = 0.0
    tokens_per_s: float | None = None
    served: bool = False  # has answered once
    had_segment: bool = False
    known_limit: int | None = None  # the limit that the engine itself stands by
    capacity: int | None = None
    foreign: bool = False
    untold: bool = False  # the limit has changed, and this engine keeps no watch of who writes it
    status_due: float = 0.0
    has_status: bool | None = None
    tells_drift: bool = True
    segment: Segment | None = None
    footprint_before: int | None = None  # by its segment, just before the cards were read
    baseline: dict[str, int] = field(default_factory=dict)  # by GPU, the last that was read while nothing moved
    state: InstanceState = "starting"
    note: str = ""
    dead_since: float | None = None
    hinted: dict[str, float] = field(default_factory=dict)


class Observer:
    """Holds what is remembered between looks. One per process, used from one thread."""

    def __init__(
        self,
        *,
        host_name: str,
        probe: Probe,
        run_dir: Path,
        shm: Path = segments.SHM,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.host_name = host_name
        self.probe = probe
        self._runs = RunDirs(run_dir)
        self._shm = shm
        self._clock = clock
        self._wall = wall_clock
        self._poll = EnginePoll(clock=clock)
        self._owners = Owners(clock=clock)
        self._engines: dict[int, _Engine] = {}
        self._seq = 0
        self._turn = 0
        self._started_at = wall_clock()
        self._stale: list[str] = []
        self._stale_at = float("-inf")

    def close(self) -> None:
        self._poll.close()
        self.probe.close()

    def look(self, *, lag_s: float = 0.0) -> Look:
        """Read everything once. Takes milliseconds, and up to ``COLLECT_LIMIT_S`` when an engine begins to hang."""
        began = self._clock()
        attempts = self._runs.scan()
        live = [attempt for attempt in attempts if attempt.alive]
        hints = self._ends(attempts)
        for attempt in live:
            self._engines.setdefault(attempt.attempt_id, _Engine())
        self._ask_metrics(live)  # engines answer while the cards are read
        for attempt in live:
            self._engines[attempt.attempt_id].footprint_before = self._footprint(attempt)
        readings = self.probe.read()
        at = self._wall()
        taken: dict[str, Attempt] = {}
        for attempt in live:
            first = taken.setdefault(attempt.ipc_name, attempt) if attempt.ipc_name else attempt
            self._read_segment(attempt, first)
        self._ask_status(live)
        for (attempt_id, path), answer in self._poll.collect(COLLECT_LIMIT_S).items():
            engine = self._engines.get(attempt_id)
            if engine is not None:
                self._take(engine, path, answer)
        for attempt in live:
            hints += self._judge(attempt)
        gpus = self._gpus(readings, live)
        self._forget(live)
        self._seq += 1
        record: HostRecord = {
            "type": "sample",
            "host": self.host_name,
            "t": round(at, 3),
            "seq": self._seq,
            "sampler": {"lag_s": round(lag_s, 3), "took_s": round(self._clock() - began, 4)},
            "gpus": gpus,
            "stale_segments": self._stale_segments(live),
        }
        return Look(record, readings, hints)

    # -- engines -------------------------------------------------------------------------------------------------------

    def _ends(self, attempts: Iterable[Attempt]) -> list[Hint]:
        """Engines that ended, or whose process is gone without a record of its end."""
        hints = []
        for attempt in attempts:
            if attempt.alive or attempt.engine_pid is None:
                continue
            known = attempt.attempt_id in self._engines
            fresh = attempt.ended_at is not None and attempt.ended_at >= self._started_at - NEWS_S
            if attempt.ended_at is not None:
                self._engines.pop(attempt.attempt_id, None)
                if known or fresh:
                    hints.append(Hint("ended", attempt.instance_id))
            else:
                engine = self._engines.setdefault(attempt.attempt_id, _Engine())
                engine.dead_since = engine.dead_since or self._wall()
                if self._wall() - engine.dead_since < NEWS_S and self._due(engine, "ended"):
                    hints.append(Hint("ended", attempt.instance_id))
        return hints

    def _ask_metrics(self, live: list[Attempt]) -> None:
        turns = -(-len(live) // MOST_ASKED) or 1
        self._turn += 1
        for place, attempt in enumerate(live):
            if place % turns == self._turn % turns:
                self._ask(attempt, METRICS)

    def _ask_status(self, live: list[Attempt]) -> None:
        """Ask those whose limit is not the one that they were last known to stand by, and everyone now and then."""
        now = self._clock()
        for attempt in live:
            engine = self._engines[attempt.attempt_id]
            if not engine.served or engine.segment is None:
                continue
            changed = engine.segment.limit_bytes != engine.known_limit and engine.has_status is not False
            if changed or now >= engine.status_due:
                self._ask(attempt, STATUS)
                engine.status_due = now + STATUS_EVERY_S

    def _ask(self, attempt: Attempt, path: str) -> None:
        self._poll.ask((attempt.attempt_id, path), address=attempt.address, port=attempt.port, token=attempt.token)

    def _take(self, engine: _Engine, path: str, answer: Answer) -> None:
        if path == METRICS:
            if answer.status == 200:
                self._take_numbers(engine, parse_metrics(answer.body), answer.at)
            return
        facts = parse_status(answer.body) if answer.status == 200 else None
        if facts is None:
            if answer.status:
                engine.has_status = False
                engine.status_due = answer.at + NO_STATUS_S
            return
        engine.has_status = True
        engine.capacity = facts.capacity_bytes
        engine.foreign = facts.foreign
        engine.tells_drift = facts.tells
        if facts.foreign:
            engine.status_due = min(engine.status_due, answer.at + DRIFT_EVERY_S)
        if engine.segment is not None:
            # The status may be of a moment later than the segment was read: what it says counts.
            engine.known_limit = facts.limit_bytes if facts.limit_bytes is not None else engine.segment.limit_bytes

    @staticmethod
    def _take_numbers(engine: _Engine, numbers: EngineNumbers, at: float) -> None:
        before, since = engine.numbers, at - engine.numbers_at
        engine.tokens_per_s = None
        if before and before.generation_tokens is not None and numbers.generation_tokens is not None and since > 0:
            engine.tokens_per_s = max(0.0, (numbers.generation_tokens - before.generation_tokens) / since)
        engine.numbers, engine.numbers_at, engine.served = numbers, at, True

    # -- segments ------------------------------------------------------------------------------------------------------

    def _read_segment(self, attempt: Attempt, first: Attempt) -> None:
        """``first``: the oldest engine with this segment's name. One segment is never counted for two."""
        engine = self._engines[attempt.attempt_id]
        before, engine.segment, engine.note = engine.segment, None, ""
        if first is not attempt:
            engine.state = "unreadable"
            engine.note = f"It shares its segment with instance {first.instance_id}; no figure of it can be trusted."
            return
        if not attempt.ipc_name:
            engine.state = "no_segment" if engine.served else "starting"
            return
        try:
            segment = segments.read_segment(attempt.ipc_name, folder=self._shm)
        except SegmentMissing:
            if engine.had_segment:
                engine.state, engine.note = "lost", "Its segment was deleted; the engine goes on with its old limit."
            else:
                engine.state = "no_segment" if engine.served else "starting"
        except (SegmentUnreadable, SegmentInvalid) as exc:
            engine.state, engine.note = "unreadable", str(exc)
        else:
            self._accept(engine, segment, before)

    def _accept(self, engine: _Engine, segment: Segment, before: Segment | None) -> None:
        if before is not None and segment.limit_bytes != before.limit_bytes:
            engine.untold = engine.has_status is False or not engine.tells_drift
        if not segment.valid:
            engine.state = "lost" if engine.had_segment else "unreadable"
            engine.note = f"Its segment says {segment.limit_bytes}, which is no valid limit; the engine ignores it."
            return
        engine.segment, engine.had_segment = segment, True
        engine.state = "ok" if engine.served else "starting"
        if engine.known_limit is None:
            engine.known_limit = segment.limit_bytes
            engine.status_due = 0.0

    def _judge(self, attempt: Attempt) -> list[Hint]:
        """Hints about one living engine, each again only after a while."""
        engine = self._engines[attempt.attempt_id]
        if engine.untold:  # ours or a stranger's: the worker, which knows what is wanted, compares
            engine.untold = False
            return [Hint("drift", attempt.instance_id)]
        if (engine.foreign or engine.state == "lost") and self._due(engine, "drift"):
            return [Hint("drift", attempt.instance_id)]
        return []

    def _due(self, engine: _Engine, kind: str) -> bool:
        now = self._clock()
        if now - engine.hinted.get(kind, float("-inf")) < HINT_AGAIN_S:
            return False
        engine.hinted[kind] = now
        return True

    def _stale_segments(self, live: list[Attempt]) -> list[str]:
        """Segments with our installation's name that no living engine of ours has; looked for now and then."""
        now = self._clock()
        if now - self._stale_at >= STALE_EVERY_S:
            self._stale_at = now
            owned = {attempt.ipc_name for attempt in live}
            prefixes = {f"sz-{attempt.installation}-" for attempt in self._runs}
            found = [name for prefix in sorted(prefixes) for name in segments.list_ours(prefix, folder=self._shm)]
            self._stale = [name for name in found if name not in owned]
        return self._stale

    # -- cards ---------------------------------------------------------------------------------------------------------

    def _gpus(self, readings: list[GpuReading], live: list[Attempt]) -> list[GpuPart]:
        known = list(self._runs)
        by_id = {attempt.attempt_id: attempt for attempt in known}
        pids: set[int] = set()
        parts = []
        for reading in readings:
            resident: dict[int, int | None] = {}
            others: list[ProcessPart] = []
            for process in reading.processes:
                pids.add(process.pid)
                owner = self._owners.attempt_of(process.pid, known)
                if owner is None:
                    name = process.name or self._owners.name_of(process.pid)
                    others.append({"pid": process.pid, "name": name, "bytes": process.bytes})
                elif process.bytes is None or resident.get(owner, 0) is None:
                    resident[owner] = None
                else:
                    resident[owner] = (resident.get(owner) or 0) + process.bytes
            here = [attempt for attempt in live if reading.uuid in attempt.gpu_uuids]
            # What an engine that is over still holds is shown until it is back.
            here += [by_id[id_] for id_ in resident if id_ in by_id and by_id[id_] not in here]
            instances = [self._instance(attempt, reading, resident) for attempt in here]
            mine = sum(size or 0 for size in resident.values())
            others.sort(key=lambda row: (-(row["bytes"] or 0), row["pid"]))
            parts.append(_gpu_part(reading, instances, max(0, reading.used_bytes - mine), others[:MOST_OTHERS]))
        self._owners.forget_all_but(pids)
        return parts

    def _instance(self, attempt: Attempt, reading: GpuReading, resident: dict[int, int | None]) -> InstancePart:
        engine = self._engines.get(attempt.attempt_id) or _Engine(state="stale")
        held = resident.get(attempt.attempt_id, 0 if reading.processes or engine.segment is None else None)
        segment, state, note = engine.segment, engine.state, engine.note
        if not attempt.alive:
            segment, state = None, "stale"
            note = "The engine has ended and its memory is not back yet." if held else "The engine has ended."
        elif segment is not None and held is not None and segment.footprint_bytes > held:
            segment = self._again(attempt, segment)
        footprint = segment.footprint_bytes if segment else 0
        if held == 0 and footprint:
            held, note = None, note or "The driver names no process of this engine: another PID namespace, perhaps."
        age = self._clock() - engine.numbers_at if engine.numbers else None
        numbers = engine.numbers if age is not None and age <= NUMBERS_LAST_S else None
        rate = engine.tokens_per_s if numbers else None
        return {
            "id": attempt.instance_id,
            "name": attempt.name,
            "replica": attempt.replica,
            "ipc": attempt.ipc_name,
            "resident": held,
            "baseline": None if held is None else self._baseline(attempt, reading.uuid, held, footprint),
            "used": segment.used_bytes if segment else None,
            "prealloc": segment.prealloc_bytes if segment else None,
            "limit": segment.limit_bytes if segment else None,
            "capacity": engine.capacity,
            "running": numbers.running if numbers else None,
            "waiting": numbers.waiting if numbers else None,
            "preemptions": numbers.preemptions if numbers else None,
            "gen_tokens": numbers.generation_tokens if numbers else None,
            "gen_tokens_per_s": round(rate, 1) if rate is not None else None,
            "sleep_state": numbers.sleep_state if numbers else None,
            "metrics_age_s": round(age, 1) if age is not None else None,
            "state": state,
            "note": note,
            "drift": segment.limit_bytes if segment and engine.foreign else None,
        }

    def _baseline(self, attempt: Attempt, uuid: str, held: int, footprint: int) -> int:
        """What it holds beside its KV memory, bytes.

        Card and segment cannot be read at one moment. While pages come and go in between, their difference is off by
        bundles, so the last figure that was read while the segment stood still counts on.
        """
        engine = self._engines.get(attempt.attempt_id)
        found = max(0, held - footprint)
        if engine is None or not attempt.alive or engine.segment is None:
            return found
        if engine.footprint_before == footprint == self._footprint(attempt):
            engine.baseline[uuid] = found
        return engine.baseline.get(uuid, found)

    def _footprint(self, attempt: Attempt) -> int | None:
        if not attempt.ipc_name:
            return None
        try:
            return segments.read_segment(attempt.ipc_name, folder=self._shm).footprint_bytes
        except (SegmentMissing, SegmentUnreadable, SegmentInvalid):
            return None

    def _again(self, attempt: Attempt, segment: Segment) -> Segment:
        """The segment lags within one big release (20 ms were seen): read it once more before the parts look wrong."""
        try:
            return segments.read_segment(attempt.ipc_name, folder=self._shm)
        except (SegmentMissing, SegmentUnreadable, SegmentInvalid):
            return segment

    def _forget(self, live: list[Attempt]) -> None:
        """Only engines that live, or died without a record, are remembered."""
        alive = {attempt.attempt_id for attempt in live}
        self._poll.forget(alive)
        for attempt_id in [id_ for id_ in self._engines if self._runs.get(id_) is None]:
            del self._engines[attempt_id]


def _gpu_part(reading: GpuReading, instances: list[InstancePart], other: int, others: list[ProcessPart]) -> GpuPart:
    return {
        "uuid": reading.uuid,
        "index": reading.index,
        "name": reading.name,
        "total": reading.total_bytes,
        "used": reading.used_bytes,
        "free": reading.free_bytes,
        "util": reading.utilization_percent,
        "temp": reading.temperature_c,
        "power": reading.power_w,
        "power_limit": reading.power_limit_w,
        "error": reading.error,
        "other": other,
        "other_processes": others,
        "instances": instances,
    }
