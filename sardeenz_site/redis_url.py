"""One REDIS_URL, in the spellings of those who read it. redis-py and the channel layer take it as it is."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from django.core.exceptions import ImproperlyConfigured

SCHEMES = ("redis", "rediss", "unix")
DEFAULT = "redis://127.0.0.1:6379/0"


def private_url_file(home: Path) -> Path:
    """Where the launcher writes the address of the private Valkey, for commands run beside it."""
    return home / "valkey" / "url"


def redis_url(given: str | None, home: Path) -> str:
    """REDIS_URL, else the private Valkey of this SARDEENZ_HOME, else the usual local one."""
    if given is None:
        try:
            return private_url_file(home).read_text(encoding="utf-8").strip() or DEFAULT
        except OSError:
            return DEFAULT
    if urlsplit(given).scheme not in SCHEMES:
        raise ImproperlyConfigured(
            "REDIS_URL must begin with redis://, rediss:// or unix:// (example: redis://:password@host:6379/0)."
        )
    return given


def celery_broker_url(url: str) -> str:
    """Celery writes a Unix socket as redis+socket:// and its database as virtual_host."""
    parts = urlsplit(url)
    if parts.scheme != "unix":
        return url
    database = parse_qs(parts.query).get("db", ["0"])[0]
    return f"redis+socket://{parts.path}?virtual_host={database}"
