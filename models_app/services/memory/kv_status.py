"""What an engine says of its KV memory, as columns of its instance."""

from __future__ import annotations

from typing import Any

from models_app.services.memory.limit_foreign import PR324


def kv_fields(status: dict[str, Any]) -> dict[str, Any]:
    """Columns of an instance from its engine's ``/kvcache/status``; empty when there is no segment."""
    segments = status.get("segments") or []
    if not segments:
        return {}
    name = status.get("self_ipc_name")
    own = next((one for one in segments if one.get("ipc_name") == name), segments[0])
    return {
        "provider": str(status.get("provider") or PR324)[:8],
        "capacity_bytes": own.get("capacity_bytes") or own.get("capacity") or own.get("total_size"),
        "bundle_bytes": own.get("bundle_bytes"),
        "hard_minimum_bytes": own.get("hard_minimum_bytes") or own.get("hard_minimum"),
        "safety_floor_bytes": own.get("safety_floor_bytes") or own.get("safety_floor"),
        "full_context_floor_bytes": own.get("full_context_floor_bytes") or own.get("full_context_floor"),
        "effective_limit_bytes": own.get("effective_limit_bytes") or own.get("limit_bytes") or own.get("total_size"),
    }
