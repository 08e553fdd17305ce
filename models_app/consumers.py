"""The one WebSocket of a page: the newest reading of each host and notes of what changed, never a backlog.

Latest wins: what arrives while the browser is busy replaces what it has not seen. The browser acknowledges a frame
before the next one is sent, so a slow or hidden one costs no memory here (daphne itself gives no back-pressure). Rights
are looked at again before each frame, by a verdict that is never older than ``VERDICT_AGE_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from importlib import import_module
from typing import Any
from urllib.parse import parse_qs, urlsplit

from channels.consumer import get_handler_name
from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings
from django.contrib.auth import get_user
from django.http import HttpRequest

from models_app.events import LIVE_GROUP
from models_app.presentation.broker_state import broker_alive
from models_app.presentation.frames import encode

#: Seconds between two frames to one browser at the least.
FRAME_GAP_S = 0.5
#: An empty frame after so long without news, so that a browser can tell a quiet link from a dead one.
HEARTBEAT_S = 5.0
#: How old the verdict on somebody's rights may be.
VERDICT_AGE_S = 5.0
#: More changes than this at once are one change: the board is fetched as a whole.
MOST_NOTES = 500

NOT_LOGGED_IN = 4401
RIGHTS_LOST = 4403
BAD_ORIGIN = 4400
TRY_LATER = 1013


class _Verdicts:
    """Whether a session may still look on, asked of the database once per session and ``VERDICT_AGE_S``."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, bool]] = {}

    async def ask(self, session_key: str) -> bool:
        now = time.monotonic()
        at, verdict = self._known.get(session_key, (0.0, False))
        if now - at < VERDICT_AGE_S:
            return verdict
        verdict = await database_sync_to_async(_still_allowed)(session_key)
        if len(self._known) > 2000:
            self._known.clear()
        self._known[session_key] = (now, verdict)
        return bool(verdict)


def _still_allowed(session_key: str) -> bool:
    """Read session and user afresh: logged out, password changed, made inactive or flushed all answer no."""
    store = import_module(settings.SESSION_ENGINE).SessionStore(session_key)
    request = HttpRequest()
    request.session = store
    user = get_user(request)
    return user.is_authenticated and user.is_active  # every active user may look on; acts are checked where they are


verdicts = _Verdicts()


class LiveConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]  # channels carries no types
    """``/ws/live``; with ``?samples=1`` readings come too, without it only notes of what changed."""

    async def connect(self) -> None:
        session = self.scope.get("session")
        if not origin_is_ours(self.scope):
            await self.close(BAD_ORIGIN)
            return
        if session is None or not session.session_key or not await verdicts.ask(str(session.session_key)):
            await self.close(NOT_LOGGED_IN)
            return
        self.session_key = str(session.session_key)
        self.samples_wanted = "samples" in parse_qs(self.scope.get("query_string", b"").decode())
        self.records: dict[str, dict[str, Any]] = {}
        self.notes: dict[str, set[int]] = {"instances": set(), "operations": set()}
        self.flags: set[str] = set()
        self.number = 0
        self.acknowledged = asyncio.Event()
        self.acknowledged.set()
        self.news = asyncio.Event()
        self.broker_ok = True
        await self.accept()
        self.joined = True
        try:
            await self.channel_layer.group_add(LIVE_GROUP, self.channel_name)
        except Exception:  # the broker is away: say so and part, the page polls and comes back
            self.joined = self.broker_ok = False
        self.pump = asyncio.create_task(self._pump())

    async def dispatch(self, message: dict[str, Any]) -> None:
        """Channels' own, without its visit to a thread for each message: no handler here keeps a database connection.

        Raises ValueError for a message that nobody here handles.
        """
        handler = getattr(self, get_handler_name(message), None)
        if handler is None:
            raise ValueError(f"No handler for messages of type {message['type']}.")
        await handler(message)

    async def disconnect(self, code: int) -> None:
        pump = getattr(self, "pump", None)
        if pump is not None:
            pump.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await pump
            with contextlib.suppress(Exception):
                await self.channel_layer.group_discard(LIVE_GROUP, self.channel_name)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """Only acknowledgements are understood; anything else is ignored."""
        try:
            message = json.loads(text_data or "")
        except ValueError:
            return
        if isinstance(message, dict) and message.get("ack") == self.number:
            self.acknowledged.set()

    # -- what the group is told; handlers keep the newest and return ------------------------------------------------

    async def sample(self, event: dict[str, Any]) -> None:
        if self.samples_wanted:
            record = event["record"]
            self.records[record["host"]] = record
            self.news.set()

    async def instance_changed(self, event: dict[str, Any]) -> None:
        self._note("instances", event["instance_id"])

    async def operation_changed(self, event: dict[str, Any]) -> None:
        self._note("operations", event["operation_id"])

    async def models_changed(self, event: dict[str, Any]) -> None:
        self._flag("models")

    async def gpus_changed(self, event: dict[str, Any]) -> None:
        self._flag("gpus")

    def _note(self, kind: str, row_id: int) -> None:
        self.notes[kind].add(row_id)
        if len(self.notes[kind]) > MOST_NOTES:  # more than a page shows: have it fetch the board
            self.notes[kind].clear()
            self.flags.add("gpus")
        self.news.set()

    def _flag(self, name: str) -> None:
        self.flags.add(name)
        self.news.set()

    # -- sending ----------------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        while True:
            await self._frame()
            if not self.joined:
                await self.close(TRY_LATER)
                return
            started = time.monotonic()
            await self.acknowledged.wait()
            try:
                await asyncio.wait_for(self.news.wait(), HEARTBEAT_S)
                self.broker_ok = True
            except TimeoutError:  # a quiet house, or nobody left to tell us
                self.broker_ok = await asyncio.to_thread(broker_alive)
            rest = FRAME_GAP_S - (time.monotonic() - started)
            if rest > 0:
                await asyncio.sleep(rest)

    async def _frame(self) -> None:
        if not await verdicts.ask(self.session_key):
            await self.close(RIGHTS_LOST)
            await asyncio.Event().wait()  # until disconnect() cancels
        self.news.clear()
        self.number += 1
        self.acknowledged.clear()
        head: dict[str, Any] = {"n": self.number}
        if not self.broker_ok:
            head["broker"] = False
        for kind, ids in self.notes.items():
            if ids:
                head[kind] = sorted(ids)
                ids.clear()
        for name in self.flags:
            head[name] = True
        self.flags.clear()
        text = json.dumps(head, separators=(",", ":"))
        if self.records:
            samples = ",".join(encode(record) for record in self.records.values())
            self.records.clear()
            text = f'{text[:-1]},"samples":[{samples}]}}'
        await self.send(text_data=text)


def origin_is_ours(scope: dict[str, Any]) -> bool:
    """A browser's Origin must be the host that it spoke to, or one of CSRF_TRUSTED_ORIGINS; no Origin, no browser."""
    headers: dict[bytes, bytes] = dict(scope.get("headers") or [])
    origin = headers.get(b"origin", b"").decode("latin-1")
    if not origin:
        return True
    if origin in settings.CSRF_TRUSTED_ORIGINS:
        return True
    host: str = headers.get(b"host", b"").decode("latin-1")
    return bool(urlsplit(origin).netloc == host)
