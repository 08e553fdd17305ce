"""The add-on's list of vLLM's names: complete, and there in the vLLM that runs here."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.contract.touched import TOUCHED, Source, Touch, missing

VENV = os.environ.get("SARDEENZ_ENGINE_VENV")
ADDON = Path(__file__).resolve().parent.parent.parent / "models_app" / "kvcache_addon"
#: Ours, Python's or kvcached's, by the names of variables that stand for vLLM's objects in the add-on.
NOT_VLLMS = {"__dict__", "name", "control", "setdefault"}


@pytest.mark.engine
def test_every_name_that_the_add_on_touches_is_in_the_vllm_that_runs_here() -> None:
    if not VENV:
        if os.environ.get("SARDEENZ_ENGINE_REQUIRED"):
            pytest.fail("SARDEENZ_ENGINE_VENV is not set")
        pytest.skip("SARDEENZ_ENGINE_VENV is not set: make test-engine sets it")
    (packages,) = [path.parent for path in Path(VENV).glob("lib/python3*/site-packages/vllm")]
    assert missing(packages) == []


def test_every_name_that_the_add_on_reads_of_engine_and_scheduler_is_listed() -> None:
    listed = {touch.name for touch in TOUCHED}
    pattern = re.compile(r"(?<![.\w])(?:self\.engine|engine|self\._engine|scheduler|executor|request)\.([a-z_]\w*)")
    unlisted: dict[str, set[str]] = {}
    for path in ADDON.glob("*.py"):
        if path.name in ("engine_core.py", "reclaim.py", "demand.py", "slumber.py", "pool.py"):
            code = re.sub(r'"""[\s\S]*?"""|#.*', "", path.read_text())
            code = re.sub(r"^\s*(?:from|import) .*$", "", code, flags=re.MULTILINE)
            found = set(pattern.findall(code)) - listed - NOT_VLLMS
            if found:
                unlisted[path.name] = found
    assert unlisted == {}


def test_every_listed_name_is_used() -> None:
    code = "\n".join(path.read_text() for path in ADDON.glob("*.py"))
    unused = [str(touch) for touch in TOUCHED if not re.search(rf"\b{touch.name}\b", code)]
    assert unused == []


def test_what_a_newer_vllm_renames_is_noticed(tmp_path: Path) -> None:
    engine = tmp_path / "vllm" / "v1"
    engine.mkdir(parents=True)
    (engine / "base.py").write_text("class Base:\n    def set(self):\n        self.here = 1\n")
    (engine / "core.py").write_text(
        "from vllm.v1.base import Base as B\n\n\nclass Core(B):\n    field: int = 0\n\n    def go(self, how): ...\n"
    )
    source = Source(tmp_path)
    for there in (Touch("vllm.v1.core", "Core", "here"), Touch("vllm.v1.core", "Core", "go", ("how",))):
        assert source.has(there)
    assert source.has(Touch("vllm.v1.core", "Core", "field"))
    for gone in (
        Touch("vllm.v1.core", "Core", "there"),
        Touch("vllm.v1.core", "Core", "go", ("how", "when")),
        Touch("vllm.v1.core", "Engine", "go"),
        Touch("vllm.v1.other", "Core", "go"),
    ):
        assert not source.has(gone)
    assert len(missing(tmp_path)) > 50
