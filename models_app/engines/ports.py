"""TCP ports of engines: choose one that is free, and see whether only our engine listens on it.

vLLM up to 0.24 sets SO_REUSEPORT on its socket, so a second server of the same user "starts fine" on a taken port and
gets half of the connections. Hence our own test, with neither SO_REUSEPORT nor SO_REUSEADDR: it fails on every port
that anybody has bound, listening or not.
"""

from __future__ import annotations

import socket
from collections.abc import Collection

from models_app.engines import procfs

_TRIES = 200


class NoFreePort(OSError):
    """The operating system had no port for us."""


def is_free(address: str, port: int) -> bool:
    """Whether nobody has bound the port, seen from this address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def free_port(address: str, *, taken: Collection[int] = ()) -> int:
    """A port that the operating system says is free and that is in none of our own books (``taken``).

    Raises NoFreePort when the address is not of this machine or nothing is free.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for _ in range(_TRIES):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError as exc:
                raise NoFreePort(exc.errno, f"No port can be had on {address}: {exc.strerror}.") from exc
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port
    raise NoFreePort(0, f"No port outside the {len(taken)} taken ones was found on {address}.")


def strangers(port: int, pids: Collection[int]) -> bool | None:
    """Whether somebody besides these processes listens on the port. None: nobody listens at all."""
    listening = procfs.listening_inodes(port)
    if not listening:
        return None
    ours: set[int] = set()
    for pid in pids:
        ours |= procfs.socket_inodes(pid)
    return bool(listening - ours)
