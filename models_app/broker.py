"""Redis/Valkey beside Celery: one client with short limits, leases of looking chains, small shared values.

Nothing here is the truth: every caller goes on when the broker is away.
"""

from __future__ import annotations

import functools
import logging
import secrets

import redis
from celery import current_app
from django.conf import settings
from redis.backoff import NoBackoff
from redis.retry import Retry

from models_app.errors import BrokerAway

log = logging.getLogger(__name__)

AWAY = "The message broker (Redis/Valkey) does not answer; nothing was started. Try again when it is back."
#: A chain whose next look is later than this is taken for dead, and a hint may start another.
_LEASE_MS = 5000


@functools.cache
def _client(url: str) -> redis.Redis:
    return redis.Redis.from_url(
        url, socket_timeout=1, socket_connect_timeout=1, retry=Retry(NoBackoff(), 0), health_check_interval=30
    )


def client() -> redis.Redis | None:
    """The shared client; None where the site runs without Redis (the fast tests use Celery's memory transport)."""
    if str(current_app.conf.broker_url).startswith("memory:"):
        return None
    return _client(settings.REDIS_URL)


def require() -> None:
    """Raise BrokerAway within about two seconds when the broker is away; called before anything is written."""
    connection = client()
    if connection is None:
        return
    try:
        connection.ping()
    except (redis.RedisError, OSError) as exc:
        raise BrokerAway(AWAY) from exc


def chain_hold(name: str, key: int | str, token: str) -> str | None:
    """Hold the chain of looks ``name`` at ``key``; returns the token to pass on, None when another chain runs.

    A hint comes without a token: it starts a chain only when none is alive. So lost messages are made good by hints
    and doubled hints do not double the looking.
    """
    connection = client()
    mine = token or secrets.token_hex(8)
    if connection is None:
        return mine
    slot = f"sardeenz:chain:{name}:{key}"
    try:
        if connection.set(slot, mine, nx=True, px=_LEASE_MS):
            return mine
        held = connection.get(slot)
        if isinstance(held, bytes) and held.decode() == mine:
            connection.pexpire(slot, _LEASE_MS)
            return mine
    except (redis.RedisError, OSError) as exc:
        log.warning("chain %s not held: %s", slot, exc)
        return mine
    return None


def chain_drop(name: str, key: int | str) -> None:
    """The chain has come to its end: the next hint may start one at once."""
    connection = client()
    if connection is None:
        return
    try:
        connection.delete(f"sardeenz:chain:{name}:{key}")
    except (redis.RedisError, OSError) as exc:
        log.warning("chain %s:%s not dropped: %s", name, key, exc)


def once_in(name: str, seconds: float) -> bool:
    """Whether nobody did ``name`` in the last ``seconds``; the one who gets True does it. True when nobody can say."""
    connection = client()
    if connection is None:
        return True
    try:
        return bool(connection.set(f"sardeenz:once:{name}", b"1", nx=True, px=int(seconds * 1000)))
    except (redis.RedisError, OSError) as exc:
        log.warning("turn %s not taken: %s", name, exc)
        return True
