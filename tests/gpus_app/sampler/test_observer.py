"""One look: what a host's record says of sound, starting, lost and foreign things."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpus_app.probes.sim_ledger import Ledger
from gpus_app.probes.simulated import SimulatedProbe
from gpus_app.sampler import observer as observer_module
from gpus_app.sampler.observer import Hint, Observer
from gpus_app.sampler.record import GpuPart, InstancePart
from tests.gpus_app.fake_host import GIB, MIB, FakeEngine, FakeHost, metrics_text, write_segment


class World:
    """A fake host with an observer on it and one engine that answers."""

    def __init__(self, root: Path, *, gpus: int = 1) -> None:
        self.host = FakeHost(root, gpus=gpus)
        self.observer = self.new_observer()
        self.engines: list[FakeEngine] = []

    def new_observer(self) -> Observer:
        return Observer(
            host_name="host-a", probe=SimulatedProbe(self.host.sim), run_dir=self.host.runs, shm=self.host.shm
        )

    def engine(self, **values: Any) -> FakeEngine:
        engine = FakeEngine(**values)
        self.engines.append(engine)
        return engine

    def serve(
        self, attempt_id: int = 1, *, limit: int = 8 * GIB, used: int = GIB, held: int = 5 * GIB, **values: Any
    ) -> int:
        """An engine that runs, answers and has a segment; its pid."""
        core = self.host.process(attempt_id, values.get("instance_id", attempt_id))
        uuids = values.get("uuids") or self.host.uuids[:1]
        self.host.hold(core.pid, dict.fromkeys(uuids, held))
        engine = self.engine(metrics=metrics_text(running=2), status=status(limit))
        self.host.attempt(attempt_id, pid=core.pid, port=engine.port, **values)
        write_segment(self.host.shm, self.host.ipc(attempt_id, values.get("instance_id")), limit, used, 320 * MIB)
        return core.pid

    def gpu(self, index: int = 0) -> GpuPart:
        return self.observer.look().record["gpus"][index]

    def one(self) -> InstancePart:
        (part,) = self.gpu()["instances"]
        return part

    def close(self) -> None:
        self.observer.close()
        for engine in self.engines:
            engine.close()
        self.host.close()


def status(limit: int, *, drift: int | None = None, capacity: int = 20 * GIB) -> dict[str, Any]:
    return {"segments": [{"capacity_bytes": capacity, "limit_bytes": limit, "drift_bytes": drift}]}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def test_a_serving_instance_is_shown_with_all_its_parts(world: World) -> None:
    world.serve(3, instance_id=9, name="qwen", replica=1)
    world.one()
    part = world.one()
    assert (part["id"], part["name"], part["replica"], part["state"]) == (9, "qwen", 1, "ok")
    assert (part["limit"], part["used"], part["prealloc"], part["capacity"]) == (8 * GIB, GIB, 320 * MIB, 20 * GIB)
    assert part["resident"] == 5 * GIB
    assert part["baseline"] == 5 * GIB - GIB - 320 * MIB
    assert (part["running"], part["waiting"], part["preemptions"], part["sleep_state"]) == (2, 0, 0, "awake")
    assert part["drift"] is None and part["metrics_age_s"] is not None


def test_the_record_says_when_and_by_whom(world: World) -> None:
    one, two = world.observer.look(lag_s=0.25).record, world.observer.look().record
    assert (one["type"], one["host"], one["seq"], two["seq"]) == ("sample", "host-a", 1, 2)
    assert one["sampler"]["lag_s"] == 0.25 and one["sampler"]["took_s"] >= 0
    assert abs(one["t"] - time.time()) < 60


def test_memory_of_others_is_named_and_told_apart(world: World) -> None:
    """A1: a program that is none of ours holds part of the card."""
    world.serve()
    stranger = world.host.process(None)
    world.host.hold(stranger.pid, {world.host.uuids[0]: 30 * GIB})
    gpu = world.gpu()
    assert gpu["other"] == 30 * GIB
    assert [(row["pid"], row["bytes"]) for row in gpu["other_processes"]] == [(stranger.pid, 30 * GIB)]
    assert gpu["used"] == 35 * GIB


def test_only_the_largest_strangers_are_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer_module, "MOST_OTHERS", 2)
    for number in range(1, 5):
        world.host.hold(world.host.process(None).pid, {world.host.uuids[0]: number * GIB})
    gpu = world.gpu()
    assert [row["bytes"] for row in gpu["other_processes"]] == [4 * GIB, 3 * GIB]
    assert gpu["other"] == 10 * GIB


def test_a_stranger_in_dev_shm_is_no_instance(world: World) -> None:
    """C6, SZ-084: 24 bytes of somebody else's, even with our prefix, are not shown as an instance."""
    (world.host.shm / "anything").write_bytes(b"x" * 24)
    write_segment(world.host.shm, world.host.ipc(77), GIB, GIB)
    record = world.observer.look().record
    assert record["gpus"][0]["instances"] == []


