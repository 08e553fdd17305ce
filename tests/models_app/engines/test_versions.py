"""Known pairs of vLLM and kvcached, and asking an environment for its versions."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from models_app.engines import versions
from models_app.engines.versions import detect_versions, engine_python, judge


@pytest.mark.parametrize("vllm", ["0.19.1", "0.24.0", "0.28.1", "0.30.0+cpu"])
def test_pairs_that_work(vllm: str) -> None:
    verdict = judge({"vllm": vllm, "kvcached": "0.1.6", "autopatch": True}, kvcached=True)
    assert verdict.ok and not verdict.warning


@pytest.mark.parametrize(
    ("vllm", "kvcached", "why"),
    [
        ("0.31.0", "0.1.6", "no runner adapter"),
        ("0.33.0", "0.1.6", "no runner adapter"),
        ("0.19.1", "0.1.5", "below what is in use"),
        ("0.16.0", "0.1.6", "from vLLM 0.17.0 on"),
        ("0.30.0", None, "not installed"),
        (None, "0.1.6", "not installed"),
    ],
)
def test_pairs_that_cannot_work_are_refused_with_versions_and_reason(
    vllm: str | None, kvcached: str | None, why: str
) -> None:
    verdict = judge({"vllm": vllm, "kvcached": kvcached, "autopatch": True}, kvcached=True)
    assert not verdict.ok
    assert why in verdict.sentence
    assert not (vllm and kvcached) or (vllm in verdict.sentence and kvcached in verdict.sentence)


def test_missing_autopatch_is_seen_before_the_start() -> None:
    verdict = judge({"vllm": "0.24.0", "kvcached": "0.1.6", "autopatch": False}, kvcached=True)
    assert not verdict.ok and "unpatched" in verdict.sentence


@pytest.mark.parametrize(("vllm", "kvcached"), [("0.18.0", "0.1.6"), ("0.31.0", "0.1.7")])
def test_untried_pairs_are_allowed_with_a_warning(vllm: str, kvcached: str) -> None:
    verdict = judge({"vllm": vllm, "kvcached": kvcached}, kvcached=True)
    assert verdict.ok and verdict.warning


def test_without_kvcached_a_newer_vllm_is_fine() -> None:
    assert judge({"vllm": "0.32.0"}, kvcached=False).ok
    assert not judge({"vllm": "0.9.0"}, kvcached=False).ok


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Path:
    """An environment with metadata of vLLM and kvcached, and a ``vllm`` script, without either package."""
    site = tmp_path / "site"
    for name, version in (("vllm", "0.30.0"), ("kvcached", "0.1.6")):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (site / "kvcached_autopatch.pth").touch()
    python = tmp_path / "bin" / "python3"
    python.parent.mkdir()
    code = f"import sys; sys.path.insert(0, {str(site)!r}); exec(sys.argv.pop())"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}" "$3"\n')
    script = tmp_path / "bin" / "vllm"
    script.write_text(f"#!{python}\nimport vllm\n")
    for path in (python, script):
        path.chmod(0o755)
    return script


def test_versions_are_asked_of_the_engine_s_own_python(fake_vllm: Path) -> None:
    found = detect_versions(str(fake_vllm))
    assert (found["vllm"], found["kvcached"], found["autopatch"]) == ("0.30.0", "0.1.6", True)
    assert "torch" not in sys.modules


def test_answer_is_kept_until_the_environment_changes(fake_vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detect_versions(str(fake_vllm))
    monkeypatch.setattr(versions.subprocess, "run", lambda *a, **k: pytest.fail("asked again"))
    assert detect_versions(str(fake_vllm))["vllm"] == "0.30.0"
    os.utime(fake_vllm.parent / "python3", ns=(1, 1))
    with pytest.raises(pytest.fail.Exception):
        detect_versions(str(fake_vllm))


def test_a_command_that_is_not_there_is_a_sentence() -> None:
    assert "not found" in detect_versions("/no/such/vllm")["error"]


def test_a_broken_interpreter_is_a_sentence(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\necho 'ImportError: boom' >&2\nexit 1\n")
    python.chmod(0o755)
    assert "ImportError: boom" in detect_versions(f"{python} -m vllm.entrypoints.cli.main")["error"]


def test_interpreter_is_found_behind_env_and_long_paths(tmp_path: Path) -> None:
    script = tmp_path / "vllm"
    script.write_text("#!/usr/bin/env python3\n")
    script.chmod(0o755)
    assert engine_python(str(script))
    script.write_text("#!/bin/sh\n'''exec' \"/very/long/bin/python3.12\" \"$0\" \"$@\"\n' '''\n")
    assert engine_python(str(script)) == ["/very/long/bin/python3.12"]
    assert engine_python("'unclosed") is None
