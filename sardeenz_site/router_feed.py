"""What connects a router process to the rest: routes in, usage, wishes and notable events out. No Django here.

Routes come from Redis, by message and by timer, and from the file beside it while Redis is away. Everything that goes
out may fail for as long as the broker is away: requests are answered on, usage adds up in memory, wishes are repeated
while somebody waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from models_app.router.peers import Peers
from models_app.router.table import BadSnapshot, RouteTable, TableSource
from models_app.router.usage import UsageRecord
from sardeenz_site import router_captures
from sardeenz_site.router_usage import UsageSender

if TYPE_CHECKING:
    from models_app.router.app import RouterApp

log = logging.getLogger(__name__)

ROUTES_KEY = "sardeenz:routes"
ROUTES_CHANNEL = "sardeenz:routes.changed"
PEERS_CHANNEL = "sardeenz:router.peers"
EVENTS_LIST = "sardeenz:router.events"
DEMAND_TASK = "models_app.demand"
SUSPECT_TASK = "models_app.suspect"
CONTROL_QUEUE = "control"

_PARTS = ("models", "routes", "keys")
_POLL_S = 2.0
_TELL_PEERS_S = 1.0
_RECONNECT_S = 1.0
_EVENTS_LIST_LENGTH = 500
_DEMAND_EXPIRES_S = 60
#: A hint that an engine failed is worth nothing later: the reconciler has looked since.
_SUSPECT_EXPIRES_S = 10
_SEND_LEFT_EVERY_S = 30.0


class RouterFeed:
    """``start`` once the loop runs; ``stop`` before it ends. ``redis_url`` None: the file alone is read."""

    def __init__(
        self, source: TableSource, *, file: Path, redis_url: str | None, celery_url: str | None = None
    ) -> None:
        self.source = source
        self.file = file
        self._redis_url = redis_url
        self._celery_url = celery_url or redis_url
        self._client: aioredis.Redis | None = None
        self._celery: Any = None
        self._peers: Peers | None = None
        self._changed = asyncio.Event()
        self._events: deque[dict[str, Any]] = deque(maxlen=100)
        self._captures: deque[dict[str, Any]] = deque(maxlen=50)
        self._suspects: dict[int, tuple[str, float]] = {}  # instance id -> how it failed, when (monotonic)
        self._suspected = asyncio.Event()
        self._usage = UsageSender(file.with_name("router-usage"))
        self._left_sent_at = float("-inf")
        self._tasks: list[asyncio.Task[None]] = []
        self._last: dict[str, Any] = {}
        self._file_stamp: tuple[int, int] = (0, 0)
        self._away = False
        self._complaint = ""

    # --- life ------------------------------------------------------------------------------------------------

    def start(self, app: RouterApp) -> None:
        """Reads the file at once, so that a router serves before it has reached Redis."""
        self.read_file()
        if self._redis_url is not None:
            self._client = aioredis.Redis.from_url(
                self._redis_url,
                socket_timeout=2,
                socket_connect_timeout=1,
                retry=Retry(NoBackoff(), 1),
                health_check_interval=30,
            )
            self._peers = Peers(f"{os.uname().nodename}:{os.getpid()}", app.limiter, app.doors)
        jobs = [self._poll()]
        if self._client is not None:
            jobs += [self._listen(), self._tell_peers(), self._tell_suspects()]
        self._tasks = [asyncio.get_running_loop().create_task(job) for job in jobs]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._usage.close()
        if self._client is not None:
            with contextlib.suppress(RedisError, OSError):
                await self._client.aclose()
            self._client = None

    # --- routes in ---------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        while not _cancelled():
            await self.refresh()
            if _cancelled():  # the wish to end came while Redis was asked, and was taken for its failure
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._changed.wait()
            self._changed.clear()

    async def refresh(self) -> None:
        """Take what Redis holds; the file when Redis is away, empty or behind."""
        data = None
        if self._client is not None:
            try:
                data = await self._client.get(ROUTES_KEY)
            except (RedisError, OSError) as exc:
                self._note_away(exc)
            else:
                self._note_back()
        if isinstance(data, bytes):
            self.take(data, newest=True)
        else:
            self.read_file()

    def read_file(self) -> None:
        """The file's table, if it was written since the last look and is newer than the one in use."""
        try:
            status = self.file.stat()
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp == self._file_stamp:
                return
            data = self.file.read_bytes()
        except OSError:
            return
        self._file_stamp = stamp
        self.take(data, newest=False)

    def take(self, data: bytes, *, newest: bool) -> None:
        """Use this snapshot. One that cannot be read leaves the table in use as it is.

        ``newest``: it comes from where writers are put in order, so it is taken whatever its version says (a clock
        may have been set back); else an older version than the one in use is ignored.
        """
        try:
            snapshot = orjson.loads(data)
            if not isinstance(snapshot, dict):
                raise BadSnapshot("route snapshot: not an object")
            current = self.source.table
            if current is not None and not newest and snapshot.get("version", 0) < current.version:
                return
            if current is not None and all(snapshot.get(name) == self._last.get(name) for name in _PARTS):
                self.source.heard(float(snapshot["at"]))
                return
            table = RouteTable.from_snapshot(snapshot)
        except (orjson.JSONDecodeError, BadSnapshot, KeyError, TypeError, ValueError) as exc:
            if str(exc) != self._complaint:
                self._complaint = str(exc)
                log.error("routes not taken, the ones in use stay: %s", exc)
            return
        self._complaint = ""
        self._last = {name: snapshot.get(name) for name in _PARTS}
        self.source.swap(table)

    async def _listen(self) -> None:
        """Changes as they happen. A message lost, or a listener cut off, costs one turn of the timer."""
        while not _cancelled():
            try:
                await self._hear()
            except (RedisError, OSError) as exc:
                if _cancelled():
                    return
                self._note_away(exc)
            await asyncio.sleep(_RECONNECT_S)

    async def _hear(self) -> None:
        client = self._client
        if client is None:
            return
        async with client.pubsub(ignore_subscribe_messages=True) as pubsub:
            await pubsub.subscribe(ROUTES_CHANNEL, PEERS_CHANNEL)
            self._changed.set()  # what changed before we listened
            while not _cancelled():
                message = await pubsub.get_message(timeout=5.0)
                if message is None:
                    continue
                if message["channel"] == ROUTES_CHANNEL.encode():
                    self._changed.set()
                elif self._peers is not None:
                    try:
                        self._peers.hear(orjson.loads(message["data"]))
                    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as exc:
                        log.warning("message of another router not understood: %s", exc)

    # --- out -----------------------------------------------------------------------------------------------------

    async def _tell_peers(self) -> None:
        while not _cancelled():
            await asyncio.sleep(_TELL_PEERS_S)
            peers, client = self._peers, self._client
            if peers is None or client is None:
                return
            peers.forget_silent()
            self._forget_captures()
            message = peers.message()
            try:
                if message is not None:
                    await client.publish(PEERS_CHANNEL, orjson.dumps(message))
                await self._push_events(client)
                await self._settle_usage(client)
                await self._push_captures(client)
            except (RedisError, OSError) as exc:
                peers.not_told()
                self._note_away(exc)

    async def _push_events(self, client: aioredis.Redis) -> None:
        if not self._events:
            return
        events = list(self._events)
        async with client.pipeline(transaction=False) as pipeline:
            pipeline.lpush(EVENTS_LIST, *(orjson.dumps(event) for event in events))
            pipeline.ltrim(EVENTS_LIST, 0, _EVENTS_LIST_LENGTH - 1)
            await pipeline.execute()
        for _ in events:
            self._events.popleft()

    async def _push_captures(self, client: aioredis.Redis) -> None:
        """Only of keys whose capture is on now: it may have been switched off since the request began."""
        table = self.source.table
        if not self._captures or table is None:
            return
        now = time.time()
        until = {key.id: key.capture_until for key in table.keys.values() if (key.capture_until or 0.0) > now}
        while self._captures:
            capture = self._captures[0]
            ends = until.get(capture["key_id"])
            if ends is not None:
                await router_captures.push(client, capture, until=ends)
            self._captures.popleft()

    def _forget_captures(self) -> None:
        """What waits for Redis does not outlive its time either."""
        now = time.time()
        kept = [capture for capture in self._captures if (capture.get("until") or 0.0) > now]
        if len(kept) < len(self._captures):
            self._captures.clear()
            self._captures.extend(kept)

    async def _settle_usage(self, client: aioredis.Redis) -> None:
        await self._usage.settle(client)
        now = time.monotonic()
        if now - self._left_sent_at >= _SEND_LEFT_EVERY_S:
            await self._usage.send_left(client)
            self._left_sent_at = now

    def on_capture(self, capture: dict[str, Any]) -> None:
        """Kept until it can be told; the oldest is dropped past fifty."""
        self._captures.append(capture)

    def on_event(self, event: dict[str, Any]) -> None:
        """Kept until it can be told; the oldest is dropped past a hundred."""
        self._events.append(event)

    def on_suspect(self, instance_id: int, kind: str) -> None:
        """An engine failed: told as soon as the broker takes it, the newest failure of each instance only."""
        self._suspects[instance_id] = (kind, time.monotonic())
        self._suspected.set()

    async def _tell_suspects(self) -> None:
        """Hints to look at an engine now. With the broker away they grow old and go; the reconciler looks anyway."""
        while not _cancelled():
            await self._suspected.wait()
            self._suspected.clear()
            waiting, self._suspects = self._suspects, {}
            for instance_id, (kind, at) in waiting.items():
                if time.monotonic() - at > _SUSPECT_EXPIRES_S:
                    continue
                try:
                    await asyncio.to_thread(
                        self._send_task, SUSPECT_TASK, [instance_id, kind], expires=_SUSPECT_EXPIRES_S
                    )
                except Exception as exc:  # kombu raises errors of its own, of redis-py and of sockets
                    self._note_away(exc)

    async def on_usage(self, records: list[UsageRecord]) -> None:
        """One entry per batch. Raises when Redis does not take it; the router adds it to the next one."""
        client = self._client
        if client is None:
            raise ConnectionError("no broker to tell usage to")
        try:
            await self._usage.send(client, records)
        except (RedisError, OSError) as exc:
            self._note_away(exc)
            raise

    async def on_demand(self, model: str) -> None:
        """Send the task that wakes or loads a model. Raises when the broker does not take it."""
        if self._celery_url is None:
            raise ConnectionError("no broker to ask for a model")
        await asyncio.to_thread(self._send_task, DEMAND_TASK, [model], expires=_DEMAND_EXPIRES_S)

    def _send_task(self, name: str, args: list[Any], *, expires: float) -> None:
        if self._celery is None:
            from celery import Celery  # only a router that needs the control side pays for it

            self._celery = Celery(set_as_current=False, fixups=[], broker=self._celery_url)
            self._celery.conf.update(
                task_ignore_result=True,
                broker_transport_options={
                    "socket_timeout": 5,
                    "socket_connect_timeout": 2,
                    "max_retries": 1,
                    "interval_start": 0,
                    "interval_step": 0.2,
                },
            )
        self._celery.send_task(name, args=args, queue=CONTROL_QUEUE, expires=expires, retry=False, ignore_result=True)

    # --- one line when it goes, one when it comes back -------------------------------------------------------------

    def _note_away(self, exc: Exception) -> None:
        if not self._away:
            self._away = True
            log.warning("Redis is away, going on with the routes and keys known: %s", exc)

    def _note_back(self) -> None:
        if self._away:
            self._away = False
            log.warning("Redis is back")


def _cancelled() -> bool:
    """Whether this task was asked to end. redis-py can answer a cancellation with an error of its own instead."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
