"""Help for tests of pages: somebody logged in, readings in the broker, what htmx would send."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from django.test import Client

from gpus_app import broker
from gpus_app.models import Host
from models_app.models import Instance
from tests.builders import GIB, make_record, make_user


def client_of(role: str | None = "operator", **fields: Any) -> Client:
    """A browser in which a user of this role is logged in; CSRF is not asked for."""
    client = Client()
    client.force_login(make_user(role=role, **fields))
    return client


def htmx(target: str = "") -> dict[str, str]:
    """Headers of a request by htmx."""
    return {"HTTP_HX_REQUEST": "true", **({"HTTP_HX_TARGET": target} if target else {})}


def read(host: Host, instances: Sequence[Instance] = (), **part: Any) -> dict[str, Any]:
    """Put a fresh record of the host into the broker; ``part`` overrides what each instance holds."""
    record = make_record(host, instances=instances)
    held = {"baseline": 2 * GIB, "used": 3 * GIB, "prealloc": GIB, "resident": 6 * GIB, "running": 4, "waiting": 1}
    for gpu in record["gpus"]:
        for one in gpu["instances"]:
            one.update(held | {"limit": 8 * GIB, "capacity": 40 * GIB, "gen_tokens_per_s": 12.0, "drift": None} | part)
        gpu["other"] = 0
        gpu["used"] = sum(one["resident"] for one in gpu["instances"])
        gpu["free"] = gpu["total"] - gpu["used"]
    broker.client().set(broker.host_latest_key(host.name), orjson.dumps(record))
    return record
