"""Order in the queue: priority, then keys in turn, then first come."""

from __future__ import annotations

import asyncio

from models_app.router.config import RouterConfig
from models_app.router.metrics import Metrics
from models_app.router.queueing import Doors, FairQueue, Waiter
from models_app.router.table import Key, ModelRoute, Target


def waiter(key_id: int, priority: int = 50) -> Waiter:
    key = Key(id=key_id, name=str(key_id), digest="", priority=priority)
    return Waiter(key, 0, asyncio.get_running_loop().create_future())


async def test_keys_take_turns() -> None:
    queue = FairQueue()
    busy = [waiter(1) for _ in range(3)]
    rare = waiter(2)
    for one in [*busy, rare]:
        queue.push(one)
    assert [queue.pop() for _ in range(4)] == [busy[0], rare, busy[1], busy[2]]


async def test_higher_priority_goes_first() -> None:
    queue = FairQueue()
    low, high = waiter(1, 10), waiter(2, 90)
    queue.push(low)
    queue.push(high)
    assert [queue.pop(), queue.pop()] == [high, low]


async def test_who_left_is_not_in_the_queue() -> None:
    queue = FairQueue()
    first, second = waiter(1), waiter(1)
    queue.push(first)
    queue.push(second)
    queue.remove(first)
    queue.remove(first)
    assert len(queue) == 1
    assert queue.pop() is second
    queue.remove(second)
    assert len(queue) == 0


async def test_place_given_to_who_just_left_is_given_on() -> None:
    doors = Doors(RouterConfig(), Metrics(), None)
    target = Target(1, "http://127.0.0.1:1", "127.0.0.1", 1, "")
    key = Key(id=1, name="k", digest="")
    door = doors.of(ModelRoute("m", max_concurrency=1, targets=(target,)))
    assert door.try_enter()
    first, second = door.line_up(key, 0), door.line_up(key, 0)
    assert not door.try_enter()
    door.leave()
    assert first.future.done()
    assert not second.future.done()
    door.step_out(first)
    assert second.future.done()
    assert door.inflight == 1


async def test_places_taken_in_other_processes_count() -> None:
    doors = Doors(RouterConfig(), Metrics(), None)
    target = Target(1, "http://127.0.0.1:1", "127.0.0.1", 1, "")
    door = doors.of(ModelRoute("m", max_concurrency=2, targets=(target,)))
    doors.elsewhere({"m": 2})
    assert not door.try_enter()
    waiting = door.line_up(Key(id=1, name="k", digest=""), 0)
    doors.elsewhere({"m": 1})
    assert waiting.future.done()
    assert doors.capped() == {"m": 1}
