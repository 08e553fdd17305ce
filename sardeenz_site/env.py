"""Typed readers of environment variables. Nonsense stops the start with a sentence; nothing is cut or guessed.

Every name that was asked for is remembered in ``KNOWN``, so that ``checks.py`` can point at a misspelt variable.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured

KNOWN: set[str] = set()

_UNITS = {"": 1, "b": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?$", re.IGNORECASE)
_NUMBER = re.compile(r"^[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?$", re.IGNORECASE)


def load_env_file(default: Path) -> None:
    """Read ``SARDEENZ_ENV_FILE`` (or the default ``.env``); a variable that is set already keeps its value."""
    from dotenv import dotenv_values

    KNOWN.add("SARDEENZ_ENV_FILE")
    named = os.environ.get("SARDEENZ_ENV_FILE")
    file = Path(named).expanduser() if named else default
    if not file.exists():
        if named:
            raise ImproperlyConfigured(f"SARDEENZ_ENV_FILE={named!r}: there is no such file.")
        return
    try:
        values = dotenv_values(file, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ImproperlyConfigured(f"The settings file {file} cannot be read: {exc}.") from exc
    for name, value in values.items():
        if value is not None:
            os.environ.setdefault(name, value)


def _raw(name: str) -> str | None:
    KNOWN.add(name)
    value = os.environ.get(name)
    if value is None:
        return None
    if value.strip() == "":
        raise ImproperlyConfigured(f"{name} is set but empty: give it a value or unset it.")
    return value.strip()


def env_str(name: str, default: str) -> str:
    value = _raw(name)
    return default if value is None else value


def env_choice(name: str, default: str, choices: tuple[str, ...]) -> str:
    value = env_str(name, default)
    if value not in choices:
        raise ImproperlyConfigured(f"{name}={value!r} is not one of {', '.join(choices)}.")
    return value


def env_bool(name: str, default: bool) -> bool:
    value = _raw(name)
    if value is None:
        return default
    low = value.lower()
    if low in ("1", "true", "yes", "on"):
        return True
    if low in ("0", "false", "no", "off"):
        return False
    raise ImproperlyConfigured(f"{name}={value!r} is not a yes or no (use true or false).")


def env_float(name: str, default: float, *, minimum: float = 0.0, maximum: float = math.inf) -> float:
    value = _raw(name)
    if value is None:
        return default
    number = float(value) if _NUMBER.match(value) else math.nan
    if not math.isfinite(number):
        raise ImproperlyConfigured(f"{name}={value!r} is not a number.")
    if not minimum <= number <= maximum:
        bounds = f"below {minimum:g}" if maximum == math.inf else f"outside {minimum:g} to {maximum:g}"
        raise ImproperlyConfigured(f"{name}={value!r} is {bounds}.")
    return number


def env_int(name: str, default: int, *, minimum: int = 0, maximum: int = 2**53) -> int:
    """A whole number; ``1.8e+06`` is 1,800,000 (what Helm makes of it), ``1.5`` and ``10abc`` are refused."""
    number = env_float(name, float(default), minimum=float(minimum), maximum=float(maximum))
    if number != int(number):
        raise ImproperlyConfigured(f"{name}={os.environ[name]!r} is not a whole number.")
    return int(number)


def env_port(name: str, default: int) -> int:
    return env_int(name, default, minimum=1, maximum=65535)


def env_bytes(name: str, default: int) -> int:
    """A size in bytes: ``40GiB``, ``40G``, ``512m`` or a plain number; units are powers of 1024."""
    value = _raw(name)
    if value is None:
        return default
    match = _SIZE.match(value)
    if not match:
        raise ImproperlyConfigured(f"{name}={value!r} is not a size (examples: 40GiB, 512M, 1073741824).")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def env_list(name: str, default: list[str]) -> list[str]:
    value = _raw(name)
    return default if value is None else [part.strip() for part in value.split(",") if part.strip()]


def env_path(name: str, default: Path) -> Path:
    value = _raw(name)
    return (default if value is None else Path(value).expanduser()).absolute()


def env_secret(name: str) -> str | None:
    """The value of NAME, or the content of the file that NAME_FILE names, as Docker hands out secrets."""
    value = _raw(name)
    if value is not None:
        return value
    file = _raw(f"{name}_FILE")
    if file is None:
        return None
    try:
        content = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ImproperlyConfigured(f"{name}_FILE={file!r} cannot be read: {exc}.") from exc
    if not content:
        raise ImproperlyConfigured(f"{name}_FILE={file!r} is an empty file.")
    return content
