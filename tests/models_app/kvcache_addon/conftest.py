"""Segments in a temporary folder, and a vLLM that is not there."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models_app.kvcache_addon import reclaim, segment
from models_app.kvcache_addon.engine_core import Addon, addon_of
from tests.models_app.kvcache_addon import fake_vllm
from tests.models_app.kvcache_addon.fake_vllm import Engine, make_engine


@pytest.fixture(autouse=True)
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that stands for /dev/shm; the environment of an engine started by nobody."""
    monkeypatch.setattr(segment, "DIRECTORY", tmp_path)
    monkeypatch.setattr(reclaim, "vllm_version", lambda: "0.24.0")
    for name in (
        "SARDEENZ_ENGINE_TOKEN_FILE",
        "SARDEENZ_INITIAL_LIMIT_BYTES",
        "SARDEENZ_ADDON_SELFTEST",
        "KVCACHED_IPC_NAME",
        "ENABLE_KVCACHED",
        "KVCACHED_PAGE_PREALLOC_ENABLED",
        "CUDA_VISIBLE_DEVICES",
    ):
        monkeypatch.delenv(name, raising=False)
    request_module = types.ModuleType("vllm.v1.request")
    request_module.RequestStatus = fake_vllm.RequestStatus  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.request", request_module)
    return tmp_path


@pytest.fixture
def engine_with_pool(shm: Path) -> Callable[..., tuple[Engine, Addon]]:
    """Makes an engine with a pool, and its add-on in place."""

    def make(**options: Any) -> tuple[Engine, Addon]:
        engine = make_engine(shm, **options)
        return engine, addon_of(engine)

    return make
