"""These tests run on uvloop, as the router does; ``test_plain_loop`` runs on asyncio's own loop, as under daphne."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from tests.models_app.router.support import FakeEngine, Router, model, running_router


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.stem == "test_plain_loop":
        return {"asyncio": asyncio.new_event_loop}
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    engine = await FakeEngine().start()
    yield engine
    await engine.stop()


@pytest.fixture
async def router(engine: FakeEngine) -> AsyncIterator[Router]:
    """A router whose one model ``m`` is served by ``engine``."""
    async with running_router(model("m", engine)) as router:
        yield router
