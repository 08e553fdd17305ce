"""The outside services of the suite are real: a database with our options, a Valkey behind cache, layer and broker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from celery import current_app
from channels.layers import get_channel_layer
from django.conf import settings
from django.db import connection
from redis import Redis

from sardeenz_site.health import check_broker


@pytest.mark.django_db
def test_sqlite_connection_runs_every_pragma() -> None:
    if connection.vendor != "sqlite":
        pytest.skip("PostgreSQL has no pragmas")
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA journal_mode")
        assert cursor.fetchone() == ("wal",)
        cursor.execute("PRAGMA synchronous")
        assert cursor.fetchone() == (0,)  # 1 in service; off here for speed
    assert connection.transaction_mode == "IMMEDIATE"  # type: ignore[attr-defined]


@pytest.mark.django_db
def test_database_is_the_one_that_was_asked_for() -> None:
    assert connection.vendor == {"postgres": "postgresql"}.get(settings.TEST_DB, settings.TEST_DB)


def test_broker_layer_and_celery_reach_one_valkey(valkey: str) -> None:
    check_broker()

    async def there_and_back() -> Any:
        layer = get_channel_layer()
        assert layer is not None
        await layer.group_add("live", channel := await layer.new_channel())
        await layer.group_send("live", {"type": "hello"})
        return await asyncio.wait_for(layer.receive(channel), 5)

    assert asyncio.run(there_and_back()) == {"type": "hello"}
    current_app.send_task("sardeenz.nothing", queue="somewhere")
    with Redis.from_url(valkey) as client:
        assert client.llen("somewhere") == 1
