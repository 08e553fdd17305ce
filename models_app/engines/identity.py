"""Names by which the things of one installation are known on a machine, and told from everybody else's.

Every engine process carries ``SARDEENZ_INSTANCE`` in its environment; segments, sockets and temporary folders carry the
same numbers in their names. Two installations on one machine never touch each other's: the installation's id is in all.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import NamedTuple

MARKER = "SARDEENZ_INSTANCE"
#: The guardian has the marker under this name, so that a search for engine processes never finds (and kills) it.
GUARDIAN_MARKER = "SARDEENZ_GUARDIAN"
_INSTALLATION = re.compile(r"[0-9a-f]{8}")
_MARKER_VALUE = re.compile(r"([0-9a-f]{8}):(\d+):(\d+)")
_IPC_NAME = re.compile(r"sz-([0-9a-f]{8})-i(\d+)-a(\d+)")
_TMP_DIR = re.compile(r"/tmp/sz-([0-9a-f]{8})-(\d+)")  # noqa: S108 - short on purpose, made 0700 and owner-checked


class Marker(NamedTuple):
    """Which start of which instance of which installation a process belongs to."""

    installation: str
    instance_id: int
    attempt_id: int

    def __str__(self) -> str:
        return f"{self.installation}:{self.instance_id}:{self.attempt_id}"


def parse_marker(text: str) -> Marker | None:
    """The marker in an environment's value; None when it is not one of Sardeenz."""
    match = _MARKER_VALUE.fullmatch(text)
    return Marker(match[1], int(match[2]), int(match[3])) if match else None


def installation_id(home: Path) -> str:
    """The 8 hex characters of this installation, made once and kept in ``{home}/installation_id``.

    Raises ValueError when the file holds something else: to guess a new id would orphan every running engine.
    """
    path = home / "installation_id"
    if not path.exists():
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = home / f".installation_id.{os.getpid()}.{secrets.token_hex(4)}"
        draft.write_text(secrets.token_hex(4) + "\n")
        try:
            # A hard link fails when the name exists: of several processes that start at once, one wins and all read it.
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    text = path.read_text().strip()
    if not _INSTALLATION.fullmatch(text):
        raise ValueError(f"{path} should hold 8 hex characters, not {text[:40]!r}.")
    return text


def ipc_name(installation: str, instance_id: int, attempt_id: int) -> str:
    """Name of the KV segment. Unique per start: kvcached would overwrite, or rename, a name that exists.

    Letters, digits and dashes within 64 characters: kvcached's own sanitising leaves it as it is.
    """
    return f"sz-{installation}-i{instance_id}-a{attempt_id}"


def parse_ipc_name(name: str) -> Marker | None:
    match = _IPC_NAME.fullmatch(name)
    return Marker(match[1], int(match[2]), int(match[3])) if match else None


def tmp_dir(installation: str, attempt_id: int) -> Path:
    """TMPDIR of one start. vLLM puts sockets with 36-character names there, and an AF_UNIX path ends at 107."""
    return Path(f"/tmp/sz-{installation}-{attempt_id}")  # noqa: S108


def is_tmp_dir(path: Path | str) -> bool:
    """Whether a path has the form of ``tmp_dir``: nothing else is ever removed as a temporary folder."""
    return _TMP_DIR.fullmatch(str(path)) is not None
