"""Limits on a pool that behaves as kvcached 0.1.6 does: what is applied, deferred, refused, clamped and warned of."""

from __future__ import annotations

import fcntl
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models_app.kvcache_addon import limits, segment
from models_app.kvcache_addon.backend import LIMIT_KEYS, STATUS_KEYS
from models_app.kvcache_addon.engine_core import Addon
from models_app.kvcache_addon.wire import LimitOrder, Refused
from tests.models_app.kvcache_addon.fake_kvcached import FakeManager
from tests.models_app.kvcache_addon.fake_vllm import Engine

Make = Callable[..., tuple[Engine, Addon]]
BUNDLE = 2 * 2**20 * 28 * 2


def order(bundles: float, **more: Any) -> LimitOrder:
    return LimitOrder(size_bytes=int(bundles * BUNDLE), force=more.pop("force", True), **more)


def limit(addon: Addon, bundles: float, **more: Any) -> dict[str, Any]:
    assert addon.control is not None
    return addon.control.apply(order(bundles, **more))


def numbers(path: Path) -> list[float]:
    return [value / BUNDLE for value in struct.unpack("<qqq", path.read_bytes())]


def foreign(path: Path, bundles: float) -> None:
    """What kvctl does: the first number, nothing else."""
    path.write_bytes(struct.pack("<q", int(bundles * BUNDLE)) + path.read_bytes()[8:])


def fill(engine: Engine, requests: int = 10, tokens: int = 2000) -> None:
    """Running requests of so many tokens each: 2,000 tokens are 126 blocks, two bundles."""
    for _ in range(requests):
        engine.add(tokens, 1000)
    engine.steps(3)
    assert len(engine.scheduler.running) == requests


def test_limit_answer_has_every_key_of_the_contract(engine_with_pool: Make) -> None:
    _, addon = engine_with_pool()
    assert set(LIMIT_KEYS) == set(limit(addon, 20))


def test_status_has_every_key_of_the_contract(engine_with_pool: Make) -> None:
    _, addon = engine_with_pool()
    assert set(STATUS_KEYS) <= set(addon.status())


def test_limit_on_an_idle_engine_empties_the_reserve_at_once(engine_with_pool: Make, shm: Path) -> None:
    """A4: used 1, reserve 10, limit 3: stock kvcached does nothing until the next allocation."""
    engine, addon = engine_with_pool()
    fill(engine)
    engine.scheduler.finish_requests(list(engine.scheduler.requests), 6)  # type: ignore[arg-type]
    engine.steps(1)
    assert numbers(engine.manager.page_allocator.segment)[1:] == [1, 10]  # type: ignore[union-attr]
    answer = limit(addon, 3)
    assert answer["status"] == "applied"
    assert answer["freed_bytes"] == 10 * BUNDLE
    assert numbers(shm / "sz-test-i1-a1") == [3, 1, 0]


def test_limit_is_rounded_down_to_whole_bundles(engine_with_pool: Make) -> None:
    _, addon = engine_with_pool()
    answer = limit(addon, 12.9)
    assert (answer["limit_bytes"], answer["requested_bytes"]) == (12 * BUNDLE, int(12.9 * BUNDLE))
    assert answer["clamped"] is False


def test_limit_above_capacity_is_cut_to_it_and_said(engine_with_pool: Make, shm: Path) -> None:
    engine, addon = engine_with_pool(capacity=20)
    answer = limit(addon, 30)
    assert (answer["clamped"], answer["limit_bytes"]) == (True, 20 * BUNDLE)
    assert "capacity" in answer["warnings"][-1]
    assert numbers(shm / "sz-test-i1-a1")[0] == 20
    fill(engine, requests=9)
    assert max(engine.manager.page_allocator.mapped) < 20  # type: ignore[union-attr]


