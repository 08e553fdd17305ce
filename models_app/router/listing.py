"""``GET /v1/models``: what the asking key may use, from the router's own table; no engine is asked, none is woken."""

from __future__ import annotations

from typing import Any

from models_app.router.errors import model_not_found
from models_app.router.table import Key, Name, RouteTable


def usable_names(table: RouteTable, key: Key) -> list[Name]:
    """Names that the key may ask for, in order."""
    return [
        name
        for _, name in sorted(table.names.items())
        if any(key.may_use(name.name, served) for served, _ in name.choices)
    ]


def model_list(table: RouteTable, key: Key) -> dict[str, Any]:
    return {"object": "list", "data": [_entry(table, name) for name in usable_names(table, key)]}


def model_entry(table: RouteTable, key: Key, asked: str) -> dict[str, Any]:
    """Raises 404 (as RouterError) for what the key may not use, too: it is not told that there is such a model."""
    name = table.names.get(asked)
    if name is None or not any(key.may_use(asked, served) for served, _ in name.choices):
        raise model_not_found(asked, [one.name for one in usable_names(table, key)])
    return _entry(table, name)


def _entry(table: RouteTable, name: Name) -> dict[str, Any]:
    routes = [table.models[served] for served, _ in name.choices]
    best = next((route for route in routes if route.targets), routes[0])
    entry: dict[str, Any] = {
        "id": name.name,
        "object": "model",
        "created": name.created,
        "owned_by": "sardeenz",
        "root": best.name,
        "parent": None,
        "status": best.status,  # anything but "ready": sleeping, stopped, …
        "on_demand": best.on_demand,  # then a request wakes or loads it
        "instances": [target.id for route in routes for target in route.targets],
    }
    if best.max_model_len is not None:
        entry["max_model_len"] = best.max_model_len
    if best.token_limit is not None:
        entry["token_limit"] = best.token_limit
    if best.reason and best.status != "ready":
        entry["reason"] = best.reason
    return entry
