"""Two or three models of the catalogue, so that a first look at the pages is not at empty ones."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from models_app.errors import SardeenzError
from models_app.models import Model
from models_app.services.lifecycle.launch import model_launch
from models_app.services.models import model_create

ACTOR = "seed_demo"
MODELS: tuple[dict[str, Any], ...] = (
    {"served_model_name": "qwen3-0.6b", "model": "Qwen/Qwen3-0.6B", "aliases": ["small"]},
    {"served_model_name": "llama-3.2-1b", "model": "meta-llama/Llama-3.2-1B-Instruct", "enable_sleep_mode": True},
    {"served_model_name": "qwen3-8b", "model": "Qwen/Qwen3-8B", "max_model_len": 32768, "priority": 80},
)


class Command(BaseCommand):
    help = "Enter a few models of the catalogue; those that are there stay as they are."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--launch", action="store_true", help="launch them too (needs a broker and a host)")

    def handle(self, *args: Any, **options: Any) -> None:
        for fields in MODELS:
            name = fields["served_model_name"]
            model = Model.objects.filter(served_model_name=name).first()
            try:
                if model is None:
                    model = model_create(actor=ACTOR, source=Model.Source.CATALOGUE, **fields)
                    self.stdout.write(f"{name} entered.")
                if options["launch"]:
                    model_launch(model, actor=ACTOR)
                    self.stdout.write(f"{name} launched.")
            except SardeenzError as exc:
                raise CommandError(f"{name}: {exc.message}") from exc
