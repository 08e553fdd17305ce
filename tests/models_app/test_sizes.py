from __future__ import annotations

import pytest

from models_app.errors import InvalidInput
from models_app.services.sizes import parse_percent, parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3G", 3 * 1024**3),
        ("3g", 3 * 1024**3),
        ("3 GiB", 3 * 1024**3),
        ("3GB", 3 * 1024**3),
        ("512MiB", 512 * 1024**2),
        ("1.5 GiB", 1536 * 1024**2),
        ("1073741824", 1024**3),
        (" 7k ", 7 * 1024),
        ("1T", 1024**4),
        (4096, 4096),
        (4096.0, 4096),
    ],
)
def test_sizes_as_people_write_them(text: str | int | float, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "G",
        "3X",
        "-3G",
        "+3G",
        "3G3",
        "1e9",
        "0x10",
        "nan",
        "inf",
        "3,5G",
        "1.5",
        "0",
        0,
        -1,
        True,
        1.5,
        float("nan"),
        None,
        [3],
    ],
)
def test_anything_else_is_refused_with_a_sentence(text: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_size(text)  # type: ignore[arg-type]
    assert caught.value.fields["size"][0].endswith(".")


def test_more_than_any_gpu_has_is_refused() -> None:
    with pytest.raises(InvalidInput, match="any GPU"):
        parse_size("99999999999T")


def test_percent_is_told_from_bytes() -> None:
    assert parse_percent("40%") == 40.0
    assert parse_percent(" 12.5 % ") == 12.5
    assert parse_percent("40") is None
    assert parse_percent(40) is None


@pytest.mark.parametrize("text", ["0%", "101%", "-1%", "%", "4 0%"])
def test_percent_outside_its_range_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_percent(text)
