"""Faults that can be switched on, to see how the product copes.

At the start by ``SARDEENZ_SIM_FAULTS="name[:argument],…"``, later by a file ``faults.json`` in the run directory: a
list of the same texts, one text, or an object ``{"name": argument}``; an empty list or a removed file ends them.

=====================  ==============================================================================================
``slow_load:X``        loading takes X times as long
``crash_at:STAGE``     EngineCore dies at a stage: loading_weights, compiling, warming_up, capturing_graphs, serving
``oom_at_load``        the weights do not fit, however empty the card
``hang``               ``/health`` 200, nothing moves, and EngineCore answers nothing
``die_after:S``        EngineCore is killed S seconds after it became ready
``ignore_sigterm``     SIGTERM does nothing, at any time
``sigterm_hang``       a SIGTERM during the start hangs the handshake for good; only SIGINT and SIGKILL end it
``orphan``             the API server ends without ending EngineCore, which keeps its memory
``leak_segment``       the segment stays in /dev/shm
``kvcached_inactive``  kvcached was asked for and is not there: a static reservation, no segment
``stock``              no add-on in EngineCore: a limit only reaches the segment, and the pool at its next allocation
``no_addon``           the same, and ``/kvcache`` is 404
``pr324``              an engine with pull request 324's own endpoints, its 32-byte segment and its trim
``overshoot``          a limit above capacity kills EngineCore when a block beyond it is used
=====================  ==============================================================================================
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NAMES = frozenset(
    {
        "slow_load", "crash_at", "oom_at_load", "hang", "die_after", "ignore_sigterm", "sigterm_hang", "orphan",
        "leak_segment", "kvcached_inactive", "stock", "no_addon", "pr324", "overshoot",
    }
)  # fmt: skip
FILE_NAME = "faults.json"


class UnknownFault(ValueError):
    """A name that is not in ``NAMES``; a typing error must not look like a passed test."""


def parse(given: Any) -> dict[str, str]:
    """Names and arguments, from a text (``none`` for none), a list of texts or an object. Raises ``UnknownFault``."""
    if isinstance(given, dict):
        pairs = [(str(name), "" if argument in (None, True) else str(argument)) for name, argument in given.items()]
    else:
        texts = given.split(",") if isinstance(given, str) else [str(text) for text in given or ()]
        pairs = [(name.strip(), argument.strip()) for name, _, argument in (text.partition(":") for text in texts)]
    faults = {name: argument for name, argument in pairs if name not in ("", "none")}
    if unknown := sorted(faults.keys() - NAMES):
        raise UnknownFault(f"unknown fault {', '.join(unknown)}; known are {', '.join(sorted(NAMES))}")
    return faults


class Faults:
    """The faults in force: those of the environment, plus whatever the file says at this moment."""

    def __init__(self, text: str = "", run_dir: Path | None = None) -> None:
        self._base = parse(text)
        self._path = run_dir / FILE_NAME if run_dir else None
        self._stamp: tuple[int, int] | None = None
        self._active = dict(self._base)
        self.refresh()

    def __contains__(self, name: str) -> bool:
        return name in self._active

    def number(self, name: str, default: float) -> float:
        """The argument of a fault as a number; ``default`` without the fault or without a number."""
        try:
            return float(self._active.get(name) or default)
        except ValueError:
            return default

    def text(self, name: str) -> str:
        return self._active.get(name, "").replace(" ", "_")

    def names(self) -> list[str]:
        return sorted(self._active)

    def replace(self, faults: dict[str, str]) -> None:
        """Take over what another process of this engine has read."""
        self._active = dict(faults)

    def active(self) -> dict[str, str]:
        return dict(self._active)

    def refresh(self) -> bool:
        """Read the file again if it changed. True when the faults in force are others now."""
        if self._path is None:
            return False
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino)
        except OSError:
            stamp = None
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            # A half-written or mistaken file changes nothing: the next write is read again.
            extra = parse(json.loads(self._path.read_text())) if stamp else {}
        except (OSError, ValueError):
            return False
        before, self._active = self._active, {**self._base, **extra}
        return before != self._active
