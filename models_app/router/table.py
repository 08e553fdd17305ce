"""What the router knows: an immutable table made from a route snapshot, and the holder that swaps it.

A snapshot is turned into a new table as a whole, or refused as a whole: readers see the old table or the new one, never
one that is half built or empty.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

STATUSES = frozenset({"ready", "starting", "sleeping", "stopped", "failed", "draining"})

_NEVER_PRESET = frozenset({"model", "stream", "stream_options"})


class BadSnapshot(ValueError):
    """The snapshot is not what the contract says; the table in use stays."""


@dataclass(frozen=True, slots=True)
class Target:
    """One ready instance: where it listens, and the token that its engine asks for.

    ``token_limit``: the longest request, prompt and answer together, that the KV limit in force there can hold.
    """

    id: int
    url: str
    host: str
    port: int
    token: str
    weight: int = 1
    token_limit: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ModelRoute:
    """A served model name with the instances that answer for it now."""

    name: str
    aliases: tuple[str, ...] = ()
    created: int = 0
    status: str = "ready"
    on_demand: bool = False
    max_model_len: int | None = None
    token_limit: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fallback: str | None = None
    max_concurrency: int | None = None
    reason: str = ""
    refused: str = ""
    affinity: bool = False
    first_byte_s: float | None = None
    idle_s: float | None = None
    targets: tuple[Target, ...] = ()
    tight: bool = False  # some instance holds less than the model's own context: a request's length matters


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """What a client may put into ``model``: a served model name, an alias, or a name spread over models by weight."""

    name: str
    choices: tuple[tuple[str, int], ...]
    defaults: Mapping[str, Any]
    created: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Key:
    """An API key as the router needs it. The key itself is known to its owner only; here is its SHA-256."""

    id: int
    name: str
    digest: str
    role: str = "viewer"
    models: frozenset[str] | None = None
    expires_at: float | None = None
    rpm: int | None = None
    tpm: int | None = None
    max_concurrency: int | None = None
    priority: int = 50
    capture_until: float | None = None

    def may_use(self, asked: str, served: str) -> bool:
        return self.models is None or served in self.models or asked in self.models


@dataclass(frozen=True, slots=True, eq=False)
class RouteTable:
    """Look-ups are by dict: names and aliases, and digests of keys."""

    version: int
    at: float
    models: Mapping[str, ModelRoute]
    names: Mapping[str, Name]
    keys: Mapping[str, Key]

    @classmethod
    def from_snapshot(cls, snapshot: Mapping[str, Any]) -> RouteTable:
        """Raises BadSnapshot with a sentence that names the entry at fault."""
        try:
            models = {route.name: route for route in map(_model, snapshot["models"])}
            keys = {key.digest: key for key in map(_key, snapshot["keys"])}
            names = _names(snapshot, models)
            return cls(int(snapshot["version"]), float(snapshot["at"]), models, names, keys)
        except BadSnapshot:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise BadSnapshot(f"route snapshot: {type(exc).__name__}: {exc}") from exc


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)


def _optional_float(value: Any) -> float | None:
    return None if value is None else float(value)


def _target(entry: Mapping[str, Any], token_limit: int | None) -> Target:
    url = str(entry["url"]).rstrip("/")
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.port is None:
        raise BadSnapshot(f"instance {entry['id']}: {url!r} is not http://address:port")
    return Target(
        int(entry["id"]),
        url,
        parts.hostname,
        parts.port,
        str(entry.get("token", "")),
        max(1, int(entry.get("weight", 1))),
        _optional_int(entry.get("token_limit", token_limit)),
    )


def _preset(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters for requests that have none; what decides where a request goes, or in which form, is no preset."""
    return {key: value for key, value in (entry.get("defaults") or {}).items() if key not in _NEVER_PRESET}


def _alias_name(entry: str | Mapping[str, Any]) -> str:
    return entry if isinstance(entry, str) else str(entry["name"])