def test_a_segment_of_ours_without_an_engine_is_listed_as_stale(world: World) -> None:
    """C12, SZ-081: left over after a crash; it counts for nothing."""
    world.serve(1)
    write_segment(world.host.shm, world.host.ipc(77), GIB, GIB)
    record = world.observer.look().record
    assert record["stale_segments"] == [world.host.ipc(77)]
    assert [part["id"] for part in record["gpus"][0]["instances"]] == [1]


def test_an_engine_is_starting_until_it_answers(world: World) -> None:
    core = world.host.process(1)
    world.host.attempt(1, pid=core.pid, port=1)
    assert world.one()["state"] == "starting"
    write_segment(world.host.shm, world.host.ipc(1), GIB, 0)
    part = world.one()
    assert part["state"] == "starting" and part["limit"] == GIB and part["running"] is None


def test_an_engine_without_kvcached_has_no_segment(world: World) -> None:
    world.serve()
    (world.host.shm / world.host.ipc(1)).unlink()
    world.one()
    part = world.one()
    assert part["state"] == "no_segment"
    assert (part["limit"], part["used"], part["resident"]) == (None, None, 5 * GIB)


def test_a_deleted_segment_is_lost_and_not_zero(world: World) -> None:
    """C5: ``kvctl delete`` on a live engine."""
    world.serve()
    world.one()
    (world.host.shm / world.host.ipc(1)).unlink()
    look = world.observer.look()
    (part,) = look.record["gpus"][0]["instances"]
    assert part["state"] == "lost" and part["limit"] is None and part["used"] is None
    assert Hint("drift", 1) in look.hints


def test_a_segment_made_anew_with_limit_zero_is_lost_too(world: World) -> None:
    """C5, E7: kvcached recreates a deleted file with total 0."""
    world.serve()
    world.one()
    write_segment(world.host.shm, world.host.ipc(1), 0, GIB)
    part = world.one()
    assert part["state"] == "lost" and part["limit"] is None and "no valid limit" in part["note"]


@pytest.mark.parametrize("content", [b"", b"x" * 23, b"x" * 100])
def test_a_file_of_another_size_under_our_name_is_unreadable(world: World, content: bytes) -> None:
    world.serve()
    (world.host.shm / world.host.ipc(1)).write_bytes(content)
    part = world.one()
    assert part["state"] == "unreadable" and "bytes" in part["note"]


