"""What a start's log says of memory: weights, graphs, KV pool, and which process is the engine core.

For the profile of a model and for the first figures before the sampler has any. vLLM rounds to 0.01 GiB; kvcached's own
line gives the KV geometry to the byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from models_app.engines.progress import read_line

_GIB = 1024**3
_MIB = 1024**2
_WEIGHTS = re.compile(r"Model loading took ([\d.]+) GiB")
_GRAPHS = re.compile(r"Graph capturing finished in [\d.]+ secs?, took (-?[\d.]+) GiB")
_AVAILABLE = re.compile(r"Available KV cache memory: (-?[\d.]+) GiB")
_TOKENS = re.compile(r"(?:GPU|CPU) KV cache size: ([\d,]+) tokens")
_ALLOCATOR = re.compile(r"Init C\+\+ PageAllocator: (.*)")
_PAIR = re.compile(r"(\w+)=([\d.]+)(MB|GB)?")
_KVCACHED = r"Using kvcached process-local KV capacity: .*?"
_CAPACITY = re.compile(_KVCACHED + r"available=(\d+)")
_WEIGHTS_EXACT = re.compile(_KVCACHED + r"weights=(\d+)")
_MAX_LEN = re.compile(r"Using max model len (\d+)")
_LOAD_S = re.compile(r"Model loading took .*? and ([\d.]+) seconds")
_INIT_S = re.compile(r"init engine .*? took ([\d.]+) s")


@dataclass(frozen=True)
class MemoryLog:
    """Bytes are per GPU and of the first rank that told. None: the log does not say.

    ``graphs_bytes`` is 0, not None, once an eager start is through: there are none. ``kvcached_active``: kvcached
    patched vLLM and made its pool; False when the engine is up without it, though it may have been asked for.
    """

    weights_bytes: int | None = None
    graphs_bytes: int | None = None
    kv_available_bytes: int | None = None
    kv_tokens: int | None = None
    capacity_bytes: int | None = None
    bundle_bytes: int | None = None
    page_bytes: int | None = None
    num_layers: int | None = None
    num_kv_buffers: int | None = None
    max_model_len: int | None = None
    load_s: float | None = None
    init_s: float | None = None
    kvcached_active: bool | None = None
    engine_core_pids: tuple[int, ...] = ()
    worker_pids: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """For ``LaunchAttempt.memory``: what is known, plain values."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
            if value is not None and value != ()
        }


def read_memory(text: str) -> MemoryLog:
    """Read a log, or the part of it up to readiness."""
    found: dict[str, Any] = {}
    cores: dict[int, None] = {}
    workers: dict[int, None] = {}
    patched = up = eager = False

    def first(key: str, pattern: re.Pattern[str], line: str, convert: Callable[[str], Any]) -> None:
        match = pattern.search(line)
        if match and key not in found:
            found[key] = convert(match[1])

    for raw in text.splitlines():
        line = read_line(raw)
        if line.pid is not None:
            if line.who == "EngineCore":
                cores[line.pid] = None
            elif "Worker" in line.who:
                workers[line.pid] = None
        if exact := _WEIGHTS_EXACT.search(line.text):
            found["weights_bytes"] = int(exact[1])
        first("weights_bytes", _WEIGHTS, line.text, _gib)
        first("graphs_bytes", _GRAPHS, line.text, _gib)
        first("kv_available_bytes", _AVAILABLE, line.text, _gib)
        first("kv_tokens", _TOKENS, line.text, _number)
        first("capacity_bytes", _CAPACITY, line.text, int)
        first("max_model_len", _MAX_LEN, line.text, int)
        first("load_s", _LOAD_S, line.text, float)
        first("init_s", _INIT_S, line.text, float)
        if allocator := _ALLOCATOR.search(line.text):
            found = {**found, **_geometry(allocator[1])}
        patched = patched or "Successfully patched vllm" in line.text
        eager = eager or "Enforce eager set" in line.text or "enforce_eager=True" in line.text
        up = up or "init engine (profile" in line.text or "Application startup complete" in line.text
    if up and eager:
        found.setdefault("graphs_bytes", 0)
    if "bundle_bytes" in found and patched:
        found["kvcached_active"] = True
    elif up:
        found["kvcached_active"] = "bundle_bytes" in found
    return MemoryLog(**found, engine_core_pids=tuple(cores), worker_pids=tuple(workers))


def _gib(text: str) -> int:
    return max(0, round(float(text) * _GIB))


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _geometry(text: str) -> dict[str, Any]:
    """Of ``num_layers=28, mem_size_per_layer=…MB, total_mem_size=…MB, page_size=2MB, …, num_kv_buffers=2``."""
    units = {"MB": _MIB, "GB": _GIB, None: 1, "": 1}
    values = {name: float(number) * units[unit or None] for name, number, unit in _PAIR.findall(text)}
    layers, page = values.get("num_layers"), values.get("page_size")
    if not layers or not page:
        return {}
    buffers = int(values.get("num_kv_buffers", 2))
    found: dict[str, Any] = {
        "num_layers": int(layers),
        "num_kv_buffers": buffers,
        "page_bytes": int(page),
        "bundle_bytes": int(page) * int(layers) * buffers,
    }
    return found
