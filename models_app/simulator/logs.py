"""vLLM's log lines: the same words, prefixes and time format, so that the same parser reads both engines."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable

BAR_WIDTH = 10


def write(text: str) -> None:
    """One raw write to stdout, whole: lines of two processes must not mix. A reader that has gone is no error."""
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), text.encode())


class Log:
    """The log of one process of the engine; ``name`` is ``APIServer`` or ``EngineCore``."""

    def __init__(self, name: str, pid: int | None = None) -> None:
        self.prefix = f"({name} pid={pid or os.getpid()}) "

    def say(self, source: str, message: str) -> None:
        self._line("INFO", source, message)

    def alert(self, source: str, message: str) -> None:
        self._line("WARNING", source, message)

    def bad(self, source: str, message: str) -> None:
        self._line("ERROR", source, message)

    def raw(self, text: str) -> None:
        """A line of another library: prefixed, without level and time."""
        write("".join(f"{self.prefix}{line}\n" for line in text.splitlines()))

    def traceback(self, source: str, frames: Iterable[str], error: str) -> None:
        """An exception as vLLM logs it: every line with level and source, the error last."""
        for line in ("Traceback (most recent call last):", *frames, *error.splitlines()):
            self.bad(source, line)

    def kvcached(self, source: str, message: str, level: str = "INFO") -> None:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self.raw(f"[kvcached][{level}][{stamp}][{source}] {message}")

    def _line(self, level: str, source: str, message: str) -> None:
        stamp = time.strftime("%m-%d %H:%M:%S")
        head = f"{self.prefix}{level} {stamp} [{source}] "
        write("".join(f"{head}{line}\n" for line in message.split("\n")))


def bar(label: str, done: int, total: int, elapsed_s: float) -> str:
    """A tqdm progress bar, as it looks when the output is no terminal."""
    filled = BAR_WIDTH * done // max(1, total)
    percent = 100 * done // max(1, total)
    rate = f"{done / elapsed_s:.2f}it/s" if done and elapsed_s > 0 else "?it/s"
    left = elapsed_s * (total - done) / done if done else 0.0
    remaining = _clock(left) if done else "?"
    blocks = "█" * filled + " " * (BAR_WIDTH - filled)
    return f"{label}: {percent:3d}%|{blocks}| {done}/{total} [{_clock(elapsed_s)}<{remaining}, {rate}]"


def shard_line(done: int, total: int, elapsed_s: float) -> str:
    """The progress line of weight loading: no bar, newline-terminated."""
    percent = 100 * done // max(1, total)
    rate = f"{done / elapsed_s:.2f}it/s" if done and elapsed_s > 0 else "?it/s"
    left = _clock(elapsed_s * (total - done) / done) if done else "?"
    return (
        f"Loading safetensors checkpoint shards: {percent:3d}% Completed | {done}/{total} "
        f"[{_clock(elapsed_s)}<{left}, {rate}]"
    )


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def gib(amount: float) -> str:
    """Two decimals and a unit, as torch and vLLM print sizes."""
    return f"{amount / 1024**3:.2f} GiB"
