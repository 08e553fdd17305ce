"""From *serving* to *gone*: the route leaves first, requests finish, the processes end, the memory is back."""

from __future__ import annotations

from models_app.models import Instance


def instance_stop(instance: Instance, *, actor: str, force: bool = False) -> Instance:
    """Stop in any phase; repeating it is harmless. ``force`` cuts requests in flight and skips the drain.

    Raises BrokerAway before anything is written when the engine has to be told.
    """
    raise NotImplementedError


def stop_all(*, actor: str, force: bool = False) -> list[Instance]:
    """Stop every live instance; returns those that were asked to stop."""
    raise NotImplementedError


def instance_stop_step(instance_id: int) -> bool:
    """One look at a draining or stopping instance. True: look again soon. Host worker."""
    raise NotImplementedError
