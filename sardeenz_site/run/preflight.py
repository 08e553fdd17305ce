"""What would make a start fail later and obscurely, found first and said in one sentence."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from contextlib import closing
from pathlib import Path
from typing import IO

from sardeenz_site.run.config import CannotStart, Config


def hold_home(home: Path) -> IO[str]:
    """Lock SARDEENZ_HOME for the life of the launcher. Raises CannotStart when another one holds it."""
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (home / "launcher.lock").open("a+", encoding="utf-8")
    except OSError as exc:
        raise CannotStart(f"SARDEENZ_HOME={home} cannot be written: {exc.strerror}.") from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        raise CannotStart(
            f"Sardeenz already runs on {home} (process {holder}). Stop it, or set SARDEENZ_HOME to another folder."
        ) from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def check_port(host: str, port: int, variable: str) -> None:
    """Raises CannotStart when ``host:port`` cannot be bound, naming the variable that moves it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
    except OSError as exc:
        raise CannotStart(f"HOST={host} is no address of this machine: {exc.strerror}.") from exc
    with closing(socket.socket(family, kind)) as probe:
        # As the servers do: a port in TIME_WAIT is free. Never SO_REUSEPORT, which would share a taken one.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except PermissionError:
            raise CannotStart(f"Port {port} needs root. Set {variable} to a number above 1023.") from None
        except OSError as exc:
            if exc.errno == errno.EADDRNOTAVAIL:
                raise CannotStart(f"HOST={host} is no address of this machine.") from exc
            holder = port_holder(port)
            by = f" by {holder}" if holder else ""
            raise CannotStart(
                f"Port {port} on {host} is taken{by}. Stop that program, or choose another port: "
                f"{variable}={port + 100}."
            ) from exc


def port_holder(port: int) -> str | None:
    """``name (process 12)`` of the listener, when this user may see it."""
    import psutil

    try:
        for link in psutil.net_connections("tcp"):
            if link.status == psutil.CONN_LISTEN and link.laddr and link.laddr.port == port and link.pid:
                return f"{psutil.Process(link.pid).name()} (process {link.pid})"
    except (psutil.Error, OSError):
        return None
    return None


def check_ports(config: Config) -> None:
    if config.role == "host":
        return
    if config.port == config.router_port:
        raise CannotStart(f"PORT and ROUTER_PORT are both {config.port}; they must differ.")
    check_port(config.host, config.port, "PORT")
    check_port(config.host, config.router_port, "ROUTER_PORT")
