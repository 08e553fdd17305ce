"""Ask many engines at once over kept connections, from one thread, without ever waiting for the slow ones.

A request of a client library costs more than all else that the sampler does for an instance; this is one ``send`` and
one or two ``recv`` on a socket that stays open, the answer parsed by httptools (which knows chunks and lengths).
Loopback or a private link: no TLS, no redirects, no compression.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httptools

#: An answer that has not come after so many seconds is given up, and its connection closed.
GIVE_UP_S = 5.0
#: Metrics of a real engine are 60 to 100 kB; this much is a fault.
MOST_BYTES = 4 * 1024 * 1024
_IN_PROGRESS = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)

#: Who is asked, and for what: (attempt id, path).
Key = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """``status`` 0: no answer (refused, broken off, given up). ``at`` is monotonic seconds."""

    status: int
    body: bytes
    at: float


@dataclass(slots=True)
class _Connection:
    """One kept connection for one kind of question to one engine; also httptools' receiver."""

    address: str
    port: int
    request: bytes
    socket: socket.socket | None = None
    connected: bool = False
    fresh: bool = True  # has not brought an answer yet
    parser: httptools.HttpResponseParser | None = None
    asked_at: float | None = None
    late: bool = False
    size: int = 0
    body: list[bytes] = field(default_factory=list)
    complete: bool = False
    keep: bool = False

    def on_body(self, chunk: bytes) -> None:
        self.size += len(chunk)
        if self.size <= MOST_BYTES:
            self.body.append(chunk)

    def on_message_complete(self) -> None:
        self.complete = True
        # To be asked now: afterwards the parser stands before the next message and says no.
        self.keep = self.parser is not None and self.parser.should_keep_alive()


class EnginePoll:
    """``ask`` any number of engines, go and do something else, then ``collect`` what has come."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._connections: dict[Key, _Connection] = {}
        self._answers: dict[Key, Answer] = {}

    def ask(self, key: Key, *, address: str, port: int, token: str) -> bool:
        """Send the question unless one is under way. False: the answer to an earlier one is still awaited."""
        connection = self._connections.get(key)
        if connection is None or (connection.address, connection.port) != (address, port):
            if connection is not None:
                self._close(connection)
            secret = f"Authorization: Bearer {token}\r\n" if token else ""
            head = f"GET {key[1]} HTTP/1.1\r\nHost: {address}:{port}\r\n{secret}Accept: */*\r\n\r\n"
            connection = self._connections[key] = _Connection(address, port, head.encode("latin-1"))
        if connection.asked_at is not None:
            return False
        connection.asked_at = self._clock()
        self._send(key, connection)
        return True

    def collect(self, limit_s: float) -> dict[Key, Answer]:
        """Answers that are there or come within ``limit_s``. Those who were late the last time are not waited for."""
        deadline = self._clock() + limit_s
        while True:
            waiting = any(one.asked_at is not None and not one.late for one in self._connections.values())
            left = deadline - self._clock() if waiting else 0.0
            if not self._selector.get_map():
                break
            events = self._selector.select(max(left, 0.0))
            for ready, mask in events:
                self._step(ready.data, mask)
            if not events and left <= 0:
                break
            if not events and self._clock() >= deadline:
                break
        now = self._clock()
        for key, connection in list(self._connections.items()):
            if connection.asked_at is None:
                continue
            connection.late = True
            if now - connection.asked_at >= GIVE_UP_S:
                self._fail(key, connection)
        answers, self._answers = self._answers, {}
        return answers

    def forget(self, attempt_ids: set[int]) -> None:
        """Close the connections to all but these."""
        for key in [key for key in self._connections if key[0] not in attempt_ids]:
            self._close(self._connections.pop(key))

    def close(self) -> None:
        self.forget(set())
        self._selector.close()

    # -- one connection ------------------------------------------------------------------------------------------------

    def _send(self, key: Key, connection: _Connection) -> None:
        connection.body, connection.size, connection.complete, connection.keep = [], 0, False, False
        connection.parser = httptools.HttpResponseParser(connection)
        try:
            if connection.socket is None:
                family = socket.AF_INET6 if ":" in connection.address else socket.AF_INET
                connection.socket = socket.socket(family, socket.SOCK_STREAM)
                connection.socket.setblocking(False)
                connection.connected, connection.fresh = False, True
                code = connection.socket.connect_ex((connection.address, connection.port))
                if code not in _IN_PROGRESS:
                    raise OSError(code, "no connection")
                self._selector.register(connection.socket, selectors.EVENT_WRITE, key)
            elif connection.connected:
                connection.socket.send(connection.request)
        except OSError:
            self._broken(key, connection)

    def _step(self, key: Key, mask: int) -> None:
        connection = self._connections.get(key)
        if connection is None or connection.socket is None:
            return
        try:
            if not connection.connected:
                code = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, "no connection")
                connection.connected = True
                self._selector.modify(connection.socket, selectors.EVENT_READ, key)
                connection.socket.send(connection.request)
                return
            if mask & selectors.EVENT_READ:
                self._receive(key, connection)
        except (OSError, httptools.HttpParserError):
            self._broken(key, connection)

    def _receive(self, key: Key, connection: _Connection) -> None:
        assert connection.socket is not None and connection.parser is not None  # noqa: S101 - see _step
        data = connection.socket.recv(262144)
        if not data:
            # An answer without a length ends with the connection.
            if connection.asked_at is not None and connection.body and not connection.complete:
                connection.complete = True
                self._done(key, connection)
            else:
                self._broken(key, connection)
            self._close(connection)
            return
        if connection.asked_at is None:  # nothing was asked: not an engine that we understand
            self._close(connection)
            return
        connection.parser.feed_data(data)
        if connection.size > MOST_BYTES:
            self._fail(key, connection)
        elif connection.complete:
            self._done(key, connection)

    def _done(self, key: Key, connection: _Connection) -> None:
        assert connection.parser is not None  # noqa: S101 - see _step
        status = int(connection.parser.get_status_code())
        self._answers[key] = Answer(status, b"".join(connection.body), self._clock())
        connection.asked_at, connection.late, connection.body, connection.fresh = None, False, [], False
        if not connection.keep:
            self._close(connection)

    def _broken(self, key: Key, connection: _Connection) -> None:
        """The connection failed. One that has served may just have been closed by the engine: worth a second try."""
        kept = connection.connected and not connection.body and not connection.fresh
        asked = connection.asked_at is not None
        self._close(connection)
        if not asked:
            return
        if kept:
            connection.fresh = True
            self._send(key, connection)
        else:
            self._fail(key, connection)

    def _fail(self, key: Key, connection: _Connection) -> None:
        self._answers[key] = Answer(0, b"", self._clock())
        connection.asked_at, connection.late, connection.body = None, False, []
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        if connection.socket is None:
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.socket, connection.connected = None, False
