"""Locks that end with the transaction, for rules that no constraint of one table can express."""

from __future__ import annotations

import zlib

from django.db import connection

from models_app.models import Instance, Model

#: The lock under which any name that clients ask for is given away: served names, aliases, weighted routes.
NAMES = "served names"


def instance_locked(instance_id: int) -> Instance:
    """The instance under a lock, with its model and host; its model is locked before it.

    Launching locks a model and then its instances. Whoever writes both takes them in that order, or two of them would
    wait for each other for ever.
    """
    model_id = Instance.objects.values_list("model_id", flat=True).get(pk=instance_id)
    Model.objects.select_for_update(of=("self",), no_key=True).get(pk=model_id)
    rows = Instance.objects.select_for_update(of=("self",), no_key=True)
    return rows.select_related("model__memory_policy", "host").get(pk=instance_id)


def transaction_lock(name: str) -> None:
    """Hold a named lock until the current transaction ends.

    PostgreSQL: an advisory lock. SQLite: nothing to do, its transactions begin IMMEDIATE and are alone by that.
    """
    if not connection.in_atomic_block:
        raise RuntimeError("transaction_lock() outside of a transaction would lock nothing")
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [zlib.crc32(name.encode())])
