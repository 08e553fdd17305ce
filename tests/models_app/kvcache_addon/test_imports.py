"""The add-on lives inside somebody else's process: no Django, no GPU package at import, old enough Pythons."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import models_app.kvcache_addon

ROOM = Path(models_app.kvcache_addon.__file__).parent
MODULES = sorted(path.stem for path in ROOM.glob("*.py") if path.stem != "__init__")


def test_importing_everything_loads_the_standard_library_only() -> None:
    code = "import sys\n" + "".join(f"import models_app.kvcache_addon.{name}\n" for name in MODULES)
    code += "print(*sorted({name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names)))"
    root = ROOM.parent.parent
    run = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=root, timeout=60)
    assert run.stderr == ""
    assert set(run.stdout.split()) - {"__main__", "__mp_main__"} == {"models_app"}


@pytest.mark.parametrize("name", MODULES)
def test_syntax_is_that_of_python_3_10(name: str) -> None:
    ast.parse((ROOM / f"{name}.py").read_text(), feature_version=(3, 10))
