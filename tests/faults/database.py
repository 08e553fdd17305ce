"""The database under a run: rows read from outside, and its connection lost in ways that its kind knows."""

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import psutil

from tests.postgres import start_postgres

Row = dict[str, Any]
Faults = dict[str, Callable[[float], str]]
#: A database that is stopped comes back after so many seconds at least and at most.
AWAY_S = (0.5, 2.5)


class Database(Protocol):
    """``url`` is its DATABASE_URL. ``faults`` are the ways to lose it: each takes a number in [0, 1)."""

    url: str
    faults: Faults

    def read(self, query: str) -> list[Row]:
        """Rows of a SELECT; times and JSON come as ``when`` and ``value`` take them."""

    def settle(self) -> None:
        """Wait until it is there again after a fault."""

    def end(self) -> None: ...


class Sqlite:
    """The file of a throw-away home. It has no connection to lose, only a lock that is never to be had."""

    def __init__(self, home: Path) -> None:
        self._path = home / "faults.sqlite3"
        self.url = f"sqlite:///{self._path}"
        self.faults: Faults = {"locked": self._lock}
        self._holder: threading.Thread | None = None

    def read(self, query: str) -> list[Row]:
        with closing(sqlite3.connect(f"file:{self._path}?mode=ro", uri=True, timeout=20)) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(query)]

    def _lock(self, number: float) -> str:
        """Hold the write lock for a while."""
        self.settle()

        def hold() -> None:
            with closing(sqlite3.connect(self._path, timeout=20, isolation_level=None)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                time.sleep(_between(number))
                connection.execute("ROLLBACK")

        self._holder = threading.Thread(target=hold, daemon=True)
        self._holder.start()
        return "locked"

    def settle(self) -> None:
        if self._holder is not None:
            self._holder.join(60)

    def end(self) -> None:
        self.settle()


class Postgres:
    """A server of its own in ``folder``: its connections can be cut, and the server can go away and come back."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.chmod(0o755)
        self._server = start_postgres(folder / "data", crashes=True)
        self.url = f"postgresql://postgres@/postgres?host={folder / 'data'}"
        self.faults: Faults = {"connections": self._cut, "server": self._stop}
        self._starter: threading.Thread | None = None

    def read(self, query: str) -> list[Row]:
        import psycopg
        from psycopg.rows import dict_row

        with psycopg.connect(self._server.get_uri(), row_factory=dict_row) as link:
            return link.execute(query.encode()).fetchall()

    def _cut(self, number: float) -> str:
        """End every connection at once, which an idle one notices at its next query."""
        import psycopg

        self.settle()
        with psycopg.connect(self._server.get_uri(), autocommit=True) as link:
            rows = link.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            ).fetchall()
        return f"{len(rows)} cut" if rows else "none"

    def _stop(self, number: float) -> str:
        """As a crash of the server: no connection is closed in order, none is taken until it is started again."""
        self.settle()
        process = psutil.Process(self._server.get_pid())
        process.send_signal(signal.SIGQUIT)

        def start() -> None:
            process.wait(30)
            time.sleep(_between(number))
            self._server.ensure_postgres_running()

        self._starter = threading.Thread(target=start, daemon=True)
        self._starter.start()
        return "stopped"

    def settle(self) -> None:
        if self._starter is not None:
            self._starter.join(60)

    def end(self) -> None:
        self.settle()
        self._server.cleanup()
        shutil.rmtree(self._folder, ignore_errors=True)


def _between(number: float) -> float:
    return AWAY_S[0] + number * (AWAY_S[1] - AWAY_S[0])


def when(value: Any) -> datetime:
    """A time of a row, whatever kind of database wrote it."""
    found = datetime.fromisoformat(value) if isinstance(value, str) else value
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def value(content: Any) -> Any:
    """What a JSON column of a row holds."""
    return json.loads(content) if isinstance(content, str) else content
