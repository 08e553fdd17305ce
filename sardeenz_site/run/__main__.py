"""``python -m sardeenz_site.run [--role all|control|host]``."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import NoReturn

from django.core.exceptions import ImproperlyConfigured

from sardeenz_site.run.config import BASE_DIR, ROLES, CannotStart, Config, child_environment, read_config
from sardeenz_site.run.console import Console
from sardeenz_site.run.preflight import check_ports, hold_home
from sardeenz_site.run.processes import processes
from sardeenz_site.run.supervisor import Supervisor


def become(config: Config, name: str) -> NoReturn:
    """Replace this process by one of the launcher's children, with the same command line and environment."""
    named = {process.name: process for process in processes(config)}
    if name not in named:
        raise CannotStart(f"--only {name}: there are {', '.join(named)}.")
    if config.redis is None:
        raise CannotStart("A single process needs the broker of the others: set REDIS_URL.")
    os.chdir(BASE_DIR)
    argv = named[name].argv
    os.execve(argv[0], argv, child_environment(config, config.redis))  # noqa: S606


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sardeenz_site.run", description="Run Sardeenz on this machine.")
    parser.add_argument(
        "--role",
        choices=ROLES,
        default="all",
        help="all: everything (default); control: without this machine's GPUs; host: only this machine's GPUs",
    )
    parser.add_argument("--only", metavar="PROCESS", help="become one of the processes, for containers and systemd")
    arguments = parser.parse_args()
    console = Console()
    try:
        config = read_config(arguments.role)
        if arguments.only:
            become(config, arguments.only)
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
