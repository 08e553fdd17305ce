"""The Celery application; its settings stand in ``settings/celery.py``."""

from __future__ import annotations

import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sardeenz_site.settings")

app = Celery("sardeenz")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
