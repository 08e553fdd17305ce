"""System checks: what ``manage.py check`` (and ``check --deploy``) finds wrong with the settings of an installation."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register

from models_app.engines.environment import extra_names
from sardeenz_site import env
from sardeenz_site.health import check_broker

#: Every start runs what carries it; Django's own checks import the whole site and are for ``make lint``.
TAG = "sardeenz"
#: Read by the launcher and by the engines' own rooms, not by the settings.
OTHER_NAMES = frozenset(
    {
        "SARDEENZ_ADMIN_PASSWORD",
        "SARDEENZ_ENGINE_REQUIRED",
        "SARDEENZ_ENGINE_TOKEN_FILE",
        "SARDEENZ_ENGINE_VENV",
        "SARDEENZ_INITIAL_LIMIT_BYTES",
        "SARDEENZ_INSTANCE",
        "SARDEENZ_TEST_DB",
        "SARDEENZ_TEST_ROOT",
        "SARDEENZ_VENV",
    }
)


def unknown_names(environ: Any = os.environ) -> list[str]:
    return sorted(
        name for name in environ if name.startswith("SARDEENZ_") and name not in env.KNOWN and name not in OTHER_NAMES
    )


def check_names(**_: Any) -> list[CheckMessage]:
    """A misspelt variable is a setting that silently keeps its default."""
    found: list[CheckMessage] = []
    for name in unknown_names():
        near = difflib.get_close_matches(name, env.KNOWN, n=1)
        hint = f"Did you mean {near[0]}?" if near else "README lists every setting."
        found.append(Warning(f"{name} is set, but there is no such setting.", hint=hint, id="sardeenz.W001"))
    return found


def check_engine_env(**_: Any) -> list[CheckMessage]:
    """Names that no engine may get, although they were asked for: said here, kept out in any case."""
    _names, refused = extra_names(",".join(settings.SARDEENZ_ENGINE_ENV))
    return [Warning(sentence, hint="Take the name out.", id="sardeenz.W003") for sentence in refused]


def check_layer(**_: Any) -> list[CheckMessage]:
    """The in-memory layer works inside one process only: workers could never reach a browser."""
    backend = settings.CHANNEL_LAYERS["default"]["BACKEND"]
    if "InMemory" in backend and settings.CELERY_BROKER_URL != "memory://":
        return [Error("The channel layer is in memory, so live updates cannot cross processes.", id="sardeenz.E001")]
    return []


def check_single_host(*, databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """SQLite is a file on one machine. Hosts that report to it from elsewhere would need it on a network disk."""
    from django.db import DatabaseError, connection

    from gpus_app.models import Host

    if not databases or connection.vendor != "sqlite":
        return []
    try:
        others = list(Host.objects.exclude(name=settings.SARDEENZ_HOST_NAME).values_list("name", flat=True)[:3])
    except DatabaseError:  # not migrated yet
        return []
    if not others:
        return []
    return [
        Error(
            f"The database is SQLite, but there are other hosts too ({', '.join(others)}).",
            hint="Set DATABASE_URL to a PostgreSQL server that every host reaches.",
            id="sardeenz.E002",
        )
    ]


def check_redis(**_: Any) -> list[CheckMessage]:
    try:
        check_broker()
    except Exception as exc:
        return [Error(f"Redis/Valkey at REDIS_URL does not answer: {exc}", id="sardeenz.E003")]
    return []


def check_deployment(**_: Any) -> list[CheckMessage]:
    found: list[CheckMessage] = []
    if settings.DEBUG:
        found.append(Error("SARDEENZ_DEBUG is on: error pages would show settings and code.", id="sardeenz.E004"))
    if "*" in settings.ALLOWED_HOSTS:
        found.append(Warning("SARDEENZ_ALLOWED_HOSTS holds *: any site may claim to be this one.", id="sardeenz.W002"))
    return found


def register_checks() -> None:
    register(check_names, TAG)
    register(check_engine_env, TAG)
    register(check_layer, TAG)
    register(check_single_host, TAG, Tags.database)
    register(check_redis, TAG, deploy=True)
    register(check_deployment, TAG, deploy=True)