def test_starting_limit_can_be_ordered_back(engine_with_pool: Make) -> None:
    """A11: small, then the start-up value again: the pool grows again."""
    engine, addon = engine_with_pool(capacity=40)
    limit(addon, 8)
    answer = limit(addon, 40)
    assert (answer["status"], answer["effective_limit_bytes"]) == ("applied", 40 * BUNDLE)
    fill(engine, requests=15)


def test_limit_below_used_is_deferred_and_takes_nothing(engine_with_pool: Make, shm: Path) -> None:
    """A6: no running request is touched, the footprint falls as requests end, and the limit is applied in the end."""
    engine, addon = engine_with_pool()
    fill(engine)
    answer = limit(addon, 6)
    assert answer["status"] == "deferred"
    assert answer["overage_bytes"] == answer["used_bytes"] - 6 * BUNDLE
    assert answer["prealloc_bytes"] == 0
    assert len(engine.scheduler.running) == 10
    footprints = []
    while engine.scheduler.running and addon.status()["state"] != "applied":
        engine.scheduler.finish_requests([engine.scheduler.running[-1].request_id], 6)  # type: ignore[arg-type]
        footprints.append(sum(numbers(shm / "sz-test-i1-a1")[1:]))
    assert footprints == sorted(footprints, reverse=True)
    assert numbers(shm / "sz-test-i1-a1")[1] <= 6


def test_reserve_is_emptied_while_the_pool_shrinks(engine_with_pool: Make, shm: Path) -> None:
    """A6: stock kvcached keeps up to ten freed bundles mapped until the shrink is over."""
    engine, addon = engine_with_pool()
    fill(engine)
    limit(addon, 6)
    engine.scheduler.finish_requests([engine.scheduler.running[-1].request_id], 6)  # type: ignore[arg-type]
    assert addon.pool is not None
    assert addon.pool.manager.in_shrink
    assert numbers(shm / "sz-test-i1-a1")[2] == 0


def test_raise_reaches_a_starved_request_without_an_allocation(engine_with_pool: Make) -> None:
    """A5: stock kvcached applies a raised limit at the next allocation, which a starved engine never makes."""
    engine, addon = engine_with_pool()
    limit(addon, 2)
    request = engine.add(3000, 5)
    engine.steps(5)
    facts = addon.status()
    assert (facts["state"], facts["requests"]["starved_by"]) == ("starved", "limit")
    limit(addon, 50)
    engine.finish_all()
    assert request.output == [0, 1, 2, 3, 4]


def test_outdated_watched_limit_does_not_undo_a_raise(engine_with_pool: Make) -> None:
    """A5, the quieter way into it: right after a raise the next allocation still carries the old limit."""
    engine, addon = engine_with_pool()
    assert engine.manager is not None
    limit(addon, 2)
    engine.manager.page_allocator.watch()
    limit(addon, 50)
    engine.add(100, 3)
    engine.add(3000, 3)
    engine.finish_all()
    assert len(engine.scheduler.finished) == 2
    engine.manager.page_allocator.watch()
    assert engine.manager.page_allocator.total == 50


def test_outdated_watched_limit_does_not_undo_a_lowering(engine_with_pool: Make) -> None:
    engine, addon = engine_with_pool()
    assert engine.manager is not None
    limit(addon, 60)
    engine.manager.page_allocator.watch()
    limit(addon, 10)
    engine.add(100, 2)
    engine.finish_all()
    assert engine.manager.page_allocator.total == 10


def test_foreign_limit_above_capacity_never_reaches_the_allocator(engine_with_pool: Make, shm: Path) -> None:
    """A3: capacity 20, a stranger writes 30: stock kvcached hands pages out twice. Put back at the next allocation."""
    engine, addon = engine_with_pool(capacity=20)
    assert engine.manager is not None
    for wanted in (6, 12):
        limit(addon, wanted)
        foreign(shm / "sz-test-i1-a1", 30)
        engine.manager.page_allocator.watch()
        for _ in range(2):
            engine.add(500, 40)
            engine.add(700, 40)
            engine.finish_all()
        assert engine.manager.page_allocator.total == wanted
        assert numbers(shm / "sz-test-i1-a1")[0] == wanted


