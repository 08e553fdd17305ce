"""What a sleeper holds, what its sleep freed, and what it keeps in its host's memory."""

from __future__ import annotations

from models_app.models import Instance
from models_app.services.memory.sleep_ram import weights_bytes
from models_app.states import InstanceState


def asleep_facts(row: Instance) -> dict[str, int | None] | None:
    """What a sleeper was measured to hold and to have freed on each GPU, and keeps in its host's memory."""
    memory = row.attempt.memory if row.attempt else {}
    holds, before = memory.get("asleep_bytes"), memory.get("awake_bytes")
    if row.state != InstanceState.SLEEPING or holds is None:
        return None
    freed = max(before - holds, 0) if before is not None else None
    return {"holds": holds, "freed": freed, "ram": weights_bytes(row) if row.sleep_level == 1 else None}
