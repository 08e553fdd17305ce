"""Sizes as people write them, read strictly."""

from __future__ import annotations

import math
import re

from models_app.errors import InvalidInput

_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_MAX_BYTES = 2**62
_EXAMPLES = "Write bytes or a size such as 3G, 512MiB or 1.5 GiB"


def parse_size(size: str | int | float, *, field: str = "size") -> int:
    """Bytes of ``3G``, ``512MiB``, ``1.5 GiB``, ``1073741824``; units are powers of 1024.

    Raises InvalidInput for anything else: no sign, no exponent, no boolean, no fraction of a byte, not zero.
    """
    if isinstance(size, bool) or not isinstance(size, (str, int, float)):
        raise InvalidInput({field: f"{_EXAMPLES}."})
    if isinstance(size, float):
        if not math.isfinite(size) or size != int(size):
            raise InvalidInput({field: f"{size} is no whole number of bytes. {_EXAMPLES}."})
        size = int(size)
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        if match is None:
            raise InvalidInput({field: f"{size[:40]!r} is not a size. {_EXAMPLES}."})
        if "." in match[1] and not match[2]:
            raise InvalidInput({field: f"{size[:40]!r} is no whole number of bytes. {_EXAMPLES}."})
        number = float(match[1]) if "." in match[1] else int(match[1])
        size = int(number * _UNITS[match[2].lower()])
    if size <= 0:
        raise InvalidInput({field: "The size must be more than zero."})
    if size > _MAX_BYTES:
        raise InvalidInput({field: "That is more memory than any GPU has."})
    return size


def parse_percent(size: str | int | float, *, field: str = "size") -> float | None:
    """``"40%"`` → 40.0; None when it has no percent sign. Raises InvalidInput outside (0, 100]."""
    if not isinstance(size, str) or "%" not in size:
        return None
    match = _PERCENT.fullmatch(size.strip())
    if match is None:
        raise InvalidInput({field: f"{size[:40]!r} is not a percentage. Write for example 40%."})
    return check_percent(float(match[1]), field=field)


def check_percent(percent: float, *, field: str = "percent") -> float:
    if isinstance(percent, bool) or not math.isfinite(percent) or not 0 < percent <= 100:
        raise InvalidInput({field: "Use a percentage above 0 and up to 100."})
    return float(percent)
