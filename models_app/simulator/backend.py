"""What stands behind ``/kvcache`` in a simulated engine: the add-on's own backend for vLLM, with the ledger as its
NVML.
"""

from __future__ import annotations

from typing import Any

from gpus_app.probes.sim_ledger import Ledger
from models_app.kvcache_addon.vllm_backend import VllmBackend
from models_app.simulator.config import Config


class SimBackend(VllmBackend):
    """Every call goes the way it goes in vLLM: as a utility call, to the add-on's engine half in EngineCore."""

    def __init__(self, state: Any, config: Config) -> None:
        super().__init__(state)
        self._sim = config

    async def gpus(self) -> list[dict[str, Any]]:
        """The instance's own cards, as the ledger has them."""
        if self._sim.sim_dir is None:
            return []
        ledger = Ledger(self._sim.sim_dir)
        cards = [ledger.gpu(uuid) for uuid in self._sim.gpu_uuids]
        return [
            {
                "index": card.index,
                "uuid": card.uuid,
                "total": card.total_bytes,
                "free": ledger.free_bytes(card.uuid),
            }
            for card in cards
            if card
        ]
