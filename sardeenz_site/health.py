"""``/healthz``: this process answers. ``/readyz``: so do the database and the broker it needs."""

from __future__ import annotations

from collections.abc import Callable

from django.conf import settings
from django.db import connection
from django.http import HttpRequest, JsonResponse
from django.views.decorators.http import require_safe
from redis import Redis

BROKER_LIMIT_S = 2.0


def check_database() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")


def check_broker() -> None:
    client: Redis = Redis.from_url(
        settings.REDIS_URL, socket_timeout=BROKER_LIMIT_S, socket_connect_timeout=BROKER_LIMIT_S
    )
    with client:
        client.ping()


@require_safe
def healthz(request: HttpRequest) -> JsonResponse:
    return JsonResponse({"status": "ok"})


@require_safe
def readyz(request: HttpRequest) -> JsonResponse:
    """200 when all answer, else 503; names what does not answer, never an address or a password."""
    checks: dict[str, Callable[[], None]] = {"database": check_database, "broker": check_broker}
    answers = {name: _answers(check) for name, check in checks.items()}
    ready = all(answers.values())
    return JsonResponse(
        {
            "status": "ok" if ready else "unavailable",
            "checks": {name: "ok" if fine else "does not answer" for name, fine in answers.items()},
        },
        status=200 if ready else 503,
    )


def _answers(check: Callable[[], None]) -> bool:
    try:
        check()
    except Exception:
        return False
    return True
