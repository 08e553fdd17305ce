"""Readers of the environment: nonsense is refused with the variable's name, nothing is cut (cases SZ-001, SZ-002)."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from sardeenz_site import env


@pytest.mark.parametrize(("text", "value"), [("1.8e+06", 1_800_000), ("1800000", 1_800_000), (" 7 ", 7), ("1.0", 1)])
def test_whole_number_in_any_notation_keeps_its_value(monkeypatch: pytest.MonkeyPatch, text: str, value: int) -> None:
    monkeypatch.setenv("X", text)
    assert env.env_int("X", 5) == value


@pytest.mark.parametrize("text", ["10abc", "1.5", "", "  ", "-1", "0", "nan", "inf", "1e400", "1_000", "0x10", "ten"])
def test_number_that_is_none_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("X_LIMIT", text)
    with pytest.raises(ImproperlyConfigured, match="X_LIMIT"):
        env.env_int("X_LIMIT", 5, minimum=1)


@pytest.mark.parametrize("text", ["0", "65536", "-1", "80a", "80.5"])
def test_port_outside_its_range_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PORT", text)
    with pytest.raises(ImproperlyConfigured, match="PORT"):
        env.env_port("PORT", 8000)


@pytest.mark.parametrize(
    ("text", "value"), [("40GiB", 40 << 30), ("40G", 40 << 30), ("512m", 512 << 20), ("1.5k", 1536), ("7", 7)]
)
def test_size_reads_powers_of_1024(monkeypatch: pytest.MonkeyPatch, text: str, value: int) -> None:
    monkeypatch.setenv("X", text)
    assert env.env_bytes("X", 0) == value


@pytest.mark.parametrize("text", ["40 apples", "-1G", "G", "1e3", ""])
def test_size_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("X", text)
    with pytest.raises(ImproperlyConfigured, match="X"):
        env.env_bytes("X", 0)


@pytest.mark.parametrize("text", ["maybe", "2", ""])
def test_yes_or_no_takes_nothing_else(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("X", text)
    with pytest.raises(ImproperlyConfigured):
        env.env_bool("X", True)


def test_unset_variable_gives_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("X", raising=False)
    assert (env.env_int("X", 3), env.env_str("X", "a"), env.env_list("X", ["b"]), env.env_bool("X", True)) == (
        3,
        "a",
        ["b"],
        True,
    )


def test_choice_names_what_it_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("X", "cuda")
    with pytest.raises(ImproperlyConfigured, match="auto, vllm"):
        env.env_choice("X", "auto", ("auto", "vllm"))


def test_secret_is_read_from_the_file_that_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "s").write_text("geheim\n")
    monkeypatch.delenv("X", raising=False)
    monkeypatch.setenv("X_FILE", str(tmp_path / "s"))
    assert env.env_secret("X") == "geheim"


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_secret_file_that_is_missing_or_empty_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "s"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("X_FILE", str(file))
    with pytest.raises(ImproperlyConfigured, match="X_FILE"):
        env.env_secret("X")


def test_empty_database_url_is_not_taken_for_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "")
    with pytest.raises(ImproperlyConfigured, match="DATABASE_URL"):
        env.env_secret("DATABASE_URL")


def test_env_file_fills_what_is_not_set_and_overrides_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "e").write_text('X_A=1\nX_B="two words"\n# X_C=3\n')
    monkeypatch.setenv("SARDEENZ_ENV_FILE", str(tmp_path / "e"))
    monkeypatch.setenv("X_A", "kept")
    monkeypatch.setenv("X_B", "")
    monkeypatch.delenv("X_B")
    env.load_env_file(tmp_path / "nowhere")
    assert (env.env_str("X_A", ""), env.env_str("X_B", ""), env.env_str("X_C", "-")) == ("kept", "two words", "-")


def test_env_file_that_was_named_and_is_missing_stops_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SARDEENZ_ENV_FILE", str(tmp_path / "none"))
    with pytest.raises(ImproperlyConfigured, match="SARDEENZ_ENV_FILE"):
        env.load_env_file(tmp_path / ".env")
