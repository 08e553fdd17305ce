"""Whether the broker answers, asked at most every two seconds per process however many pages look on."""

from __future__ import annotations

import time

from gpus_app import broker

_AGE_S = 2.0
_known: tuple[float, bool] | None = None


def broker_alive() -> bool:
    """Blocks for at most the broker client's own limit (half a second)."""
    global _known
    now = time.monotonic()
    if _known is not None and now - _known[0] < _AGE_S:
        return _known[1]
    try:
        alive = bool(broker.client().ping())
    except broker.BrokerErrors:
        alive = False
    _known = (now, alive)
    return alive
