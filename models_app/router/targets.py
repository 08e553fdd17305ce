"""Which replica answers: least outstanding by weight, failed ones rest, and the least bad one when all rest.

What is known of an instance (requests under way, failures, connections) lives here and outlives a swap of the table.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator

from models_app.router.config import RouterConfig
from models_app.router.table import RouteTable, Target
from models_app.router.upstream import Pool

TargetKey = tuple[int, str]


class TargetState:
    """One instance as seen from this process."""

    __slots__ = ("cooled_until", "failures", "heads", "last_failure", "outstanding", "pool", "target", "told_at")

    def __init__(self, target: Target, pool: Pool) -> None:
        self.target = target
        self.pool = pool
        self.outstanding = 0
        self.failures = 0  # in a row
        self.cooled_until = 0.0  # monotonic
        self.last_failure = ""
        self.told_at = float("-inf")  # monotonic: when the control side was last told of a failure
        self.heads: dict[str, bytes] = {}  # by path: the part of a request's head that is always the same

    def head(self, path: str) -> bytes:
        head = self.heads.get(path)
        if head is None:
            target = self.target
            host = f"[{target.host}]" if ":" in target.host else target.host
            text = f"POST {path} HTTP/1.1\r\nhost: {host}:{target.port}\r\n"
            if target.token:
                text += f"authorization: Bearer {target.token}\r\n"
            head = self.heads[path] = text.encode("latin-1")
        return head


class Targets:
    """All instances of the table, by id and address."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self._states: dict[TargetKey, TargetState] = {}
        self._leaving: list[Pool] = []  # of instances that are gone from the table, while requests on them end
        self._turn = 0

    def follow(self, table: RouteTable) -> None:
        """Take over a new table: forget instances that are gone. Requests under way on them end as they may."""
        wanted: dict[TargetKey, Target] = {}
        for route in table.models.values():
            for target in route.targets:
                wanted[target.id, target.url] = target
        for key in [key for key in self._states if key not in wanted]:
            pool = self._states.pop(key).pool
            pool.close()
            self._leaving.append(pool)
        for key, target in wanted.items():
            state = self._states.get(key)
            if state is None:
                self._states[key] = TargetState(target, Pool(target.host, target.port, self.config))
            elif state.target != target:
                state.target = target
                state.heads.clear()

    def state(self, target: Target) -> TargetState:
        return self._states[target.id, target.url]

    def __iter__(self) -> Iterator[TargetState]:
        return iter(self._states.values())

    def choose(
        self, targets: Collection[Target], now: float, *, tried: Collection[TargetState] = (), affinity: str = ""
    ) -> TargetState | None:
        """The best instance that was not tried yet, or None when all were."""
        states = [
            state
            for one in targets
            if (state := self._states.get((one.id, one.url))) is not None and state not in tried
        ]
        if not states:
            return None
        if len(states) == 1:
            return states[0]
        fresh = [state for state in states if state.cooled_until <= now]
        if not fresh:
            return min(states, key=lambda state: (state.failures, state.cooled_until))
        if affinity:
            favoured = max(fresh, key=lambda state: zlib.crc32(f"{state.target.url} {affinity}".encode()))
            if favoured.outstanding <= 1.25 * sum(state.outstanding for state in fresh) / len(fresh) + 2:
                return favoured
        self._turn += 1
        start = self._turn % len(fresh)
        best = fresh[start]
        best_load = (best.outstanding + 1) / best.target.weight
        for state in fresh[start + 1 :] + fresh[:start]:
            load = (state.outstanding + 1) / state.target.weight
            if load < best_load:
                best, best_load = state, load
        return best

    def succeeded(self, state: TargetState) -> None:
        if state.failures:
            state.failures = 0
            state.cooled_until = 0.0

    def failed(self, state: TargetState, kind: str, now: float, *, at_once: bool) -> None:
        """A connection error or time-out cools at once; answers of 5xx only after several in a row."""
        state.failures += 1
        state.last_failure = kind
        config = self.config
        doublings = state.failures - (1 if at_once else config.failures_to_cool)
        if doublings < 0:
            return
        rest_s = min(config.cool_down_max_s, config.cool_down_s * 2 ** min(doublings, 16))
        state.cooled_until = max(state.cooled_until, now + rest_s)

    def sweep(self, now: float) -> None:
        for state in self._states.values():
            state.pool.sweep(now)
        for pool in self._leaving:
            pool.sweep(now)
        if self._leaving:
            self._leaving = [pool for pool in self._leaving if pool.busy]

    def close(self) -> None:
        for state in self._states.values():
            state.pool.close()
        self._states.clear()
