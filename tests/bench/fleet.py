"""A fleet without engines: the samplers of several hosts with simulated cards, and browsers that look at all of it.

Bounded: every process is a child of the caller's, and the browsers part after ``listen``'s seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import uvloop
from websockets.asyncio.client import connect
from websockets.sync.client import connect as sync_connect
from websockets.typing import Origin

from tests.gpus_app.fake_host import GIB, FakeHost, write_segment
from tests.sardeenz_site.stack import ROOT, START_LIMIT_S, Stack

SHM = Path("/dev/shm")
GPUS_PER_HOST = 8
#: Seconds from one browser's coming to the next one's: people do not open a page all in the same instant.
COMING_S = 0.02
FRAME_LIMIT_S = 30.0


@contextlib.contextmanager
def samplers(stack: Stack, *, gpus: int, instances: int) -> Iterator[None]:
    """Real samplers of ``gpus / 8`` more hosts, each with its share of the instances on its cards."""
    with contextlib.ExitStack() as after:
        for place in range(hosts := gpus // GPUS_PER_HOST):
            root = stack.home / f"fleet{place}"
            host = FakeHost(root, gpus=GPUS_PER_HOST, name=root.name)
            after.callback(host.close)
            per_host = instances // hosts
            for number in range(1 + place * per_host, 1 + (place + 1) * per_host):
                uuid = host.uuids[number % GPUS_PER_HOST]
                process = host.process(number, number)
                host.hold(process.pid, {uuid: 5 * GIB}, utilization=10)
                host.attempt(number, pid=process.pid, uuids=[uuid])
                segment = write_segment(SHM, host.ipc(number), 8 * GIB, GIB, GIB // 4)
                after.callback(segment.unlink, missing_ok=True)
            names = {"SARDEENZ_HOST_NAME": host.name, "SARDEENZ_SIM_DIR": str(host.sim)}
            environment = {**stack.env, **names, "SARDEENZ_RUN_DIR": str(host.runs)}
            sampler = subprocess.Popen(
                [sys.executable, "manage.py", "run_sampler"],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            after.callback(sampler.wait, 20)
            after.callback(sampler.terminate)
        yield


def wait_for_hosts(stack: Stack, cookie: str, count: int) -> None:
    """Until so many of the fleet's hosts are heard of."""
    seen: set[str] = set()
    with sync_connect(
        address(stack.port),
        origin=Origin(stack.url),
        additional_headers={"Cookie": cookie},
        max_size=None,
    ) as link:
        end = time.monotonic() + START_LIMIT_S
        while len(seen) < count:
            assert time.monotonic() < end, f"only {sorted(seen)} are heard of"
            frame = json.loads(link.recv(FRAME_LIMIT_S))
            seen |= {r["host"] for r in frame.get("samples", ()) if r["host"].startswith("fleet")}
            link.send(json.dumps({"ack": frame["n"]}))


def address(port: int) -> str:
    return f"ws://127.0.0.1:{port}/ws/live?samples=1"


def listen(stack: Stack, cookie: str, *, pages: int, seconds: float) -> dict[str, list[float]]:
    """Per host, the seconds from each reading's own time to its arrival in a browser, over ``pages`` browsers.

    The browsers live in a process of their own, so that they are not counted as somebody's who measures.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.fleet", str(stack.port), str(pages), str(seconds)],
        input=cookie,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=seconds + pages * COMING_S + 120,
        check=True,
    )
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


async def _browsers(port: int, cookie: str, pages: int, seconds: float) -> dict[str, list[float]]:
    lags: dict[str, list[float]] = {}
    all_there = asyncio.Event()
    there = 0

    async def page(place: int) -> None:
        nonlocal there
        await asyncio.sleep(place * COMING_S)
        async with connect(
            address(port),
            origin=Origin(f"http://127.0.0.1:{port}"),
            additional_headers={"Cookie": cookie},
            max_size=None,
            open_timeout=60,
            compression=None,
        ) as link:
            there += 1
            if there == pages:
                all_there.set()
            end = float("inf")
            while time.monotonic() < end:
                frame = orjson.loads(await asyncio.wait_for(link.recv(decode=False), FRAME_LIMIT_S))
                at = time.time()
                if all_there.is_set():  # with fewer there is less to do: it does not count
                    end = min(end, time.monotonic() + seconds)
                    for record in frame.get("samples", ()):
                        lags.setdefault(record["host"], []).append(at - record["t"])
                await link.send(json.dumps({"ack": frame["n"]}))

    await asyncio.gather(*(page(place) for place in range(pages)))
    return lags


if __name__ == "__main__":
    port, pages, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    sys.stdout.write(json.dumps(uvloop.run(_browsers(port, sys.stdin.read(), pages, seconds))))
