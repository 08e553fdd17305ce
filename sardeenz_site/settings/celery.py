"""Celery: short JSON tasks, early failure when the broker is away, one queue per host."""

from __future__ import annotations

from sardeenz_site.env import env_secret
from sardeenz_site.redis_url import celery_broker_url, redis_url
from sardeenz_site.settings.paths import SARDEENZ_HOME

REDIS_URL = redis_url(env_secret("REDIS_URL"), SARDEENZ_HOME)

CELERY_BROKER_URL = celery_broker_url(REDIS_URL)
CELERY_TASK_SERIALIZER = "json"
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_DEFAULT_QUEUE = "control"
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_TRANSPORT_OPTIONS = {
    "socket_timeout": 5,
    "socket_connect_timeout": 2,
    "visibility_timeout": 600,
    "max_retries": 1,
    "interval_start": 0,
    "interval_step": 0.2,
    "interval_max": 0.5,
}
CELERY_TASK_PUBLISH_RETRY_POLICY = {"max_retries": 1, "interval_start": 0, "interval_step": 0.2, "interval_max": 0.5}


def _every(seconds: float, task: str) -> dict[str, object]:
    """Expires a little under the period: a worker that was away does not catch up on what is past."""
    return {"task": task, "schedule": seconds, "options": {"queue": "control", "expires": seconds * 0.9}}


CELERY_BEAT_SCHEDULE: dict[str, dict[str, object]] = {
    "reconcile-control": _every(2.0, "models_app.reconcile_control"),
    "rebalance": _every(3.0, "models_app.rebalance"),
    "leaks": _every(600.0, "models_app.leaks"),
    "publish-routes": _every(2.0, "models_app.publish_routes"),
    "prune-samples": _every(600.0, "gpus_app.prune"),
}
