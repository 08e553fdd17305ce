"""``python -m sardeenz_site.run [--role all|control|host]``."""

from __future__ import annotations

import argparse
import asyncio
import sys

from django.core.exceptions import ImproperlyConfigured

from sardeenz_site.run.config import ROLES, CannotStart, read_config
from sardeenz_site.run.console import Console
from sardeenz_site.run.preflight import check_ports, hold_home
from sardeenz_site.run.supervisor import Supervisor


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sardeenz_site.run", description="Run Sardeenz on this machine.")
    parser.add_argument(
        "--role",
        choices=ROLES,
        default="all",
        help="all: everything (default); control: without this machine's GPUs; host: only this machine's GPUs",
    )
    role = parser.parse_args().role
    console = Console()
    try:
        config = read_config(role)
        with hold_home(config.home):
            check_ports(config)
            asyncio.run(Supervisor(config, console).run())
    except (CannotStart, ImproperlyConfigured) as exc:
        sys.stderr.write(f"\nSardeenz cannot start: {exc}\n")
        return 1
    console.say("Ended.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
