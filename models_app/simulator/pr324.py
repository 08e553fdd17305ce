"""The endpoints of kvcached's unmerged pull request 324, with its semantics: an engine as some people run it. All
async.

What differs from our add-on, and what the product has to cope with: no authentication; any segment of the host can be
named; a limit below the floor is raised and answered 200; *trim* only lowers the limit to what is used and leaves it
there; a limit is applied at the next allocation, and then kills EngineCore when it is below use. The segment has 32
bytes.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
from pathlib import Path
from typing import Any

from models_app.simulator.config import Config
from models_app.simulator.http import Request
from models_app.simulator.segment import PR324_FORMAT, SHM_FOLDER

HARD_MINIMUM = 64 * 1024**2
DEFAULT_FLOOR = 512 * 1024**2
_SUFFIXES = (("kb", 2**10), ("mb", 2**20), ("gb", 2**30), ("b", 1), ("k", 2**10), ("m", 2**20), ("g", 2**30))


class Endpoints:
    """The five handlers."""

    def __init__(self, config: Config, gpu_bytes: int) -> None:
        self._name = config.ipc_name
        self._gpu_bytes = gpu_bytes
        self.handlers = {
            ("GET", "/kvcache/status"): self.status,
            ("GET", "/kvcache/safety_floor"): self.safety_floor,
            ("POST", "/kvcache/limit"): self.limit,
            ("POST", "/kvcache/limit_percent"): self.limit_percent,
            ("POST", "/kvcache/trim"): self.trim,
        }

    async def status(self, request: Request) -> None:
        segments = [self._segment(name) for name in _segments()]
        total = self._gpu_bytes
        await request.reply_json(
            {
                "self_ipc_name": self._name,
                "segments": segments,
                **_sizes(gpu_total_memory=total, gpu_free_memory=total),
            }
        )

    async def safety_floor(self, request: Request) -> None:
        names = _segments()
        floor = _read(names[0])[3] if names else 0
        await request.reply_json(
            {
                **_sizes(safety_floor=floor or self._fallback(), model_min_safe_limit=floor),
                "fallback_configured_min_mb": DEFAULT_FLOOR // 2**20,
                "gpu_percent_floor": int(self._gpu_bytes * 0.02),
                "hard_minimum": HARD_MINIMUM,
                "env_vars": {},
                "description": "Minimum KV cache limit",
            }
        )

    async def limit(self, request: Request) -> None:
        body = await _body(request)
        if body is None:
            await request.reply_json({"error": "Invalid JSON body"}, 400)
            return
        given = body.get("size_bytes", body.get("size"))
        if given is None:
            await request.reply_json({"error": "Missing 'size' or 'size_bytes'"}, 400)
            return
        try:
            size = _parse_size(given)
        except ValueError:
            await request.reply_json({"error": f"Invalid size: {given}"}, 400)
            return
        await self._set(request, body, size)

    async def limit_percent(self, request: Request) -> None:
        body = await _body(request)
        percent = (body or {}).get("percent")
        if not isinstance(percent, (int, float)) or not 0 < percent <= 100:
            await request.reply_json({"error": "'percent' must be in (0, 100]"}, 400)
            return
        size = int(self._gpu_bytes * percent / 100)
        await self._set(request, body or {}, size, percent=percent, gpu_total_memory=self._gpu_bytes)

    async def trim(self, request: Request) -> None:
        body = await _body(request) or {}
        name = str(body.get("ipc_name") or self._name)
        if name not in _segments():
            await request.reply_json(
                {"error": f"IPC segment '{name}' not found", "available_segments": _segments()}, 404
            )
            return
        total, used, prealloc, _ = _read(name)
        given = body.get("target_bytes", body.get("target"))
        size = _parse_size(given) if given is not None else used
        new = max(size, self._floor(name, body))
        _write(name, new)
        await request.reply_json(
            {
                "success": True,
                "ipc_name": name,
                **_sizes(previous_total=total, previous_used=used, previous_prealloc=prealloc, new_limit=new),
                **_sizes(freed_estimate=total - new, safety_floor=self._floor(name, body)),
                "clamped": new != size,
                "message": f"Limit lowered to {_human(new)}",
            }
        )

    async def _set(self, request: Request, body: dict[str, Any], size: int, **extra: Any) -> None:
        name = str(body.get("ipc_name") or self._name)
        if size <= 0:
            await request.reply_json({"error": "size must be positive"}, 400)
            return
        if name not in _segments():
            await request.reply_json({"error": f"IPC segment '{name}' not found"}, 400)
            return
        total, used, _, _ = _read(name)
        floor = self._floor(name, body)
        new = max(size, floor)
        _write(name, new)
        clamped = {"requested_size": size} if new != size else {}
        await request.reply_json(
            {
                "ipc_name": name,
                "success": True,
                **_sizes(previous_total_size=total, new_total_size=new, current_used_size=used, safety_floor=floor),
                "immediate_reclaim": used <= new,
                "clamped": new != size,
                "message": f"KV cache limit set to {_human(new)}",
                **clamped,
                **extra,
            }
        )

    def _segment(self, name: str) -> dict[str, Any]:
        total, used, prealloc, floor = _read(name)
        sizes = _sizes(
            total_size=total,
            used_size=used,
            prealloc_size=prealloc,
            free_size=max(total - used - prealloc, 0),
            physical_occupied=used + prealloc,
            min_effective_limit=used,
            min_safe_limit=floor,
            safety_floor=floor or self._fallback(),
        )
        return {"ipc_name": name, **sizes, "usage_percent": round(used / total * 100, 2) if total else 0.0}

    def _floor(self, name: str, body: dict[str, Any]) -> int:
        # Any truthy value forces, the text "false" included: the pull request's own mistake.
        return HARD_MINIMUM if body.get("force") else _read(name)[3] or self._fallback()

    def _fallback(self) -> int:
        return max(DEFAULT_FLOOR, int(self._gpu_bytes * 0.02))


async def _body(request: Request) -> dict[str, Any] | None:
    try:
        value = json.loads(await request.body() or b"{}")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _segments() -> list[str]:
    paths = sorted(SHM_FOLDER.iterdir())
    return [path.name for path in paths if path.is_file() and path.stat().st_size == PR324_FORMAT.size]


def _read(name: str) -> tuple[int, int, int, int]:
    with Path(SHM_FOLDER / name).open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        total, used, prealloc, floor = PR324_FORMAT.unpack(file.read(PR324_FORMAT.size))
    return total, used, prealloc, floor


def _write(name: str, total: int) -> None:
    with Path(SHM_FOLDER / name).open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.pwrite(file.fileno(), struct.pack("<q", total), 0)


def _parse_size(given: Any) -> int:
    if isinstance(given, (int, float)):
        return int(given)
    text = str(given).strip().lower().replace(",", "").replace("_", "")
    for suffix, factor in _SUFFIXES:
        if text.endswith(suffix):
            return int(float(text.removesuffix(suffix) or "0") * factor)
    return int(float(text))


def _sizes(**sizes: int) -> dict[str, Any]:
    return {**sizes, **{f"{name}_human": _human(size) for name, size in sizes.items()}}


def _human(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size) < 1024:
            return f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TB"
