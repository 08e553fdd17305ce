"""One child process: started in a session of its own, its lines passed on, ended gently and then surely."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from sardeenz_site.run.config import BASE_DIR

_PR_SET_PDEATHSIG = 1
_LONGEST_LINE = 64 * 1024
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(signum: int) -> Callable[[], None]:
    """For ``preexec_fn``: the kernel sends ``signum`` when the launcher is gone, however it went.

    Engines are not reached by it: it is not inherited, and the guardians are grandchildren in their own sessions.
    """
    parent = os.getpid()

    def set_it() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signum)
            if os.getppid() != parent:  # it died in between
                os._exit(1)

    return set_it


class Child:
    """A running process. Its own session keeps the terminal's Ctrl-C for the launcher, which ends all in order."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, on_line: Callable[[str, str], None]) -> None:
        self.name = name
        self._process = process
        self._pump = asyncio.create_task(self._read(on_line))

    @classmethod
    async def start(
        cls,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str],
        on_line: Callable[[str, str], None],
        *,
        death_signal: int = signal.SIGKILL,
    ) -> Child:
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=env,
            cwd=BASE_DIR,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent(death_signal),
            limit=_LONGEST_LINE,
        )
        return cls(name, process, on_line)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def _read(self, on_line: Callable[[str, str], None]) -> None:
        stream = self._process.stdout
        if stream is None:
            return
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # longer than any line of ours: readline dropped what it had
                on_line(self.name, "(a line too long to show)")
                continue
            if not line:
                return
            on_line(self.name, line.decode("utf-8", "replace").rstrip())

    async def wait(self) -> int:
        """Exit code, negative for a signal, after its last line was passed on."""
        code = await self._process.wait()
        # A grandchild may hold the pipe open; its lines are not worth waiting for.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._pump, 0.5)
        return code

    async def stop(self, limit_s: float, hurry: asyncio.Event) -> bool:
        """SIGTERM; after the limit, or when hurried, SIGKILL to its whole session. Whether it went by itself."""
        if not self.running:
            return True
        self._signal(signal.SIGTERM)
        ended = asyncio.create_task(self._process.wait())
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait({ended, hurried}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if ended.done():
            return True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await ended
        return False

    def _signal(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signum)


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
