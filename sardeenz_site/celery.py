"""The Celery application; its settings stand in ``settings/celery.py``."""

from __future__ import annotations

import os
import warnings

from celery import Celery
from celery.platforms import SecurityWarning

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sardeenz_site.settings")

# Whoever starts Sardeenz as root knows it; JSON is all that our workers read.
warnings.filterwarnings("ignore", category=SecurityWarning)

app = Celery("sardeenz")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
