"""The API server's end of the engine: requests, utility calls, and the moment when EngineCore is gone. All async.

Method names are those of vLLM's ``AsyncLLM`` and its core client, because the add-on calls them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import AsyncGenerator, Callable
from typing import Any

from models_app.simulator.channel import READ_SIZE, Lines, encode
from models_app.simulator.config import Config
from models_app.simulator.faults import Faults
from models_app.simulator.logs import Log
from models_app.simulator.segment import Witness

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
#: What EngineCore gets to end by itself after SIGTERM, before it is killed.
TERM_GRACE_S = 0.1


class EngineDeadError(Exception):
    """EngineCore is gone; the message is vLLM's."""

    def __init__(self) -> None:
        super().__init__(DEAD)


class Aborted(Exception):
    """The engine ended the request (sleep, pause, abort)."""


class _Core:
    """``engine_client.engine_core``: utility calls by method name."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        return await self._client.call(method, *args)


class EngineClient:
    """Talks to one EngineCore over the socket."""

    def __init__(self, config: Config, connection: socket.socket, core_pid: int, log: Log, faults: Faults) -> None:
        self.config = config
        self.core_pid = core_pid
        self.faults = faults
        self.log = log
        self.engine_core = _Core(self)
        #: Told how long each request waited for its first step.
        self.on_queued: Callable[[float], None] = lambda _seconds: None
        self.stats: dict[str, Any] = {"running": 0, "waiting": 0, "usage": 0.0, "preemptions": 0}
        self.sleep_level = 0
        self.errored = False
        self.draining = False
        #: The connection is gone; the process itself may take a moment longer, see ``core_ended``.
        self.died = asyncio.Event()
        self.core_ended = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._socket = connection
        self._outputs: dict[str, asyncio.Queue[int | Exception]] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._stopping = False
        self._witness = Witness(config.ipc_name) if config.kvcached and config.ipc_name else None
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> None:
        """Begin to listen to EngineCore."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket)
        self._pidfd = os.pidfd_open(self.core_pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_core_end)
        self._reader = asyncio.create_task(self._listen(reader))

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self, request_id: str, prompt_tokens: int, max_tokens: int, hashes: list[int]
    ) -> AsyncGenerator[int, None]:
        """Yields how many new tokens there are, until ``max_tokens``; leaving early aborts the request at once.

        Raises ``EngineDeadError`` and ``Aborted``.
        """
        if self.errored:
            raise EngineDeadError
        queue: asyncio.Queue[int | Exception] = asyncio.Queue()
        self._outputs[request_id] = queue
        self._idle.clear()
        done = 0
        self._send({"k": "add", "id": request_id, "prompt": prompt_tokens, "max": max_tokens, "hashes": hashes})
        try:
            while done < max_tokens:
                item = await queue.get()
                while isinstance(item, int) and not queue.empty() and isinstance(queue._queue[0], int):  # type: ignore[attr-defined]
                    # A slow reader gets several tokens in one piece, as from vLLM's output collector.
                    item += int(queue.get_nowait())  # type: ignore[arg-type]
                if isinstance(item, Exception):
                    done = max_tokens
                    raise item
                done += item
                yield item
        finally:
            self._outputs.pop(request_id, None)
            if not self._outputs:
                self._idle.set()
            if done < max_tokens:
                self.abort([request_id])

    def abort(self, ids: list[str]) -> None:
        self._send({"k": "abort", "ids": ids})

    @property
    def in_flight(self) -> int:
        return len(self._outputs)

    # -- utility calls, under vLLM's names -----------------------------------------------------------------------

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of EngineCore between two of its steps. Raises ``EngineDeadError``, or what the method
        raised.
        """
        if self.errored:
            raise EngineDeadError
        self._number += 1
        future = self._calls[self._number] = asyncio.get_running_loop().create_future()
        self._send({"k": "call", "n": self._number, "method": method, "args": args})
        return await future

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        await self.call("sleep", level, mode)
        self.sleep_level = level

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self.call("wake_up", tags)
        if not await self.is_sleeping():
            self.sleep_level = 0

    async def is_sleeping(self) -> bool:
        return bool(await self.call("is_sleeping"))

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True, **_options: Any) -> None:
        await self.call("pause_scheduler", mode, clear_cache)

    async def resume_generation(self) -> None:
        await self.call("resume_scheduler")

    async def is_paused(self) -> bool:
        return bool(await self.call("is_scheduler_paused"))

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        return bool(await self.call("reset_prefix_cache", reset_running_requests, reset_connector))

    # -- the other side ------------------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        if self._writer and not self.errored:
            self._writer.write(encode(message))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        lines = Lines()
        with contextlib.suppress(OSError):
            while data := await reader.read(READ_SIZE):
                for message in lines.feed(data):
                    self._take(message)
        self._mark_dead()

    def _take(self, message: dict[str, Any]) -> None:
        self.stats = message.get("stats", self.stats)
        kind = message["k"]
        if kind == "out":
            for seconds in message.get("queued_s", ()):
                self.on_queued(seconds)
            for ident, count in message["tokens"].items():
                if queue := self._outputs.get(ident):
                    queue.put_nowait(count)
            for ident in message.get("aborted", ()):
                if queue := self._outputs.get(ident):
                    queue.put_nowait(Aborted())
        elif kind == "result":
            future = self._calls.pop(message["n"], None)
            if future and not future.done():
                if "error" in message:
                    future.set_exception(RuntimeError(f"Call to utility method failed: {message['error']}"))
                else:
                    future.set_result(message["value"])
        elif kind == "faults":
            self.faults.replace(message["faults"])

    def _mark_dead(self) -> None:
        self.errored = True
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError())
        self._calls.clear()
        if not self._stopping:
            self._log_death()
            for queue in self._outputs.values():
                queue.put_nowait(EngineDeadError())
        # A stop leaves open streams as they are: the client gets no end of stream and has to hang up (measured).
        self.died.set()

    def _log_death(self) -> None:
        log = self.log
        log.alert("core_client.py:817", "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup")
        log.say("core_client.py:774", "[shutdown] MPClient: engine manager stopped")
        log.bad("async_llm.py:906", "AsyncLLM output_handler failed.")
        log.traceback(
            "async_llm.py:906",
            ['  File "vllm/v1/engine/async_llm.py", line 849, in output_handler'],
            f"vllm.v1.engine.exceptions.EngineDeadError: {DEAD}",
        )
        self._remove_segment()

    def _remove_segment(self) -> None:
        if self._witness and "leak_segment" not in self.faults:
            self._witness.unlink()

    # -- the end -------------------------------------------------------------------------------------------------

    async def shutdown(self, timeout_s: float) -> None:
        """Let requests finish for up to ``timeout_s``, then end EngineCore: SIGTERM, and SIGKILL a moment later."""
        log = self.log
        log.say("core_client.py:744", f"[shutdown] MPClient: start timeout={timeout_s:g}s")
        self.draining = True
        if timeout_s > 0:
            await _either(self._idle, self.core_ended, timeout_s)
        self._stopping = True
        if "orphan" in self.faults:
            return
        log.say("core_client.py:746", "[shutdown] MPClient: stopping engine manager")
        log.say("utils.py:632", "[shutdown] Process manager: send sigterm to process EngineCore")
        if not await self._ends(signal.SIGTERM, TERM_GRACE_S):
            log.alert("utils.py:652", "[shutdown] Process manager: force killing remaining processes count=1")
            await self._ends(signal.SIGKILL, 5.0)
        self._remove_segment()
        log.say("core_client.py:748", "[shutdown] MPClient: engine manager stopped")
        log.say("core_client.py:751", "[shutdown] MPClient: complete")

    async def close(self) -> None:
        """Let go of the connection, when nobody will ask any more."""
        if self._reader and self._writer:
            self._writer.close()
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    async def _ends(self, number: signal.Signals, patience_s: float) -> bool:
        if not self.core_ended.is_set():
            os.kill(self.core_pid, number)
        await _either(self.core_ended, self.core_ended, patience_s)
        return self.core_ended.is_set()

    def _on_core_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        reap(self.core_pid)
        self.core_ended.set()


async def _either(first: asyncio.Event, second: asyncio.Event, patience_s: float) -> None:
    """Wait for one of two events, for so long at most."""
    waits = [asyncio.ensure_future(event.wait()) for event in (first, second)]
    await asyncio.wait(waits, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def reap(pid: int) -> int | None:
    """The exit code of a child that has ended (negative: a signal), None while it lives."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    return os.waitstatus_to_exitcode(status) if ended else None
