"""Waiting for a model: one door per served model name, with a bounded and fair queue before it.

A request passes at once while the model has a ready instance and a free place under its concurrency cap. Otherwise it
waits: by priority, then key by key in turn, then first come first served, so that neither another model's load nor one
busy key holds it up. A model that can be woken or loaded on demand is asked for once while somebody waits; the load
under way serves all of them. Who leaves, leaves the queue.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import NoReturn

from models_app.router.config import RouterConfig
from models_app.router.errors import RouterError
from models_app.router.metrics import Metrics
from models_app.router.table import Key, ModelRoute, RouteTable

#: Tells the control side that a model is wanted. Called once per need and again while requests wait.
Demand = Callable[[str], Awaitable[None] | None]

_STATE_ANSWERS = {
    "starting": ("model_loading", "is loading", 5.0),
    "sleeping": ("model_sleeping", "is asleep", 10.0),
    "stopped": ("model_stopped", "is stopped", 30.0),
    "draining": ("model_draining", "is being stopped or moved", 5.0),
    "failed": ("model_failed", "has failed", 30.0),
    "ready": ("model_unreachable", "has no instance that can be reached now", 2.0),
}


def not_ready(route: ModelRoute) -> RouterError:
    """503 with the model's state as its own code, and the control side's reason in the sentence."""
    code, words, retry_after_s = _STATE_ANSWERS[route.status]
    reason = route.refused or route.reason
    return RouterError(
        503,
        code,
        f"The model '{route.name}' {words}{': ' + reason if reason else ''}.".replace("..", "."),
        param="model",
        retry_after_s=retry_after_s,
    )


class Waiter:
    """One request in a queue."""

    __slots__ = ("future", "key_id", "priority", "size")

    def __init__(self, key: Key, size: int, future: asyncio.Future[None]) -> None:
        self.key_id = key.id
        self.priority = key.priority
        self.size = size
        self.future = future


class FairQueue:
    """Highest priority first; within one, the keys take turns; within a key, first come first served."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[int, deque[Waiter]]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, waiter: Waiter) -> None:
        keys = self._levels.setdefault(waiter.priority, OrderedDict())
        keys.setdefault(waiter.key_id, deque()).append(waiter)
        self._length += 1

    def pop(self) -> Waiter:
        priority = max(self._levels)
        keys = self._levels[priority]
        key_id, line = next(iter(keys.items()))
        waiter = line.popleft()
        if line:
            keys.move_to_end(key_id)
        else:
            self._drop(priority, key_id)
        self._length -= 1
        return waiter

    def remove(self, waiter: Waiter) -> None:
        keys = self._levels.get(waiter.priority)
        line = None if keys is None else keys.get(waiter.key_id)
        if line is None or waiter not in line:
            return
        line.remove(waiter)
        self._length -= 1
        if not line:
            self._drop(waiter.priority, waiter.key_id)

    def _drop(self, priority: int, key_id: int) -> None:
        del self._levels[priority][key_id]
        if not self._levels[priority]:
            del self._levels[priority]


