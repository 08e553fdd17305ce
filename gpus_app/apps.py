"""The application."""

from __future__ import annotations

from django.apps import AppConfig


class GpusAppConfig(AppConfig):
    name = "gpus_app"
    verbose_name = "Hosts and GPUs"
    default_auto_field = "django.db.models.BigAutoField"
