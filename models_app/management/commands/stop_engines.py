"""End the engines of this machine now, also with the broker and the workers away."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from models_app.services.lifecycle.shutdown import engines_stop


class Command(BaseCommand):
    help = "End the engines of this machine. What is wanted stays wanted: it starts again when Sardeenz does."
    requires_system_checks = []  # it must work in the middle of an end

    def add_arguments(self, parser: ArgumentParser) -> None:
        which = parser.add_mutually_exclusive_group(required=True)
        which.add_argument("--simulated", action="store_true", help="only simulated engines (the end of a demo)")
        which.add_argument("--all", action="store_true", help="every engine of this installation on this machine")
        parser.add_argument("--limit", type=float, default=5.0, help="seconds until SIGKILL (default 5)")

    def handle(self, *args: Any, **options: Any) -> None:
        kind = "simulated" if options["simulated"] else None
        ended = engines_stop(kind=kind, limit_s=max(options["limit"], 0.0))
        what = "simulated engine" if kind else "engine"
        if ended.left:
            raise CommandError(f"{ended.stopped} stopped; processes that would not end: {ended.left}")
        if ended.stopped == 0:
            self.stdout.write(f"No {what} was running.")
        else:
            self.stdout.write(f"{ended.stopped} {what}{'' if ended.stopped == 1 else 's'} stopped.")
