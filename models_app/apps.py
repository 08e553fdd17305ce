from __future__ import annotations

from django.apps import AppConfig


class ModelsAppConfig(AppConfig):
    name = "models_app"
    verbose_name = "Models and instances"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from models_app import permissions, route_table

        permissions.connect(self)
        route_table.connect()
