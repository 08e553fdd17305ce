"""For the fast test suite: eager-free tasks captured by fakes, in-memory layer, fast hasher."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("SARDEENZ_HOME", tempfile.mkdtemp(prefix="sardeenz-test-"))

from sardeenz_site.settings.base import *  # noqa: F403

PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
CHANNEL_LAYERS = {"default": {"BACKEND": "channels.layers.InMemoryChannelLayer"}}
CELERY_BROKER_URL = "memory://"
CELERY_TASK_ALWAYS_EAGER = False