def test_foreign_limit_above_capacity_is_put_back_by_status(engine_with_pool: Make, shm: Path) -> None:
    """A3: on an idle engine nothing allocates; a status does it, and still shows what was found."""
    _, addon = engine_with_pool(capacity=20)
    limit(addon, 10)
    foreign(shm / "sz-test-i1-a1", 30)
    assert addon.status()["drift_bytes"] == 20 * BUNDLE
    assert numbers(shm / "sz-test-i1-a1")[0] == 10
    assert addon.status()["drift_bytes"] is None


def test_foreign_limit_within_bounds_stands_and_shows_as_drift(engine_with_pool: Make, shm: Path) -> None:
    """A14: state and capacity may differ only visibly; nobody fights over the number."""
    engine, addon = engine_with_pool()
    assert engine.manager is not None
    limit(addon, 50)
    foreign(shm / "sz-test-i1-a1", 30)
    engine.manager.page_allocator.watch()
    engine.add(100, 2)
    engine.finish_all()
    facts = addon.status()
    assert facts["drift_bytes"] == -20 * BUNDLE
    assert (facts["limit_bytes"], facts["effective_limit_bytes"]) == (30 * BUNDLE, 30 * BUNDLE)
    assert facts["state"] == "pending"
    assert limit(addon, 50)["status"] == "applied"
    assert addon.status()["drift_bytes"] is None


@pytest.mark.parametrize("bundles", [0, -1, 0.5, 1])
def test_foreign_limit_below_the_hard_minimum_is_put_back(engine_with_pool: Make, shm: Path, bundles: float) -> None:
    """E7: 0 and negative limits hide the segment from kvctl, less than a bundle starves the engine for good."""
    engine, addon = engine_with_pool()
    assert engine.manager is not None
    limit(addon, 9)
    foreign(shm / "sz-test-i1-a1", bundles)
    engine.manager.page_allocator.watch()
    engine.add(100, 2)
    engine.finish_all()
    assert addon.status()["state"] == "applied"
    assert numbers(shm / "sz-test-i1-a1")[0] == 9


def test_deleted_segment_is_made_again_with_the_limit(engine_with_pool: Make, shm: Path) -> None:
    """C5: ``kvctl delete`` on a live engine."""
    engine, addon = engine_with_pool()
    limit(addon, 9)
    (shm / "sz-test-i1-a1").unlink()
    assert addon.status()["drift_bytes"] == -9 * BUNDLE
    assert numbers(shm / "sz-test-i1-a1") == [9, 1, 5]
    (shm / "sz-test-i1-a1").unlink()
    engine.add(100, 2)  # the engine writes first: a file with limit 0
    engine.finish_all()
    addon.status()
    assert numbers(shm / "sz-test-i1-a1")[0] == 9


