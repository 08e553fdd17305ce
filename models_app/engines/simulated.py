"""The simulated engine: the same ``serve`` command line and environment, run by ``python -m models_app.simulator``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from models_app.engines.environment import child_environment
from models_app.engines.spec import Command, EngineSpec, FieldError, LaunchContext
from models_app.engines.vllm import addon_links, check_spec, masked, serve_arguments

#: What the simulator behaves like, where nothing else is asked for.
VERSIONS: dict[str, Any] = {"vllm": "0.30.0", "kvcached": "0.1.6", "autopatch": True}

#: ``LaunchContext.sim`` key → variable of the simulator.
_SETTINGS = {
    "sim_dir": "SARDEENZ_SIM_DIR",
    "speed": "SARDEENZ_SIM_SPEED",
    "gpu_bytes": "SARDEENZ_SIM_GPU_BYTES",
    "vllm_version": "SARDEENZ_SIM_VLLM_VERSION",
    "kvcached_version": "SARDEENZ_SIM_KVCACHED_VERSION",
    "orphan_s": "SARDEENZ_SIM_ORPHAN_S",
}


def faults_text(faults: Mapping[str, Any] | Sequence[str] | str) -> str:
    """``{"slow_load": 3, "hang": None}``, ``["slow_load:3", "hang"]`` or a text, as the simulator reads it."""
    if isinstance(faults, str):
        return faults
    if isinstance(faults, Mapping):
        return ",".join(name if value in (None, True, "") else f"{name}:{value}" for name, value in faults.items())
    return ",".join(faults)


class SimulatedEngine:
    """No GPU and no vLLM needed; memory is drawn from the shared ledger of simulated GPUs."""

    @property
    def kind(self) -> str:
        return "simulated"

    def command(self, spec: EngineSpec, ctx: LaunchContext) -> Command:
        argv = [sys.executable, "-m", "models_app.simulator", *serve_arguments(spec, ctx)]
        env = child_environment(spec, ctx, os.environ)
        env["SARDEENZ_SIM_FACTS"] = json.dumps(spec.facts)
        env |= {name: str(ctx.sim[key]) for key, name in _SETTINGS.items() if ctx.sim.get(key) is not None}
        if faults := ctx.sim.get("faults"):
            env["SARDEENZ_SIM_FAULTS"] = faults_text(faults)
        if version := ctx.versions.get("vllm"):
            env.setdefault("SARDEENZ_SIM_VLLM_VERSION", str(version))
        return Command(argv=tuple(argv), env=env, masked_argv=masked(argv), links=addon_links("models_app", "gpus_app"))

    def check(
        self, spec: EngineSpec, versions: Mapping[str, Any] | None = None, *, allow_risky: bool = False
    ) -> list[FieldError]:
        return list(check_spec(spec, versions or VERSIONS, allow_risky=allow_risky))
