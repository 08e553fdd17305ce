"""The application, and what it listens to once it is loaded."""

from __future__ import annotations

from django.apps import AppConfig


class ModelsAppConfig(AppConfig):
    name = "models_app"
    verbose_name = "Models and instances"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from gpus_app.events import acted
        from models_app import permissions, route_table
        from models_app.services.audit import host_act_audit

        permissions.connect(self)
        route_table.connect()
        acted.connect(host_act_audit, dispatch_uid="models_app.audit")
