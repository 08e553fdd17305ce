"""Rules that hold the rooms apart and the loose ends together."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from celery import current_app
from django.conf import settings

from models_app import dispatch

ROOT = Path(__file__).resolve().parent.parent
PLAIN_ROOMS = (
    "models_app.engines",
    "models_app.router",
    "models_app.kvcache_addon",
    "models_app.simulator",
    "models_app.states",
    "models_app.errors",
    "gpus_app.probes",
    "gpus_app.policies",
    "gpus_app.errors",
    "sardeenz_site.router_asgi",
    "sardeenz_site.run",
)
SOURCES = sorted(
    path for room in ("sardeenz_site", "models_app", "gpus_app") for path in (ROOT / room).rglob("*.py")
    if "migrations" not in path.parts
)  # fmt: skip
HEAVY = ("django.db", "django.apps", "celery", "channels", "ninja", "torch", "vllm", "kvcached", "numpy")


def modules_of(room: str) -> list[str]:
    path = ROOT / room.replace(".", "/")
    files = [path.with_suffix(".py")] if not path.is_dir() else sorted(path.rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def test_rooms_import_only_downwards() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("room", PLAIN_ROOMS)
def test_plain_room_loads_nothing_heavy(room: str) -> None:
    """Modules that need a package of the engine's side (vllm, torch) are not importable here and are left out."""
    code = (
        "import importlib, sys\n"
        f"for name in {modules_of(room)!r}:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ModuleNotFoundError as exc:\n"
        "        if exc.name.partition('.')[0] not in ('vllm', 'torch', 'kvcached'): raise\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_models_app_itself_is_empty_for_the_engine() -> None:
    tree = ast.parse((ROOT / "models_app" / "__init__.py").read_text())
    assert all(isinstance(node, ast.Expr | ast.ImportFrom) for node in tree.body)
    assert [n.module for n in tree.body if isinstance(n, ast.ImportFrom)] in ([], ["__future__"])


def test_every_name_that_is_sent_is_a_task_and_every_tick_too() -> None:
    current_app.loader.import_default_modules()
    known = set(current_app.tasks)
    assert set(dispatch.TASK_NAMES) <= known
    assert {entry["task"] for entry in settings.CELERY_BEAT_SCHEDULE.values()} <= known


def test_modules_say_what_they_are_and_have_one_subject() -> None:
    silent, long = [], []
    for path in SOURCES:
        text = path.read_text()
        if text.strip() in ("", "from __future__ import annotations"):
            continue
        if not ast.get_docstring(ast.parse(text)):
            silent.append(str(path.relative_to(ROOT)))
        if text.count("\n") > 450:  # past 400 it has two subjects
            long.append(str(path.relative_to(ROOT)))
    assert (silent, long) == ([], [])


def test_no_source_holds_a_reminder_or_a_path_of_one_machine() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "XX" + "X", "/work" + "/", "../sha" + "red")
    found = [f"{path.relative_to(ROOT)}: {word}" for path in SOURCES for word in words if word in path.read_text()]
    assert found == []
