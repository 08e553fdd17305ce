"""Another broker for Celery's producers of this process, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from celery import current_app


@contextmanager
def celery_broker(url: str) -> Iterator[None]:
    """Messages go to the broker at ``url`` inside the block.

    Celery keeps its pool of producers when the address changes: without being dropped it would go on sending to the
    broker of an earlier test, which may still be there and take them.
    """
    before = current_app.conf.broker_url
    current_app.conf.broker_url = url
    _drop()
    try:
        yield
    finally:
        current_app.conf.broker_url = before
        _drop()


def _drop() -> None:
    """Not by ``close``: tasks that are imported after that would not be registered."""
    current_app._pool = None
    current_app.amqp._producer_pool = None
