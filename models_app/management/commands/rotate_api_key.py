"""Give an API key a new secret and print it, once: it is stored as a digest only."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from models_app.errors import SardeenzError
from models_app.models import ApiKey
from models_app.services.keys import api_key_rotate


class Command(BaseCommand):
    help = "Make a new secret for an API key. The secret itself is the only line on standard output."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", help="the key's name")
        parser.add_argument(
            "--grace", type=int, required=True, metavar="SECONDS", help="how long the old secret works; 0: it ends now"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        key = ApiKey.objects.filter(name=options["name"]).first()
        if key is None:
            raise CommandError(f"There is no key {options['name']!r}.")
        try:
            row, token = api_key_rotate(key, grace_s=options["grace"], actor="command line")
        except SardeenzError as exc:
            raise CommandError(exc.message) from exc
        until = f"works until {row.previous_until:%Y-%m-%d %H:%M:%S} UTC" if row.previous_until else "has ended"
        self.stderr.write(f"Keep it: it is shown this once. The secret before {until}.")
        self.stdout.write(token)
