"""From *wanted* to *ready*: launch, place, start, probe. Each step is short, claims first, and may run twice."""

from __future__ import annotations

from collections.abc import Sequence

from gpus_app.models import Host
from models_app.models import Instance, Model


def model_launch(
    model: Model,
    *,
    actor: str,
    replicas: int | None = None,
    host: Host | str | None = None,
    gpu_uuids: Sequence[str] | None = None,
    anyway: bool = False,
) -> list[Instance]:
    """Make the missing replicas; live ones are returned as they are, so that two clicks make one instance.

    ``anyway`` starts although the memory does not suffice by our figures. Raises BrokerAway before anything is written,
    DoesNotFit with numbers, Conflict (instance cap, no host), InvalidInput (unknown host or GPUs).
    """
    raise NotImplementedError


def instance_place(instance_id: int) -> bool:
    """Choose host and GPUs and reserve the bytes in one transaction: pending → scheduled. Control worker."""
    raise NotImplementedError


def instance_start(instance_id: int) -> bool:
    """Claim (scheduled → starting) unless another start is under way on a shared GPU; then exec. Host worker."""
    raise NotImplementedError


def instance_probe(instance_id: int) -> bool:
    """Look once at a starting or running engine: stage, readiness, end. True: look again soon. Host worker."""
    raise NotImplementedError


def instance_restart(instance: Instance, *, actor: str, force: bool = False) -> Instance:
    """Drain, stop and start again with the model's saved options; a stopped or failed instance just starts."""
    raise NotImplementedError
