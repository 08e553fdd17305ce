"""Usage and metrics: added up, never lost, never many."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest

from models_app.router.metrics import Metrics
from models_app.router.metrics_share import MetricsFiles
from models_app.router.usage import Gaps, UsageBook, UsageRecord
from tests.models_app.router.support import Answer, FakeEngine, Request, Router, content, key, model, running_router


def test_usage_given_back_is_added_up() -> None:
    book = UsageBook()
    for _ in range(3):
        record = book.record(1, "k", "m")
        record.requests += 1
        record.first_token(0.02)
        gaps = Gaps()
        gaps.add(0.011)
        gaps.add(9.0)
        record.gaps(gaps.counts)
        book.give_back(book.take())
    (total,) = book.take()
    data = total.to_json()
    assert (data["requests"], data["ttft_ms_sum"]) == (3, 60)
    assert data["ttft_histogram"] == {"25": 3}
    assert data["inter_token_histogram"] == {"20": 3, "inf": 3}
    assert book.take() == []


def test_days_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_700_000_000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    book = UsageBook()
    book.record(1, "k", "m").requests += 1
    now[0] += 86_400
    book.record(1, "k", "m").requests += 1
    assert [(record.day, record.requests) for record in book.take()] == [("2023-11-14", 1), ("2023-11-15", 1)]


async def test_usage_is_kept_while_its_receiver_is_away(router: Router) -> None:
    tell = router.app._on_usage

    async def away(records: object) -> None:
        raise ConnectionError("no broker")

    router.app._on_usage = away
    for _ in range(3):
        await router.chat()
        await router.app._flush()
    router.app._on_usage = tell
    await router.app._flush()
    assert [record["requests"] for record in router.used] == [3]


async def test_a_router_that_ends_while_it_tells_usage_tells_it_to_the_end(engine: FakeEngine) -> None:
    """A cancelled call would lose what it was telling, or have it told twice."""
    told: list[int] = []
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(records: list[UsageRecord]) -> None:
        begun.set()
        await go_on.wait()
        told.extend(record.requests for record in records)

    async with running_router(model("m", engine)) as router:
        router.app._on_usage = slow
        await router.chat()
        await begun.wait()
        await router.chat()
        ending = asyncio.ensure_future(router.app.stop())
        await asyncio.sleep(0)
        go_on.set()
        await ending
        assert sum(told) == 2
        assert router.app.usage.take() == []


async def test_nothing_is_counted_for_who_has_no_key(router: Router) -> None:
    for number in range(10):
        await router.client.post("/v1/chat/completions", json={}, headers={"Authorization": f"Bearer {number}"})
    assert router.app.usage.take() == []


async def test_no_prompt_is_kept(engine: FakeEngine) -> None:
    import gc

    secret = "a prompt that nobody shall find " * 5
    async with running_router(model("m", engine), keys=[key()]) as router:
        for _ in range(20):
            await router.chat(padding=secret)
        engine.requests.clear()
        gc.collect()
        state = [vars(router.app), vars(router.app.usage), router.app.metrics.snapshot()]
        assert secret not in repr(state)
        assert router.app.buffered.held == 0


async def test_first_token_is_the_first_text_and_not_the_role(router: Router, engine: FakeEngine) -> None:
    """SZ-108."""

    async def slow_text(request: Request, answer: Answer) -> None:
        await answer.start()
        role = content("")
        role["choices"][0]["delta"] = {"role": "assistant", "content": ""}
        await answer.event(role)
        await asyncio.sleep(0.3)
        await answer.event(content("a"))
        await answer.event("[DONE]")
        await answer.end()

    engine.behaviour = slow_text
    assert (await router.chat(stream=True)).status_code == 200
    await router.wait_for(lambda: bool(router.used))
    assert router.used[0]["ttft_ms_sum"] >= 300


def test_documents_list_exactly_the_metrics_that_there_are() -> None:
    """SZ-117: and none has a name that an engine uses."""
    readme = (Path(__file__).resolve().parents[3] / "README.md").read_text()
    listed = set(re.findall(r"`(sardeenz_router_\w+)`", readme))
    assert listed == {one.name for one in Metrics().all()}


def test_histogram_is_in_seconds() -> None:
    metrics = Metrics()
    metrics.duration.observe(("m",), 0.02)
    text = metrics.render().decode()
    assert 'sardeenz_router_request_duration_seconds_sum{model="m"} 0.02' in text
    assert 'sardeenz_router_request_duration_seconds_bucket{model="m",le="0.025"} 1' in text
    assert 'sardeenz_router_request_duration_seconds_bucket{model="m",le="0.01"} 0' in text
    assert 'sardeenz_router_request_duration_seconds_count{model="m"} 1' in text


def test_label_values_are_escaped() -> None:
    metrics = Metrics()
    metrics.retries.add(('a"b\\c\nd',))
    assert 'model="a\\"b\\\\c\\nd"' in metrics.render().decode()


def test_text_is_what_prometheus_reads() -> None:
    from prometheus_client.parser import text_string_to_metric_families

    metrics = Metrics()
    metrics.requests.add(("m", "200"))
    metrics.first_byte.observe(("m",), 0.3)
    metrics.inflight.add(("m",))
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    assert families["sardeenz_router_requests"].samples[0].value == 1
    assert families["sardeenz_router_time_to_first_byte_seconds"].type == "histogram"
    assert all(name.startswith("sardeenz_router_") for name in families)


def test_processes_are_added_up_and_the_dead_keep_their_counts(tmp_path: Path) -> None:
    mine, theirs, dead = Metrics(), Metrics(), Metrics()
    for metrics in (mine, theirs, dead):
        metrics.requests.add(("m", "200"))
        metrics.inflight.add(("m",))
        metrics.first_byte.observe(("m",), 0.3)
    group = os.getpid()
    MetricsFiles(tmp_path, group=group, pid=os.getppid()).write(theirs)
    MetricsFiles(tmp_path, group=group, pid=2**22 - 7).write(dead)
    files = MetricsFiles(tmp_path, group=group)
    files.write(mine)
    text = mine.render(files.others(mine)).decode()
    assert 'sardeenz_router_requests_total{model="m",code="200"} 3' in text
    assert 'sardeenz_router_inflight_requests{model="m"} 2' in text
    assert 'sardeenz_router_time_to_first_byte_seconds_count{model="m"} 3' in text


def test_files_of_an_earlier_router_are_removed(tmp_path: Path) -> None:
    old = MetricsFiles(tmp_path, group=2**22 - 9, pid=1)
    old.write(Metrics())
    MetricsFiles(tmp_path, group=os.getpid())
    assert not old.folder.exists()


def test_broken_file_of_a_neighbour_is_passed_over(tmp_path: Path) -> None:
    files = MetricsFiles(tmp_path, group=os.getpid())
    (files.folder / "1.json").write_text("{half")
    assert files.others(Metrics()) == []
