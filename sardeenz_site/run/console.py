"""The terminal: one line at a time, each with the name of the process that wrote it."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
NAME_WIDTH = 8


class Console:
    """Writes prefixed lines to ``out``; a terminal that went away is not an error."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._colours = self._out.isatty() and not os.environ.get("NO_COLOR")
        self._names: dict[str, int] = {}

    def line(self, name: str, text: str) -> None:
        prefix = f"{name:<{NAME_WIDTH}}|"
        if self._colours:
            colour = _COLOURS[self._names.setdefault(name, len(self._names)) % len(_COLOURS)]
            prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
        self._write(f"{prefix} {text}\n")

    def say(self, text: str) -> None:
        """A line of the launcher's own."""
        self.line("sardeenz", text)

    def block(self, *lines: str) -> None:
        """Lines that a person looks for, without prefix and with space around them."""
        self._write("\n" + "".join(f"  {line}\n" for line in lines) + "\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError, OSError, ValueError):
            self._out.write(text)
            self._out.flush()