def test_a_segment_that_may_not_be_read_is_unreadable(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.serve()

    def refuse(*args: object, **kwargs: object) -> None:
        raise observer_module.SegmentUnreadable("The segment belongs to another user and may not be read.")

    monkeypatch.setattr(observer_module.segments, "read_segment", refuse)
    part = world.one()
    assert part["state"] == "unreadable" and "another user" in part["note"]


def test_the_end_of_an_engine_is_told_at_once_and_once(world: World) -> None:
    world.serve()
    world.observer.look()
    world.host.status(1, pid=1, ended_at=time.time())
    assert world.observer.look().hints == [Hint("ended", 1)]
    assert world.observer.look().hints == []


def test_a_process_that_died_without_a_record_is_told_at_once(world: World) -> None:
    world.serve()
    world.observer.look()
    (process,) = world.host._processes
    process.kill()
    process.wait()
    assert world.observer.look().hints == [Hint("ended", 1)]
    assert world.observer.look().hints == []


def test_old_ends_are_no_news_to_a_new_sampler(world: World) -> None:
    world.host.attempt(1)
    world.host.status(1, pid=1, ended_at=time.time() - 3600)
    assert world.observer.look().hints == []


def test_memory_that_an_ended_engine_still_holds_is_shown_as_stale(world: World) -> None:
    pid = world.serve()
    world.observer.look()
    world.host.status(1, pid=pid, ended_at=time.time())
    world.observer.look()
    part = world.one()
    assert part["state"] == "stale" and part["resident"] == 5 * GIB and part["limit"] is None
    assert "not back yet" in part["note"]
    assert world.gpu()["other"] == 0


def test_totals_follow_load_and_unload(world: World) -> None:
    """SZ-080: load A, load B, unload A."""
    world.serve(1)
    assert world.gpu()["used"] == 5 * GIB
    world.serve(2)
    assert [part["id"] for part in world.gpu()["instances"]] == [1, 2]
    process = world.host._processes[0]
    process.kill()
    process.wait()
    world.host.status(1, pid=process.pid, ended_at=time.time())
    (world.host.shm / world.host.ipc(1)).unlink()
    gpu = world.gpu()
    assert [part["id"] for part in gpu["instances"]] == [2] and gpu["used"] == 5 * GIB
    assert (world.host.shm / world.host.ipc(2)).exists()


def test_pages_that_come_between_two_reads_are_not_taken_for_weights(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = world.serve(1, held=5 * GIB, used=GIB)
    baseline = 5 * GIB - GIB - 320 * MIB
    assert world.one()["baseline"] == baseline
    read = world.observer.probe.read

    def maps_after_the_segment_was_read() -> Any:
        world.host.hold(pid, {world.host.uuids[0]: 6 * GIB})
        readings = read()
        write_segment(world.host.shm, world.host.ipc(1), 8 * GIB, 2 * GIB - 200 * MIB, 320 * MIB)
        return readings

    monkeypatch.setattr(world.observer.probe, "read", maps_after_the_segment_was_read)
    part = world.one()
    assert part["resident"] == 6 * GIB
    assert part["baseline"] == baseline
    monkeypatch.undo()
    assert world.one()["baseline"] == 6 * GIB - (2 * GIB - 200 * MIB) - 320 * MIB  # it stands still: it counts


def test_with_no_engine_there_are_no_kv_figures(world: World) -> None:
    """SZ-081."""
    write_segment(world.host.shm, world.host.ipc(5), 8 * GIB, 3 * GIB)
    assert world.gpu()["instances"] == [] and world.gpu()["other"] == 0


def test_two_copies_of_one_model_are_two_instances(world: World) -> None:
    """SZ-086, SZ-089: each with its own segment and figures."""
    world.serve(1, name="qwen", replica=0, used=GIB)
    world.serve(2, name="qwen", replica=1, used=3 * GIB)
    parts = world.gpu()["instances"]
    assert [(p["id"], p["replica"], p["used"]) for p in parts] == [(1, 0, GIB), (2, 1, 3 * GIB)]
    assert len({p["ipc"] for p in parts}) == 2


def test_a_segment_counts_on_each_card_of_a_tensor_parallel_instance(tmp_path: Path) -> None:
    """E4, SZ-083: KV bytes are per GPU; each card shows its own resident bytes."""
    world = World(tmp_path, gpus=2)
    try:
        world.serve(1, uuids=world.host.uuids, used=2 * GIB)
        worker = world.host.process(1)
        world.host.hold(worker.pid, {world.host.uuids[1]: GIB})
        record = world.observer.look().record
        (first,), (second,) = (gpu["instances"] for gpu in record["gpus"])
        assert first["used"] == second["used"] == 2 * GIB
        assert (first["resident"], second["resident"]) == (5 * GIB, 6 * GIB)
    finally:
        world.close()


def test_an_engine_whose_process_the_driver_does_not_name_is_not_known_rather_than_zero(world: World) -> None:
    engine = world.engine(metrics=metrics_text())
    world.host.attempt(1, port=engine.port, pid=world.host.process(1).pid)
    write_segment(world.host.shm, world.host.ipc(1), 8 * GIB, GIB)
    world.host.hold(world.host.process(None).pid, {world.host.uuids[0]: 5 * GIB})
    part = world.one()
    assert part["resident"] is None and part["baseline"] is None and part["used"] == GIB


def test_one_segment_is_never_counted_for_two(world: World) -> None:
    """C4, C14, F6: two engines under one name."""
    world.serve(1)
    world.host.attempt(2, pid=world.host.process(2).pid, ipc=world.host.ipc(1))
    first, second = world.gpu()["instances"]
    assert first["used"] == GIB and second["used"] is None
    assert second["state"] == "unreadable" and "shares its segment with instance 1" in second["note"]


def test_a_card_in_error_says_so_and_the_other_goes_on(tmp_path: Path) -> None:
    world = World(tmp_path, gpus=2)
    try:
        world.serve(1)
        world.observer.look()
        Ledger(world.host.sim).change_gpu(world.host.uuids[0], fault="nvml_error")
        broken, sound = world.observer.look().record["gpus"]
        assert broken["error"] == "NVML: Unknown Error." and sound["error"] is None
        (part,) = broken["instances"]
        assert part["resident"] is None and part["used"] == GIB
    finally:
        world.close()


def test_tokens_per_second_come_from_the_counter(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.serve()
    world.engines[0].metrics = metrics_text(tokens=1000)
    world.one()
    world.engines[0].metrics = metrics_text(tokens=1500)
    part = world.one()
    assert part["gen_tokens"] == 1500 and part["gen_tokens_per_s"] is not None and part["gen_tokens_per_s"] > 0
    world.engines[0].metrics = metrics_text(tokens=10)  # the counter began anew
    assert world.one()["gen_tokens_per_s"] == 0


def test_numbers_of_a_silent_engine_are_shown_for_a_few_seconds_only(world: World) -> None:
    now = [0.0]
    world.observer._clock = lambda: now[0]
    world.observer._poll._clock = time.monotonic
    world.serve()
    world.observer.look()
    engine = world.observer._engines[1]
    assert engine.numbers is not None
    world.engines[0].token = "another"
    now[0] = engine.numbers_at + 3
    assert world.one()["running"] == 2
    now[0] = engine.numbers_at + observer_module.NUMBERS_LAST_S + 1
    part = world.one()
    assert part["running"] is None and part["state"] == "ok" and part["limit"] == 8 * GIB


def test_every_engine_gets_its_turn_when_there_are_many(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer_module, "MOST_ASKED", 1)
    world.serve(1)
    world.serve(2)
    world.observer.look()
    world.observer.look()
    assert [engine.requests.get("/metrics") for engine in world.engines] == [1, 1]


# -- drift -------------------------------------------------------------------------------------------------------------


def test_a_limit_written_by_a_stranger_is_seen_at_the_next_look(world: World) -> None:
    """A3: at once here means within a second of a sampler's time; issue: within 2 s."""
    world.serve()
    for _ in range(2):
        assert world.one()["drift"] is None
    write_segment(world.host.shm, world.host.ipc(1), 30 * GIB, GIB)
    world.engines[0].status = status(30 * GIB, drift=22 * GIB)
    look = world.observer.look()
    (part,) = look.record["gpus"][0]["instances"]
    assert part["drift"] == 30 * GIB and part["limit"] == 30 * GIB and part["capacity"] == 20 * GIB
    assert look.hints == [Hint("drift", 1)]


def test_a_standing_drift_is_told_again_now_and_then_and_ends_when_put_back(world: World) -> None:
    now = [100.0]
    world.observer._clock = lambda: now[0]
    world.serve()
    world.observer.look()
    world.observer.look()
    write_segment(world.host.shm, world.host.ipc(1), 30 * GIB, GIB)
    world.engines[0].status = status(30 * GIB, drift=22 * GIB)
    assert world.observer.look().hints == [Hint("drift", 1)]
    assert world.observer.look().hints == []
    now[0] += observer_module.HINT_AGAIN_S
    assert world.observer.look().hints == [Hint("drift", 1)]
    write_segment(world.host.shm, world.host.ipc(1), 8 * GIB, GIB)
    world.engines[0].status = status(8 * GIB)
    assert world.one()["drift"] is None


def test_a_limit_that_the_engine_set_itself_is_no_drift(world: World) -> None:
    world.serve()
    world.observer.look()
    write_segment(world.host.shm, world.host.ipc(1), 4 * GIB, GIB)
    world.engines[0].status = status(4 * GIB)
    look = world.observer.look()
    assert look.hints == [] and look.record["gpus"][0]["instances"][0]["drift"] is None


def test_the_status_is_not_asked_for_at_every_look(world: World) -> None:
    world.serve()
    for _ in range(6):
        world.observer.look()
    assert world.engines[0].requests["/kvcache/status"] == 1
    assert world.engines[0].requests["/metrics"] == 6


def test_an_engine_without_our_endpoints_is_read_all_the_same(world: World) -> None:
    """D9: 404 on /kvcache; limit and use come from the segment alone."""
    world.serve()
    world.engines[0].status = None
    for _ in range(4):
        part = world.one()
    assert part["state"] == "ok" and part["limit"] == 8 * GIB and part["capacity"] is None
    write_segment(world.host.shm, world.host.ipc(1), 4 * GIB, GIB)
    assert world.one()["limit"] == 4 * GIB
    assert world.engines[0].requests["/kvcache/status"] == 1


@pytest.mark.parametrize("answer", [None, {"segments": [{"total_size": 8 * GIB}]}])
def test_a_limit_that_changes_on_an_engine_that_keeps_no_watch_is_told_at_once(
    world: World, answer: dict[str, Any] | None
) -> None:
    """Neither stock engines nor the pull request's know who wrote a limit: the worker compares, within a second."""
    world.serve()
    world.engines[0].status = answer
    for _ in range(3):
        assert world.observer.look().hints == []
    for limit in (30 * GIB, 6 * GIB):
        write_segment(world.host.shm, world.host.ipc(1), limit, GIB)
        assert world.observer.look().hints == [Hint("drift", 1)]
        assert world.observer.look().hints == []


def test_a_new_sampler_finds_the_engines_that_run(world: World) -> None:
    """The sampler was killed and started again: same figures, nothing forgotten."""
    world.serve()
    world.observer.look()
    world.observer.close()
    world.observer = world.new_observer()
    world.one()
    part = world.one()
    assert part["state"] == "ok" and part["capacity"] == 20 * GIB and part["resident"] == 5 * GIB
