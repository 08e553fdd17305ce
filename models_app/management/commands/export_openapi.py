"""Write the OpenAPI schema that is served at /api/v1/openapi.json to the file that is checked for drift."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand

FILE = Path(__file__).resolve().parents[2] / "api" / "openapi.json"


class Command(BaseCommand):
    """``manage.py export_openapi``; ``make openapi`` calls it."""

    help = "Write the served OpenAPI schema to models_app/api/openapi.json."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--output", type=Path, default=FILE)

    def handle(self, *args: Any, output: Path, **options: Any) -> None:
        from models_app.api.v1 import api

        text = json.dumps(api.get_openapi_schema(), indent=1, sort_keys=True, default=str)
        output.write_text(text + "\n")
        self.stdout.write(f"Written: {output}")
