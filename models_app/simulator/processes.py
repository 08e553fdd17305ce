"""How a process of the engine looks from outside: its title, its parent, its name in ``ps``."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

PR_SET_NAME = 15
MAX_COMM = 15


def set_title(title: str) -> None:
    """Rename this process as setproctitle does: ``comm`` cut at 15 bytes, the command line overwritten in place.

    So the command line of a child tells neither model nor port, while its environment still does. Where the memory
    layout is not as expected nothing is changed.
    """
    raw = title.encode()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_NAME, ctypes.c_char_p(raw[:MAX_COMM]), 0, 0, 0)
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = Path("/proc/self/stat").read_text()
        fields = stat[stat.rindex(")") + 2 :].split()
        start, end = int(fields[45]), int(fields[46])
        room = end - start
        # Zero when the kernel does not show the addresses to this process.
        if start and room > len(raw) + 1:
            ctypes.memmove(start, raw.ljust(room - 1, b" ") + b"\0", room)
