"""What must be loaded in every Django process: the Celery application and the system checks."""

from __future__ import annotations

from django.apps import AppConfig


class SardeenzSiteConfig(AppConfig):
    name = "sardeenz_site"
    verbose_name = "Sardeenz"

    def ready(self) -> None:
        # Here and not in the package's __init__: the launcher and the router import the package and need neither.
        from sardeenz_site import celery, checks  # importing celery makes its application the current one

        celery.app.set_default()
        checks.register_checks()
