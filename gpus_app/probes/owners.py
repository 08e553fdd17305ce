"""Whose a process on a GPU is. NVML names the engine core, not the API server: its pid stands in no record of ours."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection

from gpus_app.probes import procfs
from gpus_app.probes.rundirs import Attempt

#: A process that belonged to nobody is asked again after so many seconds: between fork and exec it looks like another.
ASK_AGAIN_S = 10.0
#: How far up the chain of parents an engine's first process is looked for.
GENERATIONS = 6


class Owners:
    """Finds the attempt of a pid by the marker in its environment, its session, or its chain of parents."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[int, tuple[int, int | None, float]] = {}
        self._names: dict[int, tuple[int, str]] = {}

    def attempt_of(self, pid: int, attempts: Collection[Attempt]) -> int | None:
        """The attempt id, None for a process of somebody else or of another namespace."""
        found = procfs.stat(pid)
        if found is None:
            self._known.pop(pid, None)
            return None
        known = self._known.get(pid)
        now = self._clock()
        if known and known[0] == found.start_ticks and (known[1] is not None or now - known[2] < ASK_AGAIN_S):
            return known[1]
        attempt_id = self._look(pid, found, attempts)
        self._known[pid] = (found.start_ticks, attempt_id, now)
        return attempt_id

    def name_of(self, pid: int) -> str:
        """What to call a process that is none of ours."""
        found = procfs.stat(pid)
        if found is None:
            return f"pid {pid}"
        known = self._names.get(pid)
        if known is None or known[0] != found.start_ticks:
            known = (found.start_ticks, procfs.command_name(pid) or f"pid {pid}")
            self._names[pid] = known
        return known[1]

    def forget_all_but(self, pids: Collection[int]) -> None:
        """Drop what is known of processes that no GPU lists any more."""
        for known in (self._known, self._names):
            for pid in [pid for pid in known if pid not in pids]:
                del known[pid]

    def _look(self, pid: int, found: procfs.Stat, attempts: Collection[Attempt]) -> int | None:
        mark = procfs.marker(pid)
        if mark is not None:
            ours = any(a.attempt_id == mark.attempt_id and a.installation == mark.installation for a in attempts)
            return mark.attempt_id if ours else None
        # The environment may be unreadable (another user) or wiped: setproctitle does that in vLLM's engine core.
        for attempt in attempts:
            if found.session == attempt.engine_pid and self._same_session(pid, found, attempt):
                return attempt.attempt_id
        return self._by_parents(found, attempts)

    @staticmethod
    def _same_session(pid: int, found: procfs.Stat, attempt: Attempt) -> bool:
        """Whether the session is the one that this attempt's engine began: session numbers are used again.

        It is while its leader is that engine; after the leader's death the place where the process stands tells.
        """
        leader = found if pid == found.session else procfs.stat(found.session)
        if leader is not None:
            return leader.start_ticks == attempt.engine_start_ticks
        return procfs.working_folder(pid) == os.path.realpath(attempt.folder)

    @staticmethod
    def _by_parents(found: procfs.Stat, attempts: Collection[Attempt]) -> int | None:
        heads = {(a.engine_pid, a.engine_start_ticks): a.attempt_id for a in attempts}
        heads |= {(a.guardian_pid, a.guardian_start_ticks): a.attempt_id for a in attempts}
        pid = found.parent
        for _ in range(GENERATIONS):
            parent = procfs.stat(pid) if pid > 1 else None
            if parent is None:
                return None
            if (pid, parent.start_ticks) in heads:
                return heads[pid, parent.start_ticks]
            pid = parent.parent
        return None
