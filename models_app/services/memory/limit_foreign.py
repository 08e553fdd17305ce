"""Limits of engines that do not carry our add-on: pull request 324's own endpoints, or nothing but the segment.

Both take a limit only at their next allocation, and neither says when it is in force: what is told here is read from
the segment. A pull-request engine dies when its limit is set below what is in use while it works, so there the limit
follows the use down, step by step; and its *trim* lowers the limit for good, so the wanted one is put back after it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpus_app.errors import ProbeError
from gpus_app.policies.base import gib
from gpus_app.probes.segments import SIZE, SIZE_PR324, read_segment
from models_app.engines.client import EngineClient
from models_app.errors import EngineUnavailable
from models_app.models import Instance
from models_app.states import LimitStatus

PR324 = "pr324"
SEGMENT = "shm"
FOREIGN = frozenset({PR324, SEGMENT})
NEXT_ALLOCATION = "This engine takes a limit at its next allocation."

_SHM = Path("/dev/shm")  # noqa: S108 - where kvcached has its segments
_LIMIT = struct.Struct("<q")
_LOCK_LIMIT_S = 0.05


@dataclass(frozen=True)
class Pool:
    """What the segment says. Bytes per GPU."""

    limit_bytes: int
    used_bytes: int
    prealloc_bytes: int

    @property
    def footprint_bytes(self) -> int:
        return self.used_bytes + self.prealloc_bytes


def pool_of(row: Instance) -> Pool:
    """Raises EngineUnavailable when there is no segment of that name."""
    try:
        segment = read_segment(row.ipc_name)
    except ProbeError as exc:
        raise EngineUnavailable(f"Its KV segment cannot be read: {exc}") from exc
    return Pool(segment.limit_bytes, max(segment.used_bytes, 0), max(segment.prealloc_bytes, 0))


def foreign_limit(row: Instance, engine: EngineClient) -> dict[str, Any]:
    """One step towards the wanted limit, answered as ``/kvcache/limit`` is.

    Raises EngineUnavailable, EngineRefused.
    """
    pool = pool_of(row)
    wanted = row.limit_bytes or row.capacity_bytes or pool.limit_bytes
    target = max(wanted, pool.used_bytes) if row.provider == PR324 else wanted
    if pool.limit_bytes != target:
        if row.provider == PR324:
            engine.kvcache_limit(target, force=row.limit_force)
            target = pool_of(row).limit_bytes  # it raises what is below its own floor
        else:
            write_limit(row.ipc_name, target)
    over = max(pool.footprint_bytes - wanted, 0)
    status = LimitStatus.DEFERRED if over or target != wanted else LimitStatus.APPLIED
    message = f"{gib(over)} over the limit. {NEXT_ALLOCATION}" if over else NEXT_ALLOCATION
    return {
        "status": status,
        "message": message,
        "limit_bytes": target,
        "effective_limit_bytes": target,
        "used_bytes": pool.used_bytes,
        "prealloc_bytes": pool.prealloc_bytes,
        "overage_bytes": over,
    }


def foreign_drift(row: Instance) -> int | None:
    """The limit that a stranger has written; None when it is the one that we put there, or ours is not told yet.

    Where no limit was ever wanted only one above the capacity counts: such a pool hands pages out twice.
    Raises EngineUnavailable.
    """
    found = pool_of(row).limit_bytes
    if row.limit_bytes is None:
        return found if row.capacity_bytes and found > row.capacity_bytes else None
    heard = row.limit_acked_revision >= row.limit_revision and row.effective_limit_bytes is not None
    return found if heard and found != row.effective_limit_bytes else None


def foreign_trim(row: Instance, engine: EngineClient) -> dict[str, Any]:
    """Trim where the engine can, and put the limit back that its trim has lowered. ``freed_bytes`` is measured."""
    if row.provider == SEGMENT:
        return {"status": LimitStatus.REJECTED, "message": "This engine has no endpoints: it cannot be asked to trim."}
    before = pool_of(row)
    engine.kvcache_trim()
    engine.kvcache_limit(max(row.limit_bytes or before.limit_bytes, before.used_bytes), force=row.limit_force)
    after = pool_of(row)
    freed = max(before.footprint_bytes - after.footprint_bytes, 0)
    return {
        "status": LimitStatus.APPLIED,
        "message": f"{gib(freed)} given back.",
        "freed_bytes": freed,
        "effective_limit_bytes": after.limit_bytes,
    }


def write_limit(name: str, limit_bytes: int) -> None:
    """Write the first of a segment's numbers, as ``kvctl`` does: under an exclusive lock, held for one write.

    Raises EngineUnavailable when the file is not there, is no segment, or is locked for longer than 50 ms.
    """
    try:
        descriptor = os.open(_SHM / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as exc:
        raise EngineUnavailable(f"Its KV segment cannot be opened: {exc.strerror}.") from exc
    try:
        if os.fstat(descriptor).st_size not in (SIZE, SIZE_PR324):
            raise EngineUnavailable(f"{name} is no KV segment.")
        _lock(descriptor, name)
        os.pwrite(descriptor, _LIMIT.pack(limit_bytes), 0)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, name: str) -> None:
    deadline = time.monotonic() + _LOCK_LIMIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise EngineUnavailable(f"The KV segment {name} is locked by somebody else.") from None
            time.sleep(0.0005)
        else:
            return
