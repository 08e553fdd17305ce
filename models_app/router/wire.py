"""Below ASGI, where the server is uvicorn: chunks handed on as they came, small answers in one piece.

An engine that streams writes one HTTP chunk per event, and uvicorn would write the very same bytes to the client again:
taken apart and put together in between is two fifths of a chunk's cost. Where a read holds whole chunks of whole events
that nobody has to look into, it goes straight from one connection to the other; everything else takes the long way.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from typing import Any, Protocol

from models_app.router.request import Send

_UVICORN = "uvicorn.protocols.http.httptools_impl"
#: The longest chunk header that is looked for: eight hexadecimal digits and their line end.
_HEADER_BYTES = 10
_HEX = frozenset(b"0123456789abcdefABCDEF")
#: Sizes by their digits: events of one stream are of a few dozen lengths. Bounded, since clients decide the lengths.
_SIZES: dict[bytes, int] = {}
_SIZES_MOST = 4096


class Flow(Protocol):
    write_paused: bool


class Transport(Protocol):
    def write(self, data: bytes) -> None: ...


class Wire(Protocol):
    """What is used of the server's side of one exchange."""

    disconnected: bool
    flow: Flow
    transport: Transport


class Cork:
    """Holds what is written until it is taken out, so that head and body of a small answer leave in one piece."""

    __slots__ = ("_pieces", "_transport")

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        self._pieces.append(data)

    def flush(self) -> None:
        if self._pieces:
            self._transport.write(b"".join(self._pieces))
            self._pieces.clear()

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def send_whole(send: Send, start: MutableMapping[str, Any], body: MutableMapping[str, Any]) -> None:
    """The two messages of a complete answer; with uvicorn by one system call instead of two."""
    module = sys.modules.get(_UVICORN)
    cycle: Any = getattr(send, "__self__", None)
    if module is None or type(cycle) is not module.RequestResponseCycle:
        await send(start)
        await send(body)
        return
    transport = cycle.transport
    cork = cycle.transport = Cork(transport)
    try:
        await send(start)
        await send(body)
    finally:
        cycle.transport = transport
        cork.flush()


def wire_of(send: Send) -> Wire | None:
    """The client's connection below ``send``, once a chunked answer has begun; None under any other server."""
    module = sys.modules.get(_UVICORN)
    cycle: Any = getattr(send, "__self__", None)
    if module is None or type(cycle) is not module.RequestResponseCycle:
        return None
    begun = cycle.response_started and not cycle.response_complete and cycle.chunked_encoding is True
    return cycle if begun and cycle.scope["method"] != "HEAD" else None


def is_whole_chunks(data: bytes) -> bool:
    """Whether ``data`` is one or more whole chunks, the last (empty) one and extensions not among them."""
    start, length = 0, len(data)
    while start < length:
        end = data.find(b"\r\n", start, start + _HEADER_BYTES)
        if end <= start:
            return False
        digits = data[start:end]
        size = _SIZES.get(digits) or _size(digits)
        start = end + 4 + size
        if size == 0 or data[start - 2 : start] != b"\r\n":
            return False
    return start == length and length > 0


def _size(digits: bytes) -> int:
    """The size that a chunk header tells; 0 for the last chunk and for what is none."""
    if not _HEX.issuperset(digits):  # int() would take signs, blanks and underscores too
        return 0
    size = int(digits, 16)
    if len(_SIZES) < _SIZES_MOST:
        _SIZES[digits] = size
    return size
