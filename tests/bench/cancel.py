"""``python -m tests.bench.cancel``: how long after a client left its engine is told, in milliseconds.

Client and engine live in this process and read one clock; the router between them is the program that runs in
production. Each client leaves in the middle: of a stream after its first event, or of a plain answer that never comes.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import cast

import uvloop

from tests.bench.load import quantile
from tests.bench.targets import KEY, our_router

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
_LIMIT_S = 10.0


class Engine(asyncio.Protocol):
    """Begins a stream and goes no further; of a plain request it answers nothing."""

    def __init__(self, asked: asyncio.Queue[None], left: asyncio.Queue[float]) -> None:
        self.asked = asked
        self.left = left
        self.busy = False
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.busy = True
        if b'"stream": true' in data:
            self.transport.write(_HEAD + b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT))
        self.asked.put_nowait(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.busy:
            self.left.put_nowait(time.monotonic())


def _request(port: int, *, stream: bool) -> bytes:
    flag = ', "stream": true' if stream else ""
    body = f'{{"model": "bench", "messages": [{{"role": "user", "content": "x"}}]{flag}}}'.encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def measure(times: int) -> dict[str, list[float]]:
    """Milliseconds from the client's closing to the engine's connection being lost, for each kind of answer."""
    loop = asyncio.get_running_loop()
    asked: asyncio.Queue[None] = asyncio.Queue()
    left: asyncio.Queue[float] = asyncio.Queue()
    server = await loop.create_server(lambda: Engine(asked, left), "127.0.0.1", 0)
    found: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="sardeenz-bench-") as folder,
        our_router(Path(folder), [server.sockets[0].getsockname()[1]], workers=1) as router,
    ):
        for name, stream in (("stream", True), ("plain answer", False)):
            found[name] = []
            for _ in range(times):
                async with asyncio.timeout(_LIMIT_S):
                    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
                    writer.write(_request(router.port, stream=stream))
                    await asked.get()
                    if stream:
                        await reader.readuntil(b"\n\n")
                    left_at = time.monotonic()
                    writer.close()
                    found[name].append((await left.get() - left_at) * 1000)
    server.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.cancel")
    parser.add_argument("--times", type=int, default=300)
    given = parser.parse_args()
    print("| a client leaves a … | its engine is told after, p50 / p99 / most, ms |\n|---|---|")
    for name, values in uvloop.run(measure(given.times)).items():
        print(f"| {name} | {quantile(values, 0.5):.2f} / {quantile(values, 0.99):.2f} / {max(values):.2f} |")


if __name__ == "__main__":
    main()
