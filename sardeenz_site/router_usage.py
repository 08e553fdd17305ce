"""Usage on its way from a router process to the rows: each batch is sent until it has arrived, and counts once.

A batch carries its sender and a number that rises by one; what was sent without an answer is sent again as it was, and
the receiver drops a number that it has. While Redis is away, what waits is also kept in a file, so that a router that
ends meanwhile loses nothing: the next one that starts sends it. What a killed router loses is what it counted since
its last batch, ``usage_flush_s`` (2 s) at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import orjson
import redis.asyncio as aioredis
from redis.exceptions import RedisError

from models_app.router.usage import UsageRecord

log = logging.getLogger(__name__)

USAGE_LIST = "sardeenz:usage"
#: Batches that wait while no control worker takes them: some five hours of one busy router process.
_LIST_LENGTH = 10_000


class UsageSender:
    """The batches of one router process."""

    def __init__(self, folder: Path) -> None:
        self.sender = secrets.token_hex(8)
        self._folder = folder
        self._lock = asyncio.Lock()
        self._sequence = 0  # of the newest batch
        self._unsure: bytes | None = None  # the newest batch, while nobody can say whether it has arrived
        self._held: int | None = None  # the lock of our file, once there is one
        self._draft_kept = False  # whether the file holds records that are the caller's still

    def close(self) -> None:
        """Let go of our file; what is in it is for the next router to send."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    # --- sending -----------------------------------------------------------------------------------------------

    async def send(self, client: aioredis.Redis, records: Sequence[UsageRecord]) -> None:
        """Take over the records. Raises RedisError or OSError when they stay the caller's, to be told again."""
        async with self._lock:
            try:
                await self._settle(client)
            except (RedisError, OSError):
                self._keep(self._batch(records))
                raise
            self._unsure = self._batch(records)
            self._sequence += 1
            try:
                await self._settle(client)
            except (RedisError, OSError) as exc:
                log.debug("usage may not have arrived, it is sent again: %s", exc)
                self._keep()
            else:
                self._keep_nothing()

    async def settle(self, client: aioredis.Redis) -> None:
        """Send again what may not have arrived. Raises RedisError or OSError."""
        if self._unsure is None:
            return
        async with self._lock:
            await self._settle(client)
            if not self._draft_kept:
                self._keep_nothing()

    async def _settle(self, client: aioredis.Redis) -> None:
        if self._unsure is not None:
            await _push(client, self._unsure)
            self._unsure = None

    def _batch(self, records: Sequence[UsageRecord]) -> bytes:
        told = [record.to_json() for record in records]
        return orjson.dumps({"sender": self.sender, "sequence": self._sequence + 1, "records": told})

    # --- the file ----------------------------------------------------------------------------------------------

    @property
    def file(self) -> Path:
        return self._folder / f"{self.sender}.json"

    def _keep(self, draft: bytes | None = None) -> None:
        """Write what waits to our file; the lock says that we live and will send it ourselves."""
        batches = [batch for batch in (self._unsure, draft) if batch is not None]
        try:
            if self._held is None:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._held = os.open(self.file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part = self.file.with_suffix(".part")
            part.write_bytes(b"\n".join(batches))
            part.replace(self.file)
            self._draft_kept = draft is not None
        except OSError as exc:
            log.debug("usage that waits for Redis is not kept in a file: %s", exc)

    def _keep_nothing(self) -> None:
        if self._held is None:
            return
        self._draft_kept = False
        for name in (self.file, self.file.with_suffix(".lock")):
            with contextlib.suppress(OSError):
                name.unlink(missing_ok=True)
        os.close(self._held)
        self._held = None

    async def send_left(self, client: aioredis.Redis) -> int:
        """Send what routers left that ended while Redis was away; how many batches. Raises RedisError or OSError."""
        sent = 0
        for file in sorted(self._folder.glob("*.json")) if self._folder.is_dir() else ():
            if file == self.file:
                continue
            with _lock_of(file) as ours:
                if not ours:
                    continue
                for batch in file.read_bytes().splitlines():
                    await _push(client, batch)
                    sent += 1
                file.unlink(missing_ok=True)
                file.with_suffix(".lock").unlink(missing_ok=True)
        if sent:
            log.warning("usage of a router that ended was sent: %d batches", sent)
        return sent


class _lock_of(contextlib.AbstractContextManager[bool]):
    """Holds the lock beside a file; False while its owner lives, or when somebody else has just sent it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._descriptor: int | None = None

    def __enter__(self) -> bool:
        try:
            self._descriptor = os.open(self._file.with_suffix(".lock"), os.O_RDWR)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return self._file.exists()

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


async def _push(client: aioredis.Redis, batch: bytes) -> None:
    async with client.pipeline(transaction=True) as pipeline:
        pipeline.rpush(USAGE_LIST, batch)
        pipeline.ltrim(USAGE_LIST, -_LIST_LENGTH, -1)
        await pipeline.execute()
