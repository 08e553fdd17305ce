"""``manage.py prepare``: migrate, make the first admin, look at the settings. Every start does it before it serves."""

from __future__ import annotations

import json
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.contrib.auth.models import User
from django.core import checks
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import OperationalError, connection

from sardeenz_site.checks import TAG
from sardeenz_site.env import env_secret
from sardeenz_site.health import check_broker

if TYPE_CHECKING:
    from argparse import ArgumentParser
    from collections.abc import Iterator

ADMIN = "admin"
#: Any number that nothing else in the database locks.
MIGRATION_LOCK = 7_327_336


class Command(BaseCommand):
    help = "Migrate the database, make the first admin and check the settings."
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="Answer with one line of JSON, for the launcher.")
        parser.add_argument("--no-broker", action="store_true", help="Do not ask whether Redis/Valkey answers.")
        parser.add_argument("--no-admin", action="store_true", help="Leave the first admin to the control machine.")

    def handle(self, *args: Any, **options: Any) -> None:
        password = self._prepare(ask_broker=not options["no_broker"], make_admin=not options["no_admin"])
        found = checks.run_checks(tags=[TAG], databases=["default"])
        errors = [m for m in found if m.level >= checks.ERROR]
        if errors:
            raise CommandError(f"{errors[0].msg} {errors[0].hint or ''}".strip())
        warnings = [f"{m.msg} {m.hint or ''}".strip() for m in found]
        if options["json"]:
            self.stdout.write(json.dumps({"admin": ADMIN, "password": password, "warnings": warnings}))
            return
        for line in warnings:
            self.stdout.write(line)
        if password:
            self.stdout.write(f"First admin: {ADMIN}, password: {password} (shown this once)")

    def _prepare(self, *, ask_broker: bool, make_admin: bool) -> str | None:
        try:
            with migration_lock():
                call_command("migrate", verbosity=0, interactive=False, skip_checks=True)
                password = first_admin() if make_admin else None
        except OperationalError as exc:
            reason = str(exc).strip().splitlines()[0]
            raise CommandError(f"The database of DATABASE_URL does not answer: {reason}") from exc
        if ask_broker:
            try:
                check_broker()
            except Exception as exc:
                raise CommandError(f"Redis/Valkey at REDIS_URL does not answer: {exc}") from exc
        return password


@contextmanager
def migration_lock() -> Iterator[None]:
    """Two hosts that start at once must not both migrate. SQLite locks its file by itself."""
    if connection.vendor != "postgresql":
        yield
        return
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_lock(%s)", [MIGRATION_LOCK])
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [MIGRATION_LOCK])


def first_admin() -> str | None:
    """Make ``admin`` when there is no user at all. Returns the password when it was made up here, to be shown once."""
    if User.objects.exists():
        return None
    given = env_secret("SARDEENZ_ADMIN_PASSWORD")
    password = given or secrets.token_urlsafe(12)
    User.objects.create_superuser(ADMIN, password=password)
    return None if given else password
