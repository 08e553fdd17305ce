"""Tasks of this app: fetch nothing, call a service."""

from __future__ import annotations

from celery import shared_task

from gpus_app.services import samples_prune


@shared_task(name="gpus_app.prune", time_limit=300)
def prune() -> int:
    """Delete readings past their time; safe to run twice."""
    return samples_prune()
