"""A fast engine for measuring: answers chat completions over a bare asyncio protocol, with next to no work of its own.

``python -m tests.bench.fake_engine PORT``. A request whose body asks for a stream gets ``chunks`` events, one every
10 ms; each event's content is the engine's monotonic clock in nanoseconds, so a reader on the same machine knows how
old it is. Streams are spread over ten phases, so that they do not all write in the same millisecond. Any other
request gets a small JSON answer at once.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from typing import cast

import uvloop

TICK_S = 0.01
PHASES = 10
DEFAULT_CHUNKS = 200

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_CHUNKS = re.compile(rb'"max_tokens": *(\d+)')

_ANSWER = (
    b'{"id":"chatcmpl-0123456789abcdef","object":"chat.completion","created":1700000000,"model":"bench","choices":'
    b'[{"index":0,"message":{"role":"assistant","content":"Hello there, how can I help?","refusal":null,'
    b'"tool_calls":[]},"logprobs":null,"finish_reason":"stop","stop_reason":null}],"service_tier":null,'
    b'"usage":{"prompt_tokens":12,"total_tokens":20,"completion_tokens":8,"prompt_tokens_details":null},'
    b'"prompt_logprobs":null,"kv_transfer_params":null}'
)
_SMALL = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: " + str(len(_ANSWER)).encode() + b"\r\n\r\n"
) + _ANSWER
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_PREFIX = (
    b'data: {"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"bench",'
)
_CHUNK = _PREFIX + b'"choices":[{"index":0,"delta":{"content":"%d"},"logprobs":null,"finish_reason":null}]}\n\n'
_USAGE = _PREFIX + b'"choices":[],"usage":{"prompt_tokens":12,"total_tokens":212,"completion_tokens":200}}\n\n'


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_END = framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def _plain(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


class Ticker:
    """One timer for all streams of a phase: an engine that costs little more than its writes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.streams: list[set[EngineProtocol]] = [set() for _ in range(PHASES)]
        self.turn = 0
        self.started = loop.time()
        self.ticks = 0
        loop.call_later(TICK_S / PHASES, self.tick)

    def add(self, stream: EngineProtocol) -> None:
        self.streams[self.turn % PHASES].add(stream)
        self.turn += 1

    def tick(self) -> None:
        phase = self.streams[self.ticks % PHASES]
        if phase:
            chunk = framed(_CHUNK % time.monotonic_ns())
            for stream in tuple(phase):
                stream.step(chunk, phase)
        self.ticks += 1
        self.loop.call_at(self.started + self.ticks * TICK_S / PHASES, self.tick)


class EngineProtocol(asyncio.Protocol):
    def __init__(self, ticker: Ticker) -> None:
        self.ticker = ticker
        self.buffer = b""
        self.left = 0
        self.usage = False
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.left = -1

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while True:
            head, separator, rest = self.buffer.partition(b"\r\n\r\n")
            if not separator:
                return
            match = _LENGTH.search(head)
            length = int(match[1]) if match else 0
            if len(rest) < length:
                return
            self.buffer = rest[length:]
            self.answer(head, rest[:length])

    def answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET"):
            if b" /v1/models" in head[:32]:
                self.transport.write(_plain(b'{"object":"list","data":[{"id":"bench","object":"model"}]}'))
            else:
                self.transport.write(_plain(b'{"status":"ok"}'))
        elif b'"stream":true' in body or b'"stream": true' in body:
            match = _CHUNKS.search(body)
            self.left = int(match[1]) if match else DEFAULT_CHUNKS
            self.usage = b"include_usage" in body
            self.transport.write(_STREAM_HEAD)
            self.ticker.add(self)
        else:
            self.transport.write(_SMALL)

    def step(self, chunk: bytes, phase: set[EngineProtocol]) -> None:
        if self.left > 0:
            self.left -= 1
            self.transport.write(chunk)
            return
        phase.discard(self)
        if self.left == 0:
            self.transport.write((framed(_USAGE) if self.usage else b"") + _END)


async def main(port: int) -> None:
    loop = asyncio.get_running_loop()
    ticker = Ticker(loop)
    server = await loop.create_server(lambda: EngineProtocol(ticker), "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
