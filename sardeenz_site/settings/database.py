"""The database: SQLite for one machine, PostgreSQL for more, named by DATABASE_URL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dj_database_url
from django.core.exceptions import ImproperlyConfigured

SQLITE = "django.db.backends.sqlite3"
POSTGRESQL = "django.db.backends.postgresql"
# Read-then-write under WAL alone ends in "database is locked" as soon as two processes write; IMMEDIATE takes the
# write lock first and the time-out waits for it. Django splits init_command at semicolons.
SQLITE_OPTIONS: dict[str, Any] = {
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
}


def database_from_url(url: str, *, base: Path) -> dict[str, Any]:
    """Django's settings for ``url``; a relative SQLite file lies under ``base``. Raises ImproperlyConfigured."""
    scheme = url.partition("://")[0]
    if scheme not in ("sqlite", "postgres", "postgresql"):
        raise ImproperlyConfigured(f"DATABASE_URL: {scheme!r} is neither sqlite nor postgresql.")
    try:
        config: dict[str, Any] = dict(dj_database_url.parse(url, conn_max_age=0))
    except ValueError:  # its own text would show the address, password included
        raise ImproperlyConfigured(
            "DATABASE_URL is not an address (example: postgresql://user:password@host:5432/name; "
            "escape special characters of the password as in any URL)."
        ) from None
    options = config.setdefault("OPTIONS", {})
    if config["ENGINE"] == SQLITE:
        if config["NAME"] != ":memory:":
            config["NAME"] = str(base / config["NAME"])
        config["OPTIONS"] = {**SQLITE_OPTIONS, **options}
    else:
        config["OPTIONS"] = {"connect_timeout": 5, **options}
    return config
