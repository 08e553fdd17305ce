"""``python -m tests.bench.soak --minutes 10``: streams without pause while engines die and come back elsewhere.

Three engines serve one model; every few seconds one is killed and started again on another port, and the routes follow
as the control side would write them. Every stream must end as one of: *whole* (all chunks, in order, and ``[DONE]``),
*lost* (an error event, when its engine was killed in the middle), *refused* (503 before the first byte). Anything else
is *wrong* and fails the run, as does memory that grows.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from tests.bench.targets import KEY, Target, free_port, our_router, process, wait_until_up, write_routes

_STAMP = re.compile(rb'"content":"(\d+)"')
_CODE = re.compile(rb'"code":"([a-z_]+)"')
CHUNKS = 200


class Tally:
    def __init__(self) -> None:
        self.ends: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.chunks = 0

    def end(self, kind: str, detail: str = "") -> None:
        self.ends[kind] += 1
        if kind == "wrong" and len(self.wrong) < 10:
            self.wrong.append(detail)


def judge(status: int, body: bytes, chunks: int, in_order: bool, cut: bool) -> tuple[str, str]:
    """How one stream ended, from its status, the end of its body and the chunks that were counted."""
    detail = f"status {status}, {chunks} chunks, {'cut off, ' if cut else ''}ends {body[-120:]!r}"
    if status == 503:
        return "refused", detail
    if status != 200 or not in_order:
        return "wrong", detail
    if body.endswith(b"data: [DONE]\n\n") and chunks == CHUNKS:
        return "whole", detail
    code = _CODE.search(body.rsplit(b"data: ", 1)[-1])
    if not cut and code is not None and code[1] in (b"engine_lost", b"engine_timeout") and b"[DONE]" not in body:
        return "lost", detail
    return "wrong", detail


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, tally: Tally) -> bool:
    """One stream on a kept connection; whether the connection can be used again."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    body, chunks, last, in_order, cut = b"", 0, 0, True, False
    length = re.search(rb"content-length: (\d+)", head)
    if length:
        body = await reader.readexactly(int(length[1]))
    else:
        try:
            while True:
                size = int(await reader.readuntil(b"\r\n"), 16)
                data = (await reader.readexactly(size + 2))[:-2]
                if size == 0:
                    break
                for stamp in map(int, _STAMP.findall(data)):
                    chunks += 1
                    in_order = in_order and stamp >= last
                    last = stamp
                body = (body + data)[-2000:]
        except (asyncio.IncompleteReadError, ConnectionError):
            cut = True
    tally.chunks += chunks
    tally.end(*judge(status, body, chunks, in_order, cut))
    if status == 503:
        await asyncio.sleep(0.2)
    return not cut


async def client(port: int, until: float, tally: Tally, *, keep: bool) -> None:
    body = json.dumps({"model": "bench", "messages": [], "stream": True, "max_tokens": CHUNKS}).encode()
    request = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body
    while time.monotonic() < until:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while time.monotonic() < until and await ask(reader, writer, request, tally) and keep:
                pass
        except (ConnectionError, asyncio.IncompleteReadError) as exc:
            tally.end("wrong", f"no answer: {exc!r}")
        finally:
            writer.close()


async def main(args: argparse.Namespace) -> int:
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="sardeenz-soak-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        engines: list[tuple[int, contextlib.ExitStack]] = [start_engine(folder) for _ in range(3)]
        stack.callback(lambda: [one.close() for _, one in engines])
        router = stack.enter_context(our_router(folder, [port for port, _ in engines], workers=1))
        home = next(folder.glob("home-*"))
        until = time.monotonic() + args.minutes * 60
        asking = (client(router.port, until, tally, keep=not args.fresh) for _ in range(args.streams))
        clients = [asyncio.create_task(one) for one in asking]
        memory = await watch(router, folder, home, engines, until, args.kill_every, tally)
        await asyncio.wait_for(asyncio.gather(*clients), 60)
    return report(tally, memory, args)


def start_engine(folder: Path) -> tuple[int, contextlib.ExitStack]:
    port, stack = free_port(), contextlib.ExitStack()
    log = folder / f"engine-{port}.log"
    running: subprocess.Popen[bytes] = stack.enter_context(
        process([sys.executable, "-m", "tests.bench.fake_engine", str(port)], log)
    )
    wait_until_up(port, "/health", running, log)
    return port, stack


async def watch(
    router: Target,
    folder: Path,
    home: Path,
    engines: list[tuple[int, contextlib.ExitStack]],
    until: float,
    kill_every_s: float,
    tally: Tally,
) -> list[float]:
    """Kill and move engines in turn; the router's memory in MiB, second by second."""
    memory: list[float] = []
    turn, next_kill = 0, time.monotonic() + kill_every_s
    while time.monotonic() < until:
        await asyncio.sleep(1)
        memory.append(router.rss_bytes() / 2**20)
        if time.monotonic() >= next_kill and until - time.monotonic() > 5:
            _, old = engines[turn % 3]
            await asyncio.to_thread(old.close)
            engines[turn % 3] = await asyncio.to_thread(start_engine, folder)
            await asyncio.to_thread(write_routes, home, [port for port, _ in engines])
            turn += 1
            next_kill = time.monotonic() + kill_every_s
            print(f"{memory[-1]:.0f} MiB, {dict(tally.ends)}", file=sys.stderr, flush=True)
    return memory


def report(tally: Tally, memory: list[float], args: argparse.Namespace) -> int:
    quarter = max(1, len(memory) // 4)
    early, late = statistics.median(memory[quarter : 2 * quarter] or memory), statistics.median(memory[-quarter:])
    grown = late - early
    print(f"{args.minutes:g} min, {args.streams} streams at once, {tally.chunks} chunks: {dict(tally.ends)}")
    print(f"memory: second quarter {early:.1f} MiB, last quarter {late:.1f} MiB, highest {max(memory):.1f} MiB")
    for wrong in tally.wrong:
        print("wrong:", wrong)
    flat = grown <= max(5.0, 0.08 * early)  # what a leak of one object per request is far above
    if not flat:
        print(f"memory grew by {grown:.1f} MiB")
    return 0 if flat and not tally.ends["wrong"] and tally.ends["whole"] else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.soak")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--fresh", action="store_true", help="a new connection for each stream")
    parser.add_argument("--kill-every", type=float, default=15.0, help="seconds")
    sys.exit(uvloop.run(main(parser.parse_args())))