class Door:
    """Lets requests through to one model. ``inflight`` are those inside."""

    def __init__(self, doors: Doors, route: ModelRoute) -> None:
        self.doors = doors
        self.route = route
        self.queue = FairQueue()
        self.inflight = 0
        self.inflight_elsewhere = 0  # in other router processes, as last told
        self._demand: asyncio.Task[None] | None = None
        self._demanded_at = float("-inf")

    # --- the request's side --------------------------------------------------------------------------------

    def try_enter(self) -> bool:
        """Pass at once if nothing stands in the way; ``leave`` must follow."""
        if self._open() and not len(self.queue):
            self.inflight += 1
            return True
        return False

    def line_up(self, key: Key, size: int) -> Waiter:
        """Take a place in the queue; ``wait`` follows, and ``step_out`` if that raises.

        Raises RouterError at once where waiting is no use: 503 with the model's state when it is not one that a
        request starts, 429 ``model_at_capacity`` or 503 ``queue_full`` when too many wait.
        """
        route, config = self.route, self.doors.config
        full = bool(route.targets)  # then only the concurrency cap stands in the way
        if not full and (not route.on_demand or route.refused or route.status == "failed"):
            if route.on_demand and not route.refused:
                self.ask_for_model()
            raise not_ready(route)
        limit = config.slot_queue_limit if full else config.queue_limit
        if len(self.queue) >= limit:
            if full:
                raise self._over_cap()
            self.doors.metrics.limited.add(("queue_full",))
            raise RouterError(
                503,
                "queue_full",
                f"{len(self.queue)} requests wait for the model '{route.name}' already.",
                retry_after_s=10,
            )
        waiter = Waiter(key, size, asyncio.get_running_loop().create_future())
        self.queue.push(waiter)
        self._count_queued()
        if not full:
            self.ask_for_model()
        return waiter

    async def wait(self, waiter: Waiter, limit_s: float | None) -> None:
        """Wait for a place inside; ``leave`` must follow.

        Raises TimeoutError after ``limit_s`` (the place in the queue is kept, one may wait again) and RouterError when
        the model will not come.
        """
        async with asyncio.timeout(limit_s):
            await asyncio.shield(waiter.future)

    def step_out(self, waiter: Waiter) -> None:
        """The request leaves the queue, or the place that it was just given."""
        if waiter.future.done():
            if not waiter.future.cancelled() and waiter.future.exception() is None:
                self.leave()
        else:
            self.queue.remove(waiter)
            waiter.future.cancel()
            self._count_queued()

    def leave(self) -> None:
        """A request that had entered is over."""
        self.inflight -= 1
        if len(self.queue):
            self._let_in()

    def waited_too_long(self) -> NoReturn:
        """The answer when the time limit of the queue has passed."""
        if self.route.targets:
            raise self._over_cap()
        raise not_ready(self.route)

    # --- the table's side ----------------------------------------------------------------------------------

    def follow(self, route: ModelRoute | None) -> None:
        """The route changed: let in, go on waiting, or tell those who wait that it will not come."""
        if route is None:
            gone = RouterError(404, "model_not_found", f"The model '{self.route.name}' was removed.", param="model")
            self._turn_away(gone)
            return
        self.route = route
        if route.targets:
            self._end_need()
            self._let_in()
        elif len(self.queue):
            if route.status == "failed" or route.refused or not route.on_demand:
                self._turn_away(not_ready(route))
            else:  # perhaps it was lost while they waited for a place: then nobody has asked for it yet
                self.ask_for_model()

    def hear_of_elsewhere(self, inflight: int) -> None:
        fewer = inflight < self.inflight_elsewhere
        self.inflight_elsewhere = inflight
        if fewer:
            self._let_in()

    def ask_for_model(self) -> None:
        """Send the wish once per need; while somebody waits, say it again now and then."""
        if self._demand is None or self._demand.done():
            self._demand = asyncio.get_running_loop().create_task(self._demand_while_waiting())

    async def _demand_while_waiting(self) -> None:
        loop, config = asyncio.get_running_loop(), self.doors.config
        while True:
            failed = self.route.status == "failed"
            pause_s = config.failed_demand_s if failed else config.demand_repeat_s
            due_in_s = self._demanded_at + pause_s - loop.time()
            if due_in_s <= 0:
                self._demanded_at = loop.time()
                self.doors.metrics.demands.add((self.route.name,))
                await self.doors.demand(self.route.name)
                due_in_s = pause_s
            if failed:
                return
            await asyncio.sleep(due_in_s)
            if not len(self.queue):
                return

    def _end_need(self) -> None:
        """The model is there: when it is gone again, that is a new need, told at once."""
        self._demanded_at = float("-inf")
        if self._demand is not None:
            self._demand.cancel()
            self._demand = None

    def close(self) -> None:
        self._end_need()
        self._turn_away(RouterError(503, "router_stopping", "The router is being restarted.", retry_after_s=2))

    # --- inside ---------------------------------------------------------------------------------------------

    def _open(self) -> bool:
        route = self.route
        if not route.targets:
            return False
        cap = route.max_concurrency
        return cap is None or self.inflight + self.inflight_elsewhere < cap

    def _let_in(self) -> None:
        if not len(self.queue):
            return
        while len(self.queue) and self._open():
            waiter = self.queue.pop()
            if not waiter.future.done():
                self.inflight += 1
                waiter.future.set_result(None)
        self._count_queued()

    def _turn_away(self, error: RouterError) -> None:
        if not len(self.queue):
            return
        while len(self.queue):
            waiter = self.queue.pop()
            if not waiter.future.done():
                waiter.future.set_exception(error)
                waiter.future.exception()  # seen: a waiter that is just leaving will not ask for it
        self._count_queued()

    def _over_cap(self) -> RouterError:
        self.doors.metrics.limited.add(("model_at_capacity",))
        return RouterError(
            429,
            "model_at_capacity",
            f"The model '{self.route.name}' is limited to {self.route.max_concurrency} requests at once.",
            retry_after_s=2,
            headers=(
                (b"x-ratelimit-limit-model-concurrency", b"%d" % (self.route.max_concurrency or 0)),
                (b"x-ratelimit-remaining-model-concurrency", b"0"),
            ),
        )

    def _count_queued(self) -> None:
        self.doors.metrics.queued.set((self.route.name,), len(self.queue))


class Doors:
    """The doors of all models of the table."""

    def __init__(self, config: RouterConfig, metrics: Metrics, on_demand: Demand | None) -> None:
        self.config = config
        self.metrics = metrics
        self._on_demand = on_demand
        self._doors: dict[str, Door] = {}

    def of(self, route: ModelRoute) -> Door:
        door = self._doors.get(route.name)
        if door is None:
            door = self._doors[route.name] = Door(self, route)
        return door

    def get(self, name: str) -> Door | None:
        return self._doors.get(name)

    def follow(self, table: RouteTable) -> None:
        for name, door in list(self._doors.items()):
            route = table.models.get(name)
            door.follow(route)
            if route is None and not door.inflight:
                del self._doors[name]

    def capped(self) -> dict[str, int]:
        """Requests inside, of models with a concurrency cap: what other router processes must know of."""
        return {
            name: door.inflight
            for name, door in self._doors.items()
            if door.route.max_concurrency is not None and door.inflight
        }

    def elsewhere(self, inflight: dict[str, int]) -> None:
        """What other router processes have inside."""
        for name, door in self._doors.items():
            door.hear_of_elsewhere(inflight.get(name, 0))

    async def demand(self, name: str) -> None:
        """Tell the control side. It may be away: those who wait go on waiting, and it is told again."""
        if self._on_demand is None:
            return
        try:
            answer = self._on_demand(name)
            if answer is not None:
                await answer
        except Exception:
            self.metrics.failures.add((name, "demand"))

    def close(self) -> None:
        for door in self._doors.values():
            door.close()