def test_limit_without_watcher_is_applied_all_the_same(
    shm: Path, engine_with_pool: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A17: preallocation off also stops kvcached's watcher; said at start, and no matter here."""
    monkeypatch.setenv("KVCACHED_PAGE_PREALLOC_ENABLED", "false")
    _, addon = engine_with_pool()
    assert limit(addon, 3)["status"] == "applied"
    assert "preallocation is off" in addon.status()["warnings"][0]


def test_two_orders_at_once_leave_one_winner_that_both_can_see(engine_with_pool: Make) -> None:
    """A15, A18: an older revision is stale, the same one with another size a conflict; nothing is written for
    either."""
    engine, addon = engine_with_pool()
    limit(addon, 20, revision=7, by="ann")
    with pytest.raises(Refused) as conflict:
        limit(addon, 30, revision=7, by="bob")
    with pytest.raises(Refused) as stale:
        limit(addon, 30, revision=6, by="bob")
    assert (conflict.value.code, stale.value.code) == ("conflict", "stale")
    assert conflict.value.facts["last_change"]["by"] == "ann"
    assert engine.manager.page_allocator.total == 20  # type: ignore[union-attr]
    facts = addon.status()
    assert (facts["limit_revision"], facts["wanted_limit_bytes"]) == (7, 20 * BUNDLE)


def test_the_same_order_again_is_carried_out_again(engine_with_pool: Make) -> None:
    _, addon = engine_with_pool()
    assert limit(addon, 20, revision=7)["revision"] == 7
    assert limit(addon, 20, revision=7)["status"] == "applied"


def test_order_without_revision_takes_the_next_one(engine_with_pool: Make) -> None:
    _, addon = engine_with_pool()
    assert [limit(addon, 20)["revision"], limit(addon, 21)["revision"]] == [1, 2]


def test_limit_below_the_hard_minimum_cannot_be_forced(engine_with_pool: Make, shm: Path) -> None:
    _, addon = engine_with_pool()
    with pytest.raises(Refused) as refused:
        limit(addon, 1.9)
    assert (refused.value.status, refused.value.code) == (409, "below_hard_minimum")
    assert numbers(shm / "sz-test-i1-a1")[0] == 100


def test_limit_below_the_safety_floor_needs_force(engine_with_pool: Make, shm: Path) -> None:
    _, addon = engine_with_pool()
    floor = addon.floor()["safety_floor_bytes"]
    assert floor == 4 * BUNDLE  # 2,048 tokens: 128 blocks and the null block in 3 bundles, and one for fragmentation
    with pytest.raises(Refused) as refused:
        limit(addon, 3, force=False)
    assert refused.value.code == "below_safety_floor"
    assert refused.value.facts["safety_floor_bytes"] == floor
    assert numbers(shm / "sz-test-i1-a1")[0] == 100
    assert "below the safety floor" in limit(addon, 3)["warnings"][0]


def test_limit_below_a_waiting_requests_need_is_warned_of_and_the_request_named(engine_with_pool: Make) -> None:
    """A19: one that can never be scheduled blocks everyone behind it, with HTTP 200 and no token."""
    engine, addon = engine_with_pool()
    limit(addon, 6)
    long = engine.add(8000, 10)
    short = engine.add(50, 3)
    engine.steps(10)
    assert addon.floor()["safety_floor_bytes"] == 9 * BUNDLE
    with pytest.raises(Refused):
        limit(addon, 7, force=False)
    assert "below the safety floor" in limit(addon, 7)["warnings"][0]
    stuck = addon.status()["requests"]["stuck"]
    assert [(each["id"], each["needs_bytes"]) for each in stuck] == [(long.request_id, 8 * BUNDLE)]
    assert short.output == []
    assert addon.abort_stuck()["aborted"] == [long.request_id]
    assert engine.aborted == [(long.request_id, 0)]
    engine.finish_all()
    assert short.output == [0, 1, 2]


def test_limit_below_the_longest_context_is_warned_of(engine_with_pool: Make) -> None:
    _, addon = engine_with_pool()
    assert "full-context" in limit(addon, 8, force=False)["warnings"][0]
    assert limit(addon, 40, force=False)["warnings"] == []


def test_quarantined_pages_are_reported_and_the_order_refused(engine_with_pool: Make, shm: Path) -> None:
    engine, addon = engine_with_pool()
    engine.manager.page_allocator.quarantined.append(99)  # type: ignore[union-attr]
    with pytest.raises(Refused) as refused:
        limit(addon, 20)
    assert (refused.value.status, refused.value.code) == (409, "rejected")
    assert numbers(shm / "sz-test-i1-a1")[0] == 100
    assert "quarantine" in addon.status()["warnings"][-1]


def test_segment_that_somebody_keeps_locked_does_not_stop_the_limit(
    engine_with_pool: Make, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C9: the lock is asked for, never waited for; the pool has its limit, and the answer says what is missing."""
    monkeypatch.setattr(segment, "LOCK_PATIENCE_S", 0.01)
    engine, addon = engine_with_pool()
    with (shm / "sz-test-i1-a1").open("rb") as keeper:
        fcntl.flock(keeper, fcntl.LOCK_SH)
        answer = limit(addon, 20)
    assert answer["status"] == "pending"
    assert "could not be written" in answer["warnings"][-1]
    assert engine.manager.page_allocator.total == 20  # type: ignore[union-attr]
    assert limit(addon, 20)["status"] == "applied"


def test_initial_limit_is_in_force_when_the_engine_starts(engine_with_pool: Make, shm: Path, monkeypatch: Any) -> None:
    """A16: from the first moment the sum of the limits is what was planned."""
    monkeypatch.setenv("SARDEENZ_INITIAL_LIMIT_BYTES", str(12 * BUNDLE))
    _, addon = engine_with_pool()
    assert numbers(shm / "sz-test-i1-a1")[0] == 12
    facts = addon.status()
    assert (facts["state"], facts["limit_revision"], facts["last_change"]["by"]) == ("applied", 0, "launch")


@pytest.mark.parametrize(("given", "in_force"), [("5", 2), (str(10**15), 100), ("12GiB", 100), ("-3", 100)])
def test_odd_initial_limit_never_fails_a_start(
    engine_with_pool: Make, shm: Path, monkeypatch: pytest.MonkeyPatch, given: str, in_force: int
) -> None:
    monkeypatch.setenv("SARDEENZ_INITIAL_LIMIT_BYTES", given)
    _, addon = engine_with_pool()
    assert numbers(shm / "sz-test-i1-a1")[0] == in_force
    assert addon.status()["warnings"]


def test_initial_limit_waits_for_a_pool_that_has_no_page_yet(
    shm: Path, monkeypatch: pytest.MonkeyPatch, engine_with_pool: Make
) -> None:
    """On a full card kvcached waits without end for its first page; an order would stop EngineCore's thread with it."""
    monkeypatch.setenv("SARDEENZ_INITIAL_LIMIT_BYTES", str(12 * BUNDLE))
    monkeypatch.setattr(limits, "POOL_READY_PATIENCE_S", 0.0)
    monkeypatch.setattr(FakeManager, "_post_init_done", threading.Event(), raising=False)
    _, addon = engine_with_pool()
    with pytest.raises(Refused) as refused:
        limit(addon, 20)
    assert (refused.value.code, "the GPU is full" in refused.value.message) == ("unavailable", True)
    with pytest.raises(Refused, match="the GPU is full"):
        addon.trim()
    assert numbers(shm / "sz-test-i1-a1")[0] == 100
    FakeManager._post_init_done.set()  # type: ignore[attr-defined]
    addon.status()
    assert numbers(shm / "sz-test-i1-a1")[0] == 12


def test_card_filled_by_a_neighbour_shows_as_starved_by_the_gpu(engine_with_pool: Make) -> None:
    """E5: the engine survives, and it is not the limit's fault."""
    engine, addon = engine_with_pool()
    assert engine.manager is not None
    engine.manager.page_allocator.trim()
    engine.manager.page_allocator.physical_pages = 0
    engine.add(4000, 3)
    engine.steps(3)
    facts = addon.status()
    assert (facts["state"], facts["requests"]["starved_by"]) == ("starved", "gpu")
    assert facts["requests"]["stuck"] == []


def test_limit_drops_prefix_cache_before_it_touches_requests(engine_with_pool: Make) -> None:
    engine, addon = engine_with_pool(caching=True)
    for _ in range(6):
        engine.add(2000, 2)
    engine.finish_all()
    assert addon.status()["prefix_cached_bytes"] > 0
    answer = limit(addon, 4)
    assert (answer["status"], answer["preempted"]) == ("applied", None)


def test_limit_keeps_prefix_cache_that_fits(engine_with_pool: Make) -> None:
    engine, addon = engine_with_pool(caching=True)
    for _ in range(6):
        engine.add(2000, 2)
    engine.finish_all()
    limit(addon, 10)
    assert addon.status()["prefix_cached_bytes"] > 4 * BUNDLE
