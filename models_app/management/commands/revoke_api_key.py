"""End an API key, for when the pages cannot be reached."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from models_app.models import ApiKey
from models_app.services.keys import api_key_revoke


class Command(BaseCommand):
    help = "End an API key: requests with it are refused from now on."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", help="the key's name")

    def handle(self, *args: Any, **options: Any) -> None:
        key = ApiKey.objects.filter(name=options["name"]).first()
        if key is None:
            raise CommandError(f"There is no key {options['name']!r}.")
        api_key_revoke(key, actor="command line")
        self.stdout.write(f"{key.name} is revoked.")
