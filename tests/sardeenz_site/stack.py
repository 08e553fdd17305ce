"""A whole Sardeenz as a person starts it: the launcher in a process of its own, on free ports, in a throw-away home."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
#: A machine that is slower than this hangs.
START_LIMIT_S = 120.0
END_LIMIT_S = 60.0
#: Those of this process that live: what they said is shown with a test that fails.
living: list[Stack] = []


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: Callable[[], bool], limit_s: float, why: str) -> None:
    end = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < end, f"not within {limit_s:g} s: {why}"
        time.sleep(0.1)


class Stack:
    """``with Stack() as stack`` gives a ready one and ends it; ``start=False`` leaves starting to the test."""

    def __init__(self, *, start: bool = True, role: str = "all", **env: str) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="sz-stack-"))
        self.port, self.router_port = free_port(), free_port()
        ours = ("DATABASE_URL", "REDIS_URL", "SECRET_KEY", "HOST", "PYTHONDONTWRITEBYTECODE", "DJANGO_SETTINGS_MODULE")
        clean = {k: v for k, v in os.environ.items() if not k.startswith("SARDEENZ_") and k not in ours}
        self.env = {
            **clean,
            "SARDEENZ_HOME": str(self.home),
            "SARDEENZ_ENV_FILE": os.devnull,
            "SARDEENZ_ENGINE": "simulated",
            "SARDEENZ_HOST_NAME": "stack",
            "PORT": str(self.port),
            "ROUTER_PORT": str(self.router_port),
            **env,
        }
        self._start = start
        self._argv = [sys.executable, "-m", "sardeenz_site.run", "--role", role]
        self.process: subprocess.Popen[str] | None = None
        self.lines: list[str] = []

    def __enter__(self) -> Stack:
        living.append(self)
        try:
            if self._start:
                self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        living.remove(self)
        shutil.rmtree(self.home, ignore_errors=True)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def router_url(self) -> str:
        return f"http://127.0.0.1:{self.router_port}"

    def launch(self) -> None:
        """Start the launcher and return at once."""
        self.lines = []
        self.process = subprocess.Popen(
            self._argv,
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        with process.stdout or contextlib.nullcontext(()) as lines:
            for line in lines:
                self.lines.append(line.rstrip())

    def start(self) -> None:
        """Start and wait until it says that it is ready."""
        self.launch()
        process = self.process
        assert process is not None
        wait_for(
            lambda: "Sardeenz is ready" in self.text or process.poll() is not None, START_LIMIT_S, "ready\n" + self.text
        )
        assert process.poll() is None, self.text

    def end(self, signum: int = signal.SIGINT) -> int:
        """End it as Ctrl-C does. Returns the exit code."""
        assert self.process is not None
        self.process.send_signal(signum)
        return self.process.wait(END_LIMIT_S)

    def run_to_end(self) -> tuple[int, str]:
        """For starts that must fail: exit code and all that was said."""
        done = subprocess.run(
            self._argv,
            cwd=ROOT,
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_LIMIT_S,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    def manage(self, *args: str) -> str:
        done = subprocess.run(
            [sys.executable, "manage.py", *args],
            cwd=ROOT,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    @property
    def password(self) -> str | None:
        found = re.search(r"user admin   password (\S+)", self.text)
        return found[1] if found else None

    def children(self) -> dict[str, psutil.Process]:
        """By the names that the launcher gives them."""
        assert self.process is not None
        marks = {
            "valkey": "valkey-server",
            "web": "daphne",
            "router": "router_asgi",
            "control": "control@",
            "beat": "beat",
            "host": "host@",
            "sampler": "run_sampler",
        }
        found: dict[str, psutil.Process] = {}
        for child in psutil.Process(self.process.pid).children():
            try:
                words = " ".join(child.cmdline())
            except psutil.Error:  # it ended just now
                continue
            found.update({name: child for name, mark in marks.items() if mark in words and name not in found})
        return found

    @contextlib.contextmanager
    def login(self, password: str) -> Iterator[httpx.Client]:
        """A browser session of the first admin."""
        with httpx.Client(base_url=self.url, timeout=20) as client:
            client.get("/login/").raise_for_status()
            form = {
                "username": "admin",
                "password": password,
                "csrfmiddlewaretoken": client.cookies["sardeenz_csrf"],
            }
            answer = client.post("/login/", data=form, headers={"Referer": self.url})
            assert answer.status_code == 302, answer.status_code
            yield client
