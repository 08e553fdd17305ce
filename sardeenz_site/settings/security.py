"""Secret key, allowed hosts, cookies."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from sardeenz_site.env import env_bool, env_list, env_path, env_secret

DEBUG = env_bool("SARDEENZ_DEBUG", False)


def _secret_key() -> str:
    """SECRET_KEY, or a key made at the first start and kept in SARDEENZ_HOME, readable by its owner only."""
    given = env_secret("SECRET_KEY")
    if given:
        return given
    home = env_path("SARDEENZ_HOME", Path(__file__).resolve().parent.parent.parent / "var")
    file = home / "secret_key"
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return file.read_text().strip()
    with os.fdopen(descriptor, "w") as out:
        key = secrets.token_urlsafe(50)
        out.write(key)
    return key


SECRET_KEY = _secret_key()
ALLOWED_HOSTS = env_list("SARDEENZ_ALLOWED_HOSTS", ["localhost", "127.0.0.1", "[::1]"])
CSRF_TRUSTED_ORIGINS = env_list("SARDEENZ_TRUSTED_ORIGINS", [])
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = env_bool("SARDEENZ_HTTPS", False)
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
