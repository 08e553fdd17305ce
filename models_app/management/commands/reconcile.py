"""Reconcile this host, and with --control the whole fleet, once and now, without going through the broker."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from models_app import selectors
from models_app.services.plans.control import reconcile_control
from models_app.services.plans.reconcile import reconcile_host


class Command(BaseCommand):
    help = "Bring rows and processes of this host in line, once. With --control also what the control worker does."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--control", action="store_true")

    def handle(self, *args: Any, **options: Any) -> None:
        reconcile_host(settings.SARDEENZ_HOST_NAME)
        if options["control"]:
            reconcile_control()
        for row in selectors.instances_for_dashboard().live():
            self.stdout.write(f"{row}  {row.state}  {row.reason}")
