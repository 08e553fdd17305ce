"""The door to this room: what an engine is asked for, and the two kinds that there are."""

from __future__ import annotations

from models_app.engines.simulated import SimulatedEngine
from models_app.engines.spec import Command, Engine, EngineSpec, FieldError, LaunchContext
from models_app.engines.vllm import VllmEngine

__all__ = ["ENGINES", "Command", "Engine", "EngineSpec", "FieldError", "LaunchContext"]

ENGINES: dict[str, Engine] = {engine.kind: engine for engine in (VllmEngine(), SimulatedEngine())}
