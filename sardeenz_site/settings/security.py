"""Secret key, allowed hosts, cookies, and what a browser may do on our pages."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
from pathlib import Path

from sardeenz_site.env import env_bool, env_int, env_list, env_secret, env_str
from sardeenz_site.settings.paths import SARDEENZ_HOME

DEBUG = env_bool("SARDEENZ_DEBUG", False)


def secret_key(home: Path) -> str:
    """SECRET_KEY, or a key made at the first start and kept in SARDEENZ_HOME, readable by its owner only."""
    given = env_secret("SECRET_KEY")
    if given is not None:
        return given
    file = home / "secret_key"
    if not file.exists():
        # Written beside it and linked into place: several processes start at once and must end with the same whole key.
        descriptor, mine = tempfile.mkstemp(dir=home, prefix=".secret_key.")  # 0600
        with os.fdopen(descriptor, "w") as out:
            out.write(secrets.token_urlsafe(50))
        with contextlib.suppress(FileExistsError):
            file.hardlink_to(mine)
        Path(mine).unlink()
    return file.read_text(encoding="utf-8").strip()


SECRET_KEY = secret_key(SARDEENZ_HOME)


def _own_names() -> list[str]:
    """Names under which this machine's pages may be asked for when nothing is set: never a wildcard."""
    names = ["localhost", "127.0.0.1", "[::1]", socket.gethostname().lower()]
    host = env_str("HOST", "127.0.0.1")
    if host not in ("0.0.0.0", "::", *names):  # noqa: S104 - compared, not bound
        names.append(f"[{host}]" if ":" in host else host)
    return names


ALLOWED_HOSTS = env_list("SARDEENZ_ALLOWED_HOSTS", _own_names())
CSRF_TRUSTED_ORIGINS = env_list("SARDEENZ_TRUSTED_ORIGINS", [])
TRUSTED_PROXIES = env_list("SARDEENZ_TRUSTED_PROXIES", [])  # addresses or networks whose X-Forwarded-For is believed
LOGIN_FAILURES_PER_MINUTE = env_int("SARDEENZ_LOGIN_FAILURES_PER_MINUTE", 5, minimum=1, maximum=1000)
METRICS_PUBLIC = env_bool("SARDEENZ_METRICS_PUBLIC", False)

_HTTPS = env_bool("SARDEENZ_HTTPS", False)
SESSION_COOKIE_NAME = "sardeenz_session"
CSRF_COOKIE_NAME = "sardeenz_csrf"
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
CSRF_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_AGE = 12 * 3600
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = _HTTPS
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https") if _HTTPS else None
SECURE_HSTS_SECONDS = 31536000 if _HTTPS else 0
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
SECURE_CROSS_ORIGIN_OPENER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"

AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 10}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
