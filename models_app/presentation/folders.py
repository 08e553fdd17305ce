"""Folders with weights on this machine, inside the configured roots and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from django.conf import settings

MOST_ENTRIES = 500


@dataclass(frozen=True, slots=True)
class Entry:
    """A folder below the shown one. ``is_model``: it holds a config.json."""

    name: str
    path: str
    is_model: bool


@dataclass(slots=True)
class Listing:
    """One folder, its way up to its root, and what lies in it."""

    path: str = ""
    error: str = ""
    is_model: bool = False
    crumbs: list[tuple[str, str]] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    cut: bool = False


def roots() -> list[Path]:
    """The configured roots that exist, symbolic links resolved."""
    found = []
    for root in settings.SARDEENZ_MODEL_ROOTS:
        real = root.expanduser().resolve()
        if real.is_dir() and real not in found:
            found.append(real)
    return found


def browse(path: str) -> Listing:
    """List a folder. Links are followed first and then compared, so that none leads out of the roots."""
    known = roots()
    if not path:
        if len(known) == 1:
            return browse(str(known[0]))
        return Listing(entries=[Entry(str(root), str(root), _is_model(root)) for root in known])
    try:
        real = Path(path).resolve()
    except (OSError, ValueError):
        return Listing(error="This is no folder.")
    root = next((root for root in known if real.is_relative_to(root)), None)
    if root is None:
        return Listing(error="This folder lies outside the model roots.")
    try:
        children = sorted(real.iterdir(), key=lambda child: child.name.lower())
    except OSError as exc:
        return Listing(error=f"The folder cannot be read: {exc.strerror}.")
    entries = []
    for child in children:
        if child.name.startswith("."):
            continue
        target = child.resolve()
        if target.is_dir() and any(target.is_relative_to(each) for each in known):
            entries.append(Entry(child.name, str(target), _is_model(target)))
    crumbs = [(str(root), str(root))]
    step = root
    for part in real.relative_to(root).parts:
        step = step / part
        crumbs.append((part, str(step)))
    return Listing(
        path=str(real),
        is_model=_is_model(real),
        crumbs=crumbs,
        entries=entries[:MOST_ENTRIES],
        cut=len(entries) > MOST_ENTRIES,
    )


def _is_model(folder: Path) -> bool:
    try:
        return (folder / "config.json").is_file()
    except OSError:
        return False
