"""Messages between the API server and EngineCore: one JSON object a line, over a socket pair."""

from __future__ import annotations

import json
import socket
from typing import Any

#: More unsent output than this means that the other side will not read again.
MAX_UNSENT = 64 * 1024 * 1024
READ_SIZE = 256 * 1024


class Lines:
    """Cuts a byte stream into JSON messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines if line]


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class CoreChannel:
    """EngineCore's end: never blocks, and goes quiet when the API server is gone."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.closed = False
        self._lines = Lines()
        self._unsent = b""

    @property
    def wants_to_write(self) -> bool:
        return bool(self._unsent) and not self.closed

    def send(self, message: dict[str, Any]) -> None:
        if self.closed:
            return
        self._unsent += encode(message)
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                sent = self.socket.send(self._unsent)
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            if len(self._unsent) > MAX_UNSENT:
                self.closed = True
        except OSError:
            self.closed = True
        if self.closed:
            self._unsent = b""

    def receive(self) -> list[dict[str, Any]]:
        """What has arrived; ``closed`` is set when the API server hung up."""
        try:
            data = self.socket.recv(READ_SIZE)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.closed = True
            return []
        return self._lines.feed(data)
