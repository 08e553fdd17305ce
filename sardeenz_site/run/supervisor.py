"""Start everything in order, keep it running, say where it is, and end everything in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Coroutine
from typing import Any

from sardeenz_site.redis_url import private_url_file
from sardeenz_site.run import valkey
from sardeenz_site.run.child import Child, how_it_ended
from sardeenz_site.run.config import CannotStart, Config, child_environment, first_admin_environment
from sardeenz_site.run.console import Console
from sardeenz_site.run.processes import Process, processes

READY_LIMIT_S = 90.0
#: A process that ends this often before all were ready will not come up by trying again.
START_TRIES = 3
BACKOFF_S = 0.5
BACKOFF_MAX_S = 15.0
#: After so long a life the next restart waits the shortest time again.
STEADY_S = 30.0
ENGINES_LIMIT_S = 45.0


class Supervisor:
    """One run. ``run()`` returns when a signal asked for the end, or raises CannotStart."""

    def __init__(self, config: Config, console: Console) -> None:
        self._config = config
        self._console = console
        self._children: dict[str, Child] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._valkey: Child | None = None
        self._valkey_up = False
        self._valkey_keeper: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._ready = False
        self._failure: str | None = None
        self._admin: tuple[str, str] | None = None
        self._processes = processes(config)
        self._folder = valkey.socket_folder(config.home)
        self._env = child_environment(config, config.redis or valkey.url(self._folder))

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, self._on_signal)
        began = time.monotonic()
        started = False
        try:
            await self._until_stopped(self._prepare())
            if not self._stop.is_set():
                started = True
                self._keepers = [asyncio.create_task(self._keep(process)) for process in self._processes]
                await self._until_stopped(self._wait_ready())
            if not self._stop.is_set():
                self._ready = True
                self._banner(time.monotonic() - began)
            await self._stop.wait()
        finally:
            self._stop.set()
            await self._end(engines=started)
        if self._failure:
            raise CannotStart(self._failure)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _until_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work, or leave it when the end is asked for; its errors pass."""
        task = asyncio.ensure_future(work)
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return
        task.result()

    # --- start ------------------------------------------------------------------------------------

    async def _prepare(self) -> None:
        """Valkey and the database, side by side."""
        if self._config.redis is None:
            await self._start_valkey()
            self._valkey_keeper = asyncio.create_task(self._keep_valkey())
        self._console.say("Preparing the database.")
        argv = [sys.executable, "manage.py", "prepare", "--json"]
        env = self._env
        if self._config.role == "host":
            argv.append("--no-admin")
        else:
            env = {**env, **first_admin_environment()}
        code, lines = await self._command("prepare", argv, env)
        if code != 0:
            told = [line for line in lines if line.strip()]
            last = told[-1] if told else "manage.py prepare failed."
            raise CannotStart(last.removeprefix("CommandError: ").removeprefix("Sardeenz cannot start: "))
        answer = json.loads(lines[-1])
        for line in answer["warnings"]:
            self._console.say(f"Note: {line}")
        if answer["password"]:
            self._admin = (answer["admin"], answer["password"])

    async def _command(self, name: str, argv: list[str], env: dict[str, str]) -> tuple[int, list[str]]:
        """Run to the end. Its lines are returned, and shown only when it fails."""
        lines: list[str] = []
        child = await Child.start(name, argv, env, lambda _name, line: lines.append(line))
        try:
            code = await child.wait()
        except asyncio.CancelledError:
            await child.stop(2, self._hurry)
            raise
        if code != 0:
            for line in lines[:-1]:
                self._console.line(name, line)
        return code, lines

    async def _start_valkey(self) -> None:
        self._valkey_up = False
        valkey.make_folder(self._folder)
        server = valkey.find_server()
        lines: list[str] = []

        def on_line(name: str, line: str) -> None:
            lines.append(line)
            del lines[:-20]
            if self._valkey_up and not self._stop.is_set():  # its notes at start and end help nobody
                self._console.line(name, line)

        self._valkey = await Child.start(
            "valkey", valkey.command(server, self._folder), self._env, on_line, death_signal=signal.SIGTERM
        )
        end = time.monotonic() + 10
        while not await asyncio.to_thread(valkey.answers, self._folder):
            if not self._valkey.running or time.monotonic() > end:
                await self._valkey.stop(1, self._hurry)
                last = next((line for line in reversed(lines) if line.strip()), "it gave no reason")
                raise CannotStart(
                    f"The private Valkey ({server}) did not start: {last}. "
                    "Install valkey-server or redis-server, or set REDIS_URL."
                )
            await asyncio.sleep(0.02)
        self._valkey_up = True
        file = private_url_file(self._config.home)
        file.parent.mkdir(mode=0o700, exist_ok=True)
        file.write_text(valkey.url(self._folder), encoding="utf-8")

    async def _wait_ready(self) -> None:
        """Until the pages answer, and the router too. A control-less host has nothing to ask."""
        if self._config.role == "host":
            return
        end = time.monotonic() + READY_LIMIT_S
        for port in (self._config.port, self._config.router_port):
            while not await _http_answers(self._config.browser_host.strip("[]"), port, "/healthz"):
                if time.monotonic() > end:
                    self._fail(f"Nothing answered on port {port} within {READY_LIMIT_S:.0f} s; see the lines above.")
                    return
                await asyncio.sleep(0.1)

    def _banner(self, seconds: float) -> None:
        config = self._config
        lines = [f"Sardeenz is ready after {seconds:.1f} s."]
        if config.role == "host":
            lines.append(f"Host {config.host_name} takes its work from the queue host.{config.host_name}.")
        else:
            lines += [
                f"Pages and REST   {config.url}",
                f"OpenAI endpoint  {config.url}v1   fast: http://{config.browser_host}:{config.router_port}/v1",
            ]
        if self._admin:
            lines.append(f"First login      user {self._admin[0]}   password {self._admin[1]}   (shown this once)")
        lines.append(config.engine_reason)
        lines.append("Ctrl-C ends it.")
        self._console.block(*lines)

    # --- life -------------------------------------------------------------------------------------

    async def _keep(self, process: Process) -> None:
        """Start it, and start it again when it ends, waiting longer each time."""
        tries = 0
        while not self._stop.is_set():
            began = time.monotonic()
            child = await Child.start(process.name, process.argv, self._env, self._console.line)
            self._children[process.name] = child
            code = await child.wait()
            if self._stop.is_set():
                return
            tries = 1 if time.monotonic() - began > STEADY_S else tries + 1
            if not self._ready and tries >= START_TRIES:
                self._fail(f"{process.name} ended {tries} times while starting; see its lines above.")
                return
            pause = min(BACKOFF_S * 2 ** (tries - 1), BACKOFF_MAX_S)
            self._console.say(f"{process.name} ended ({how_it_ended(code)}); starting it again in {pause:g} s.")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause)

    async def _keep_valkey(self) -> None:
        while self._valkey is not None and not self._stop.is_set():
            code = await self._valkey.wait()
            if self._stop.is_set():
                return
            self._console.say(f"valkey ended ({how_it_ended(code)}); starting it again.")
            try:
                await self._start_valkey()
            except CannotStart as exc:
                self._fail(str(exc))

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._stop.set()

    # --- end --------------------------------------------------------------------------------------

    async def _end(self, *, engines: bool) -> None:
        """Those that take new work first, then those that do it, then the engines of a demo, then the broker."""
        if self._children:
            self._console.say("Ending. Once more to hurry.")
        for wave in sorted({process.wave for process in self._processes}):
            await asyncio.gather(*(self._end_one(process) for process in self._processes if process.wave == wave))
        await asyncio.gather(*self._keepers)
        if engines and self._config.role != "control":
            await self._end_engines()
        if self._valkey is not None:
            await self._valkey.stop(5, self._hurry)
            if self._valkey_keeper:
                await self._valkey_keeper
            private_url_file(self._config.home).unlink(missing_ok=True)
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _end_one(self, process: Process) -> None:
        child = self._children.get(process.name)
        if child and not await child.stop(process.stop_limit_s, self._hurry):
            self._console.say(f"{process.name} did not end within {process.stop_limit_s:g} s and was killed.")

    async def _end_engines(self) -> None:
        if not self._config.simulated:
            self._console.say("Engines of this host go on serving; start Sardeenz again to control them.")
            return
        try:
            code, lines = await asyncio.wait_for(
                self._command("engines", [sys.executable, "manage.py", "stop_engines", "--simulated"], self._env),
                ENGINES_LIMIT_S,
            )
        except TimeoutError:
            self._console.say(f"Simulated engines were not all stopped within {ENGINES_LIMIT_S:g} s.")
            return
        for line in lines[-1:] if code == 0 else lines:
            self._console.say(line)


async def _http_answers(host: str, port: int, path: str) -> bool:
    """Whether a GET gets any answer below 500 within two seconds."""
    try:
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            status = await reader.readline()
            await reader.read()  # to its end: hanging up early would be logged as an aborted request
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
    parts = status.split()
    return len(parts) > 1 and parts[1].isdigit() and int(parts[1]) < 500
