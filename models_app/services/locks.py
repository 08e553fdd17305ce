"""Locks that end with the transaction, for rules that no constraint of one table can express."""

from __future__ import annotations

import zlib

from django.db import connection


def transaction_lock(name: str) -> None:
    """Hold a named lock until the current transaction ends.

    PostgreSQL: an advisory lock. SQLite: nothing to do, its transactions begin IMMEDIATE and are alone by that.
    """
    if not connection.in_atomic_block:
        raise RuntimeError("transaction_lock() outside of a transaction would lock nothing")
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [zlib.crc32(name.encode())])
