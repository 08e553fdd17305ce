"""``manage.py simulate_gpu_fault 0 xid:79``: give a simulated card of this machine a fault, now or later, or end it."""

from __future__ import annotations

import argparse
import time
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from gpus_app.probes.sim_ledger import Ledger


def _fault(text: str) -> str:
    if text in ("none", "missing", "nvml_error") or (text.startswith("xid:") and text[4:].isdecimal()):
        return "" if text == "none" else text
    raise argparse.ArgumentTypeError("use missing, nvml_error, xid:NUMBER or none")


class Command(BaseCommand):
    help = "Give a simulated GPU of this machine a fault; none ends it."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("index", type=int, help="Index of the card.")
        parser.add_argument("fault", type=_fault, help="missing, nvml_error, xid:NUMBER or none.")
        parser.add_argument("--after", type=float, default=0.0, metavar="SECONDS", help="Let it begin so much later.")

    def handle(self, *args: Any, **options: Any) -> None:
        ledger = Ledger(settings.SARDEENZ_SIM_DIR)
        card = next((one for one in ledger.gpus() if one.index == options["index"]), None)
        if card is None:
            raise CommandError(f"There is no simulated GPU {options['index']} in {settings.SARDEENZ_SIM_DIR}.")
        ledger.change_gpu(card.uuid, fault=options["fault"], fault_at=time.time() + options["after"])
        self.stdout.write(f"{card.name} {card.index}: {options['fault'] or 'no fault'}.")
