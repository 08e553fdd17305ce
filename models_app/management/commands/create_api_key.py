"""Make an API key and print it, once: it is stored as a digest only."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from models_app.errors import SardeenzError
from models_app.models import Model
from models_app.permissions import ROLES
from models_app.services.keys import api_key_create


class Command(BaseCommand):
    help = "Make an API key, good for REST and for /v1. The key itself is the only line on standard output."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", help="what the key is for; unique")
        parser.add_argument("--role", choices=ROLES, default="viewer")
        parser.add_argument("--model", action="append", default=[], help="only these models (repeatable)")

    def handle(self, *args: Any, **options: Any) -> None:
        names = options["model"]
        models = list(Model.objects.filter(served_model_name__in=names))
        missing = sorted(set(names) - {model.served_model_name for model in models})
        if missing:
            raise CommandError(f"There is no model {missing[0]!r}.")
        try:
            _key, token = api_key_create(options["name"], role=options["role"], actor="command line", models=models)
        except SardeenzError as exc:
            raise CommandError(exc.message) from exc
        self.stderr.write("Keep it: it is shown this once.")
        self.stdout.write(token)
