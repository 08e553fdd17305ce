"""The asking side of the benchmark: many kept connections, each asking again as soon as it was answered.

``python -m tests.bench.load PORT JSON`` prints one JSON object. Times to first byte and ages of events are in
milliseconds; an event's age is the reader's clock minus the engine's clock that the event carries.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import cast

import uvloop

_STAMP = re.compile(rb'"content":"(\d+)"')
_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


@dataclass
class Plan:
    concurrency: int
    requests: int
    stream: bool = False
    chunks: int = 200
    key: str = ""
    prompt_bytes: int = 200


@dataclass
class Result:
    wall_s: float = 0.0
    answered: int = 0
    failed: int = 0
    events: int = 0
    ttfb_ms: list[float] = field(default_factory=list)
    age_ms: list[float] = field(default_factory=list)
    first_error: str = ""


def quantile(values: list[float], q: float) -> float:
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


class Asker(asyncio.Protocol):
    """One connection. Ends of answers are found by content-length, or by the last chunk's ``0``."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.transport: asyncio.Transport
        self.sent_ns = 0
        self.head = b""
        self.need = -1
        self.body_started = False
        self.tail = b""
        self.busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.ask()

    def ask(self) -> None:
        if self.load.left <= 0:
            self.busy = False
            self.load.idle()
            return
        self.load.left -= 1
        self.busy = True
        self.head, self.need, self.body_started, self.tail = b"", -1, False, b""
        self.sent_ns = time.monotonic_ns()
        self.transport.write(self.load.request)

    def data_received(self, data: bytes) -> None:
        result = self.load.result
        if not self.body_started:
            self.head += data
            head, separator, rest = self.head.partition(b"\r\n\r\n")
            if not separator:
                return
            if not rest and b"content-length: 0" not in head:
                return  # the first byte that counts is the body's
            self.body_started = True
            result.ttfb_ms.append((time.monotonic_ns() - self.sent_ns) / 1e6)
            if b" 200 " not in head[:16]:
                result.failed += 1
                result.first_error = result.first_error or (head[:80] + rest[:300]).decode(errors="replace")
            match = _LENGTH.search(head)
            self.need = int(match[1]) if match else -1
            data = rest
        if self.need >= 0:
            self.need -= len(data)
            if self.need <= 0:
                self.done()
            return
        stamps = _STAMP.findall(data)
        if stamps:
            now = time.monotonic_ns()
            result.events += len(stamps)
            result.age_ms.extend((now - int(stamp)) / 1e6 for stamp in stamps)
        self.tail = (self.tail + data)[-5:]
        if self.tail == b"0\r\n\r\n":
            self.done()

    def done(self) -> None:
        self.load.result.answered += 1
        self.ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.busy:
            self.load.result.failed += 1
            self.load.result.first_error = self.load.result.first_error or f"connection lost: {exc}"
            self.busy = False
            self.load.idle()


class Load:
    def __init__(self, port: int, plan: Plan) -> None:
        self.port = port
        self.plan = plan
        self.left = plan.requests
        self.result = Result()
        self.working = plan.concurrency
        self.finished = asyncio.Event()
        body = json.dumps(
            {
                "model": "bench",
                "messages": [{"role": "user", "content": "x" * plan.prompt_bytes}],
                "max_tokens": plan.chunks,
                **({"stream": True} if plan.stream else {}),
            }
        ).encode()
        auth = f"Authorization: Bearer {plan.key}\r\n" if plan.key else ""
        self.request = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{auth}"
            f"Content-Type: application/json\r\nAccept: */*\r\nUser-Agent: bench/1\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode() + body

    def idle(self) -> None:
        self.working -= 1
        if self.working <= 0:
            self.finished.set()

    async def run(self) -> Result:
        loop = asyncio.get_running_loop()
        started = time.monotonic()
        for _ in range(self.plan.concurrency):
            await loop.create_connection(lambda: Asker(self), "127.0.0.1", self.port)
            if self.plan.stream:
                await asyncio.sleep(0.002)  # spread the starts: the steady state is what is measured
        await self.finished.wait()
        self.result.wall_s = time.monotonic() - started
        return self.result


def summary(result: Result) -> dict[str, object]:
    out = asdict(result)
    for name in ("ttfb_ms", "age_ms"):
        values = out.pop(name)
        out[f"{name[:-3]}_p50_ms"] = round(quantile(values, 0.5), 3)
        out[f"{name[:-3]}_p99_ms"] = round(quantile(values, 0.99), 3)
    return out


async def main(port: int, plan: Plan) -> None:
    result = await asyncio.wait_for(Load(port, plan).run(), timeout=300)
    print(json.dumps(summary(result)))


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), Plan(**json.loads(sys.argv[2]))))
