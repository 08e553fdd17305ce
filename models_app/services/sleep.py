"""Sleep and wake: drain first, then the engine sleeps; before waking, room is checked; a failed wake stays asleep."""

from __future__ import annotations

from models_app.models import Instance


def instance_sleep(instance: Instance, *, actor: str, level: int | None = None, force: bool = False) -> Instance:
    """Put a ready instance to sleep (level 1: weights to host memory; 2: weights dropped). Idempotent.

    Requests in flight finish first; when they do not within the drain limit, it stays ready, unless ``force``.
    Raises Conflict (no sleep mode, not ready), BrokerAway before anything is written.
    """
    raise NotImplementedError


def instance_wake(instance: Instance, *, actor: str) -> Instance:
    """Wake a sleeping instance. Idempotent. Raises DoesNotFit with numbers, Conflict, BrokerAway."""
    raise NotImplementedError


def sleep_apply(instance_id: int) -> None:
    """A drained instance goes to sleep: draining → sleeping, on the engine's word. Host worker."""
    raise NotImplementedError


def wake_apply(instance_id: int) -> None:
    """Check the room, claim (sleeping → starting), wake; readiness is then probed. Host worker."""
    raise NotImplementedError
