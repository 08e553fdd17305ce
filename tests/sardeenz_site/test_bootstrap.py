"""From an empty machine: what is installed already is left alone, and failures are one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sardeenz_site import bootstrap

NO_HEADER = """
  building 'httptools.parser' extension
  httptools/parser/parser.c:28:10: fatal error: Python.h: No such file or directory
  error: command '/usr/bin/gcc' failed with exit code 1
ERROR: Failed building wheel for httptools
"""
WRONG_HASH = """
ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. If you have updated the package versions…
    django==5.2 from …: Expected sha256 aaaa
"""
NO_SUCH = "ERROR: Could not find a version that satisfies the requirement nothing==9 (from versions: none)\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (NO_HEADER, "Python header files are missing"),
        (WRONG_HASH, "not the one in the lock file"),
        (NO_SUCH, "Is the package registry reachable?"),
        ("OSError: [Errno 28] No space left on device", "is full"),
        ("something else\nERROR: broken\n", "ERROR: broken"),
        ("", "no reason was given"),
    ],
)
def test_failure_of_pip_is_told_in_a_sentence(text: str, sentence: str) -> None:
    answer = bootstrap.why_pip_failed(text)
    assert sentence in answer
    assert "\n" not in answer


def test_lock_that_was_installed_is_not_installed_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "r.lock").write_text("x==1\n")
    calls: list[list[str]] = []

    def run(argv: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(argv)
        return subprocess.CompletedProcess(argv, 0, "", "")

    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path)
    monkeypatch.setattr(bootstrap.subprocess, "run", run)
    bootstrap.install("r.lock", "packages")
    bootstrap.install("r.lock", "packages")
    assert len(calls) == 1
    assert "--require-hashes" in calls[0]
    (tmp_path / "r.lock").write_text("x==2\n")
    bootstrap.install("r.lock", "packages")
    assert len(calls) == 2


def test_failed_install_is_tried_again_next_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "r.lock").write_text("x==1\n")
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "VENV", tmp_path)
    monkeypatch.setattr(
        bootstrap.subprocess, "run", lambda argv, **_: subprocess.CompletedProcess(argv, 1, "", NO_HEADER)
    )
    with pytest.raises(bootstrap.CannotInstall, match="python3-dev"):
        bootstrap.install("r.lock", "packages")
    assert list(tmp_path.iterdir()) == [tmp_path / "r.lock"]


def test_old_python_is_refused_with_the_version_it_needs(monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 10, 4))
    assert bootstrap.main(["run"]) == 1
    assert "needs Python 3.11 or newer; this is 3.10" in capsys.readouterr().err  # type: ignore[attr-defined]


def test_bootstrap_needs_nothing_but_the_standard_library() -> None:
    code = (
        "import sys; sys.path.insert(0, 'sardeenz_site'); import bootstrap; "
        "outside = [m for m in sys.modules if m.partition('.')[0] not in sys.stdlib_module_names "
        "and m not in ('bootstrap', '__main__')]; print(outside); sys.exit(bool(outside))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=bootstrap.ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_environment_of_children_writes_byte_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in bootstrap.clean_environment()


def test_node_of_the_wheel_is_used_where_the_machine_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[str] = []
    monkeypatch.setattr(bootstrap.shutil, "which", lambda _name: None)
    monkeypatch.setattr(bootstrap, "install", lambda lock, _what: installed.append(lock))
    assert bootstrap.npm() == [str(bootstrap.VENV / "bin" / "npm")]
    assert installed == ["requirements-node.lock"]
