"""Shared reads. Each costs a fixed number of queries, however many rows there are."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import redis
from django.conf import settings
from django.db.models import Q
from django.utils import timezone

from models_app import broker
from models_app.engines.progress import tail
from models_app.engines.redact import redact
from models_app.models import ApiKey, Instance, InstanceQuerySet, LaunchAttempt, Model, WeightedRoute
from models_app.states import LIVE, InstanceState

log = logging.getLogger(__name__)

#: vLLM's block, in tokens; kvcached keeps one block of the pool for itself.
BLOCK_TOKENS = 16
_LOG_LINES_MAX = 20_000
#: Seconds for which a model that could not be brought up on demand is not asked for again.
DEMAND_REFUSED_S = 30.0


def instances_for_dashboard() -> InstanceQuerySet:
    """Every instance with its model, host and newest attempt: one query. Narrow it with ``.live()`` and the like."""
    return Instance.objects.select_related("model", "host", "attempt")


def live_by_gpu() -> dict[str, list[Instance]]:
    """Live instances by GPU UUID; one with several GPUs stands under each. One query."""
    found: dict[str, list[Instance]] = defaultdict(list)
    for instance in instances_for_dashboard().live():
        for uuid in instance.gpu_uuids:
            found[uuid].append(instance)
    return found


# --- routes ----------------------------------------------------------------------------------------


def token_limit(instance: Instance) -> int | None:
    """The longest request, prompt and answer together, that the KV limit can hold; None when not known.

    It is the limit in force, or the one that a resting instance is given as soon as it works.
    """
    limit, bundle = instance.effective_limit_bytes, instance.bundle_bytes
    if limit and instance.limit_automatic:
        limit = max(limit, instance.awake_limit_bytes or 0)
    per_token = (instance.model.facts or {}).get("kv_bytes_per_token_per_gpu")
    if not limit or not bundle or not per_token:
        return None
    blocks_per_bundle = bundle // (BLOCK_TOKENS * int(per_token))
    return max((limit // bundle * blocks_per_bundle - 1) * BLOCK_TOKENS, 0) or None


def model_status(instances: Iterable[Instance]) -> tuple[str, str]:
    """One word for a model over its replicas, with the reason: the best of them counts."""
    rank = {
        InstanceState.READY: (0, "ready"),
        InstanceState.STARTING: (1, "starting"),
        InstanceState.SCHEDULED: (2, "starting"),
        InstanceState.PENDING: (3, "starting"),
        InstanceState.SLEEPING: (4, "sleeping"),
        InstanceState.DRAINING: (5, "draining"),
        InstanceState.STOPPING: (6, "draining"),
        InstanceState.UNREACHABLE: (7, "failed"),
        InstanceState.FAILED: (8, "failed"),
        InstanceState.STOPPED: (9, "stopped"),
    }
    best = min(instances, key=lambda row: rank[InstanceState(row.state)][0], default=None)
    if best is None:
        return "stopped", "It was never launched."
    return rank[InstanceState(best.state)][1], best.reason


def _route(model: Model, instances: list[Instance]) -> dict[str, Any]:
    ready = [row for row in instances if row.is_routable and row.port and row.host]
    status, reason = model_status(instances)
    if status == "ready" and not ready:
        status = "starting"
    if not ready and model.demand_facts.get("code") == "waits" and _is_fresh(model.demand_facts):
        reason = str(model.demand_facts["reason"])
    facts = model.facts or {}
    context = model.max_model_len or facts.get("max_position_embeddings")
    limits = {row.pk: token_limit(row) for row in ready}
    longest = None if None in limits.values() else max(filter(None, limits.values()), default=None)
    return {
        "name": model.served_model_name,
        "aliases": [{"name": alias.name, "defaults": alias.request_defaults} for alias in model.aliases.all()],
        "created": int(model.created_at.timestamp()),
        "status": status,
        "on_demand": model.on_demand,
        "max_model_len": context,
        "token_limit": longest if context is None or longest is None else min(longest, context),
        "defaults": model.request_defaults,
        "fallback": model.fallback.served_model_name if model.fallback else None,
        "max_concurrency": model.max_concurrency,
        "reason": reason,
        "refused": demand_refusal(model),
        "affinity": "prefix" if model.prefix_affinity else None,
        "first_byte_s": model.first_byte_limit_s,
        "idle_s": model.idle_limit_s,
        "instances": [
            {
                "id": row.pk,
                "url": row.base_url,
                "token": row.engine_token,
                "weight": 1,
                "token_limit": limits[row.pk],
            }
            for row in ready
        ],
    }


def demand_refusal(model: Model) -> str:
    """Why a request could not bring the model up, for as long as asking again would be no use; else empty."""
    facts = model.demand_facts
    return str(facts["reason"]) if facts.get("code") == "refused" and _is_fresh(facts) else ""


def _is_fresh(facts: dict[str, Any]) -> bool:
    return time.time() - float(facts.get("at", 0)) < DEMAND_REFUSED_S


def _weighted(route: WeightedRoute) -> dict[str, Any]:
    return {
        "name": route.name,
        "created": int(route.created_at.timestamp()),
        "defaults": route.request_defaults,
        "targets": [
            {"model": target.model.served_model_name, "weight": target.weight} for target in route.targets.all()
        ],
    }


def _key(key: ApiKey, now: datetime) -> list[dict[str, Any]]:
    """A key by the digest of its secret, and once more by that of the secret before while its grace lasts.

    Both have the same id, so limits and usage are one.
    """
    entry = {
        "id": key.pk,
        "name": key.name,
        "digest": key.digest,
        "role": key.role,
        "models": [model.served_model_name for model in key.allowed_models.all()] if key.is_scoped else None,
        "expires_at": key.expires_at.timestamp() if key.expires_at else None,
        "rpm": key.requests_per_minute,
        "tpm": key.tokens_per_minute,
        "max_concurrency": key.max_concurrency,
        "priority": key.priority,
        "capture_until": key.capture_until.timestamp() if key.capture_until and key.capture_until > now else None,
    }
    if key.previous_digest is None or key.previous_until is None or key.previous_until <= now:
        return [entry]
    ends = min(key.previous_until, key.expires_at or key.previous_until)
    return [entry, entry | {"digest": key.previous_digest, "expires_at": ends.timestamp()}]


def routes_snapshot() -> dict[str, Any]:
    """What the router needs: names, ready instances with their tokens, weighted routes, keys by digest. Eight queries.

    ``version`` is the caller's to set: see ``route_table``.
    """
    by_model: dict[int, list[Instance]] = defaultdict(list)
    wanted = Q(state__in=LIVE) | Q(state=InstanceState.FAILED) | Q(state=InstanceState.STOPPED)
    for row in Instance.objects.filter(wanted).select_related("host", "model"):
        by_model[row.model_id].append(row)
    models = Model.objects.select_related("fallback").prefetch_related("aliases")
    now = timezone.now()
    keys = ApiKey.objects.valid(now).prefetch_related("allowed_models")
    return {
        "version": 0,
        "at": time.time(),
        "models": [_route(model, by_model[model.pk]) for model in models],
        "routes": [_weighted(route) for route in WeightedRoute.objects.prefetch_related("targets__model")],
        "keys": [entry for key in keys for entry in _key(key, now)],
    }


# --- logs ------------------------------------------------------------------------------------------


def log_key(attempt_id: int) -> str:
    """Where a host worker leaves the end of a log for web processes on other hosts."""
    return f"sardeenz:log:{attempt_id}"


def instance_log(instance: Instance, lines: int = 500, attempt: LaunchAttempt | None = None) -> list[str]:
    """The last ``lines`` lines of an attempt's log (default: the newest attempt), also after its end.

    On the instance's own host from the file; elsewhere what the host worker last left in Redis; then the tail that
    was stored when the attempt ended.
    """
    lines = min(lines, _LOG_LINES_MAX)
    attempt = attempt or instance.attempt or instance.attempts.first()
    if attempt is None:
        return []
    run_dir = Path(attempt.run_dir)
    if attempt.host.name == settings.SARDEENZ_HOST_NAME and run_dir.is_dir():
        return masked(tail(run_dir, lines), attempt)
    if not attempt.ended_at and (connection := broker.client()) is not None:
        try:
            stored = connection.get(log_key(attempt.pk))
        except (redis.RedisError, OSError) as exc:
            log.warning("log of attempt %s not read: %s", attempt.pk, exc)
        else:
            if isinstance(stored, bytes):
                return masked(stored.decode(errors="replace").splitlines()[-lines:], attempt)
    return masked(attempt.log_tail.splitlines()[-lines:], attempt)


def masked(lines: Iterable[str], attempt: LaunchAttempt) -> list[str]:
    """The lines without secrets: ours by their value, others by what they look like."""
    return redact(lines, known=(settings.SARDEENZ_HF_TOKEN or "", attempt.instance.engine_token))


# --- wanted replicas -------------------------------------------------------------------------------


def newest_by_replica(rows: Iterable[Instance]) -> dict[int, Instance]:
    """The row that stands for each replica, successors of a move or edit left out: a live one, else the newest."""
    found: dict[int, Instance] = {}
    for row in sorted(rows, key=lambda one: one.pk):
        held = found.get(row.replica_index)
        if row.replaces_id is None and (held is None or row.is_live or not held.is_live):
            found[row.replica_index] = row
    return found


def replicas_of(model: Model) -> dict[int, Instance]:
    """``newest_by_replica`` of one model. One query."""
    return newest_by_replica(model.instances.select_related("host"))