def _model(entry: Mapping[str, Any]) -> ModelRoute:
    status = str(entry["status"])
    if status not in STATUSES:
        raise BadSnapshot(f"model {entry['name']}: unknown status {status!r}")
    token_limit = _optional_int(entry.get("token_limit"))
    targets = tuple(_target(one, token_limit) for one in entry.get("instances", ()))
    context = _optional_int(entry.get("max_model_len"))
    return ModelRoute(
        name=str(entry["name"]),
        aliases=tuple(_alias_name(alias) for alias in entry.get("aliases", ())),
        created=int(entry.get("created") or 0),
        status=status,
        on_demand=bool(entry.get("on_demand", False)),
        max_model_len=context,
        token_limit=token_limit,
        defaults=_preset(entry),
        fallback=entry.get("fallback") or None,
        max_concurrency=_optional_int(entry.get("max_concurrency")),
        reason=str(entry.get("reason") or ""),
        refused=str(entry.get("refused") or ""),
        affinity=entry.get("affinity") == "prefix",
        first_byte_s=_optional_float(entry.get("first_byte_s")),
        idle_s=_optional_float(entry.get("idle_s")),
        targets=targets,
        tight=any(one.token_limit is not None and (context is None or one.token_limit < context) for one in targets),
    )


def _key(entry: Mapping[str, Any]) -> Key:
    models = entry.get("models")
    priority = entry.get("priority")
    return Key(
        id=int(entry["id"]),
        name=str(entry["name"]),
        digest=str(entry["digest"]),
        role=str(entry.get("role", "viewer")),
        models=None if models is None else frozenset(str(name) for name in models),
        expires_at=_optional_float(entry.get("expires_at")),
        rpm=_optional_int(entry.get("rpm")),
        tpm=_optional_int(entry.get("tpm")),
        max_concurrency=_optional_int(entry.get("max_concurrency")),
        priority=50 if priority is None else int(priority),
        capture_until=_optional_float(entry.get("capture_until")),
    )


def _names(snapshot: Mapping[str, Any], models: Mapping[str, ModelRoute]) -> dict[str, Name]:
    """Weighted names, then aliases, then served names: where two clash, the more direct one wins."""
    names: dict[str, Name] = {}
    for entry in snapshot.get("routes", ()):
        choices = tuple(
            (str(one["model"]), max(0, int(one.get("weight", 1)))) for one in entry["targets"] if one["model"] in models
        )
        name = str(entry["name"])
        names[name] = Name(name, choices, _preset(entry), int(entry.get("created") or 0))
    for model in snapshot["models"]:
        served = str(model["name"])
        route = models[served]
        for alias in model.get("aliases", ()):
            preset = {} if isinstance(alias, str) else _preset(alias)
            name = _alias_name(alias)
            names[name] = Name(name, ((served, 1),), {**route.defaults, **preset}, route.created)
    for route in models.values():
        names[route.name] = Name(route.name, ((route.name, 1),), route.defaults, route.created)
    return names


class TableSource:
    """Holds the table in use. A swap is one assignment; those who wait for a model are told of it."""

    def __init__(self, table: RouteTable | None = None) -> None:
        self.table: RouteTable | None = None
        self._listeners: list[Callable[[RouteTable], None]] = []
        self._heard_at = 0.0
        self._behind_s = 0.0
        self._at = -1.0
        if table is not None:
            self.swap(table)

    def listen(self, callback: Callable[[RouteTable], None]) -> None:
        self._listeners.append(callback)

    def swap(self, table: RouteTable) -> None:
        """Use ``table`` from now on."""
        self.heard(table.at)
        self.table = table
        for callback in self._listeners:
            callback(table)

    def heard(self, at: float) -> None:
        """A snapshot written at ``at`` was seen, perhaps with nothing new in it.

        Only the first one is judged by this machine's wall clock: later ones count from when ``at`` moved, so a clock
        that differs between hosts makes no key stale.
        """
        if at == self._at:
            return
        first = self._at < 0
        self._at = at
        self._behind_s = max(0.0, time.time() - at) if first else 0.0
        self._heard_at = time.monotonic()

    def age_s(self) -> float:
        """Seconds since the control side last said that this is how things are."""
        if self.table is None:
            return float("inf")
        return self._behind_s + time.monotonic() - self._heard_at
