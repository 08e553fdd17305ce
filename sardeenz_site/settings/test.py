"""For the test suite: nothing of the developer's environment, a home that is thrown away, a fast hasher.

``SARDEENZ_TEST_DB=postgres`` runs on a real PostgreSQL (``tests/conftest.py`` starts it), else on a SQLite file with
nearly the options of service.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

_KEPT = ("SARDEENZ_TEST_DB", "SARDEENZ_TEST_ROOT", "SARDEENZ_ENGINE_VENV", "SARDEENZ_ENGINE_REQUIRED")
for _name in [*os.environ]:
    if _name.startswith("SARDEENZ_") and _name not in _KEPT:
        del os.environ[_name]
for _name in ("DATABASE_URL", "REDIS_URL", "SECRET_KEY", "HF_TOKEN", "HOST", "PORT", "ROUTER_PORT"):
    os.environ.pop(_name, None)
    os.environ.pop(f"{_name}_FILE", None)
os.environ["SARDEENZ_ENV_FILE"] = os.devnull
os.environ["SARDEENZ_ENGINE"] = "simulated"

# The first process makes the folder and removes it; xdist's workers inherit its name.
if "SARDEENZ_TEST_ROOT" not in os.environ:
    os.environ["SARDEENZ_TEST_ROOT"] = tempfile.mkdtemp(prefix="sz-test-")
    atexit.register(shutil.rmtree, os.environ["SARDEENZ_TEST_ROOT"], ignore_errors=True)
TEST_ROOT = Path(os.environ["SARDEENZ_TEST_ROOT"])
_worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
os.environ["SARDEENZ_HOME"] = str(TEST_ROOT / _worker)
os.environ["SARDEENZ_HOST_NAME"] = "testhost"

from sardeenz_site.settings.base import *  # noqa: E402, F403
from sardeenz_site.settings.base import DATABASES  # noqa: E402
from sardeenz_site.settings.paths import SARDEENZ_HOME  # noqa: E402

#: Where conftest starts PostgreSQL: its socket lies here too.
POSTGRES_FOLDER = Path(tempfile.gettempdir()) / f"{TEST_ROOT.name}-pg"
TEST_DB = os.environ.get("SARDEENZ_TEST_DB", "sqlite")
if TEST_DB == "postgres":
    DATABASES["default"] = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        "USER": "postgres",
        "HOST": str(POSTGRES_FOLDER),
    }
else:
    # A file and not memory: threads and child processes of a test see the same rows, with the same locks as in service.
    DATABASES["default"]["TEST"] = {"NAME": str(SARDEENZ_HOME / "test.sqlite3")}
    DATABASES["default"]["OPTIONS"]["init_command"] = "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF"

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
CHANNEL_LAYERS = {"default": {"BACKEND": "channels.layers.InMemoryChannelLayer"}}
CELERY_BROKER_URL = "memory://"
