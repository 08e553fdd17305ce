"""The modules that the add-on imports from vLLM, as far as it looks into them, so that its real code runs here.

The add-on's engine half is a vLLM plug-in: it puts a method on ``vllm.v1.engine.core.EngineCore`` and wraps the
engine's loop. Here these names lead to the simulated classes, whose attributes carry vLLM's and kvcached's names
where the add-on reads them. Nothing of it depends on a real vLLM, and nothing is put in place of one outside the
simulator's processes.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from models_app.simulator import core, core_process, scheduler
from models_app.simulator.logs import Log


class _Handler(logging.Handler):
    """vLLM's logger, writing as the simulator does."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log
        self._formatter = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        source = f"{record.filename}:{record.lineno}"
        write = {"WARNING": self._log.alert, "ERROR": self._log.bad}.get(record.levelname, self._log.say)
        write(source, record.getMessage())
        if record.exc_info:
            write(source, self._formatter.formatException(record.exc_info))


class _Distribution(importlib.metadata.Distribution):
    """A package that is said to be installed, by its version alone."""

    def __init__(self, name: str, version: str) -> None:
        self._text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return path


class _Finder:
    """Finds the pretended packages; sits on ``sys.meta_path`` and imports nothing."""

    def __init__(self, versions: dict[str, str]) -> None:
        self._versions = versions

    def find_spec(self, *_args: Any, **_kwargs: Any) -> None:
        return None

    def find_distributions(self, context: Any) -> Iterable[importlib.metadata.Distribution]:
        return [_Distribution(name, version) for name, version in self._versions.items() if context.name == name]


def install_versions(vllm: str, kvcached: str, log: Log) -> None:
    """Let the add-on find the versions that this engine claims, and its messages reach the engine's log."""
    versions = {"vllm": vllm} | ({"kvcached": kvcached} if kvcached else {})
    sys.meta_path.insert(0, _Finder(versions))
    logger = logging.getLogger("vllm")
    logger.handlers = [_Handler(log)]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def install_addon(vllm: str, kvcached: str, log: Log) -> None:
    """Load the add-on's engine half as vLLM loads a plug-in."""
    install_versions(vllm, kvcached, log)
    _module("vllm", __version__=vllm)
    _module("vllm.v1")
    _module("vllm.v1.engine")
    _module("vllm.v1.engine.core", EngineCore=core.EngineCore, EngineCoreProc=core_process.EngineCoreProc)
    _module("vllm.v1.request", RequestStatus=scheduler.RequestStatus)
    from models_app.kvcache_addon import engine_core

    engine_core.register()


def _module(name: str, **content: Any) -> None:
    module = sys.modules[name] = ModuleType(name)
    module.__dict__.update(content)
    module.__path__ = []
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
