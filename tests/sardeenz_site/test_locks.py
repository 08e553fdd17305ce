"""Lock files say which bytes to install and never where from: each machine has its own registry."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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


def test_every_dependency_that_is_declared_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    declared = {
        "requirements.lock": project["project"]["dependencies"],
        "requirements-dev.lock": project["project"]["optional-dependencies"]["dev"],
        "requirements-node.lock": project["dependency-groups"]["node"],
    }
    for name, wanted in declared.items():
        locked = {package.partition(" ")[0] for package in entries(name)}
        for line in wanted:
            requirement = Requirement(line)
            assert canonicalize_name(requirement.name) in locked, f"{line}: make lock"
            versions = [
                v for package, v in entries(name).items() if package.partition(" ")[0] == requirement.name.lower()
            ]
            assert all(requirement.specifier.contains(version) for version in versions), f"{line}: make lock"
