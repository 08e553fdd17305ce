"""The composition root: the only room that knows every other."""

from __future__ import annotations

from sardeenz_site.celery import app as celery_app

__all__ = ["celery_app"]
