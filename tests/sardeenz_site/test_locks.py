"""Lock files say which bytes to install and never where from: each machine has its own registry."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON_LOCKS = ("requirements.lock", "requirements-dev.lock", "requirements-node.lock")


def entries(name: str) -> dict[str, str]:
    """Package (with its marker) → version."""
    text = (ROOT / name).read_text()
    return {
        m[1] + (m[3] or ""): m[2] for m in re.finditer(r"^([a-z0-9._-]+)==([^ ;\\]+)( ; [^\\]+)?", text, re.MULTILINE)
    }


@pytest.mark.parametrize("name", [*PYTHON_LOCKS, "package-lock.json"])
def test_lock_file_has_no_address(name: str) -> None:
    text = (ROOT / name).read_text()
    assert not re.search(r"https?:|file:|git\+|\bresolved\b|index-url|find-links", text)


@pytest.mark.parametrize("name", PYTHON_LOCKS)
def test_every_python_package_has_a_hash(name: str) -> None:
    for block in re.split(r"^(?=[a-z0-9])", (ROOT / name).read_text(), flags=re.MULTILINE)[1:]:
        assert "--hash=sha256:" in block, block.splitlines()[0]


def test_every_front_end_package_has_a_digest_and_one_version() -> None:
    lock = json.loads((ROOT / "package-lock.json").read_text())
    packages = {name: package for name, package in lock["packages"].items() if name}
    assert packages
    assert all(package["integrity"].startswith("sha512-") for package in packages.values())
    wanted = json.loads((ROOT / "package.json").read_text())["dependencies"]
    assert {name: packages[f"node_modules/{name}"]["version"] for name in wanted} == wanted


def test_tests_run_on_the_versions_of_service() -> None:
    service, tests = entries("requirements.lock"), entries("requirements-dev.lock")
    assert len(service) > 50
    assert {name: tests.get(name) for name in service} == service
