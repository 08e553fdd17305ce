"""The command line of ``vllm serve``: what the simulated engine obeys, what it takes and passes over, what it refuses.

argparse does the work, as in vLLM: underscores are dashes, ``--flag=value`` works, so do unique prefixes, and an
unknown flag or a bad value ends with exit code 2 and vLLM's words. The flags without a meaning here come from the
table that the launcher is checked with, when that file is there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from models_app.simulator.facts import parse_version

FLAG_TABLE = Path(__file__).parents[1] / "engines" / "data" / "vllm_flags.json"
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
_COMMANDS = "{chat,complete,serve,launch,bench,collect-env,run-batch}"
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_NARGS = {"one": None, "many": "+", "optional": "?"}


def human_readable_int(text: str) -> int:
    """``1024``, ``32k`` (decimal), ``32K`` (binary), ``25.6k``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)", text.strip())
    if not match:
        raise argparse.ArgumentTypeError(f"invalid human_readable_int value: {text!r}")
    number, unit = match.groups()
    if unit in _BINARY:
        if "." in number:
            raise argparse.ArgumentTypeError(f"Decimals are not allowed with binary suffixes like {unit}.")
        return int(number) * _BINARY[unit]
    return int(float(number) * _DECIMAL.get(unit, 1))


def human_readable_int_or_auto(text: str) -> int:
    """The same, or -1 / ``auto`` for *as much as fits*."""
    return -1 if text.strip() in ("-1", "auto") else human_readable_int(text)


_KINDS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "size": human_readable_int}


class Parser(argparse.ArgumentParser):
    """Errors in vLLM's form; ``--flag_name`` is ``--flag-name``."""

    def format_usage(self) -> str:
        return "usage: vllm serve [model_tag] [options]\n"

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.format_usage()}vllm serve: error: {message}\n")

    def unknown(self, extras: Sequence[str]) -> NoReturn:
        """Unknown flags are found by the outer parser, so the text names another program."""
        usage = f"usage: vllm [-h] [-v]\n            {_COMMANDS}\n            ...\n"
        self.exit(2, f"{usage}vllm: error: unrecognized arguments: {' '.join(extras)}\n")


def parse(argv: Sequence[str], vllm_version: str) -> argparse.Namespace:
    """The arguments after ``serve``. Ends the process with code 2 on nonsense, as vLLM does."""
    tokens = [_plain(token) for token in argv]
    names = [token.partition("=")[0] for token in tokens if token.startswith("--")]
    # A repeated flag is only noted; the last one wins.
    if repeated := sorted({name for name in names if names.count(name) > 1 and name != "--middleware"}):
        print(f"Found duplicate keys {', '.join(repeated)}", file=sys.stderr, flush=True)  # noqa: T201
    parser = _parser(vllm_version)
    options, extras = parser.parse_known_args(tokens)
    if extras:
        parser.unknown(extras)
    options.model = options.model_tag or options.model
    return options


def _plain(token: str) -> str:
    """Underscores as dashes; ``--flag.key`` (one key of a JSON value) as the flag."""
    if not token.startswith("--"):
        return token
    name, equals, value = token.partition("=")
    return name.partition(".")[0].replace("_", "-") + equals + value


def _parser(vllm_version: str) -> Parser:
    parser = Parser(prog="vllm serve", add_help=True)
    add = parser.add_argument
    add("model_tag", nargs="?")
    add("--model", default=DEFAULT_MODEL)
    add("--served-model-name", nargs="+", default=None)
    add("--host", default=None)
    add("--port", type=int, default=8000)
    add("--uds", default=None)
    add("--root-path", default="")
    add("--api-key", nargs="*", default=None)
    add("--middleware", action="append", default=[])
    add("--max-model-len", type=_named(human_readable_int_or_auto), default=None)
    add("--tensor-parallel-size", "-tp", type=int, default=1)
    add("--pipeline-parallel-size", "-pp", type=int, default=1)
    add("--data-parallel-size", "-dp", type=int, default=1)
    add("--gpu-memory-utilization", type=float, default=0.92)
    add("--kv-cache-memory-bytes", type=_named(human_readable_int), default=None)
    add("--kv-cache-dtype", default="auto")
    add("--block-size", type=int, default=None)
    add("--max-num-seqs", type=int, default=None)
    add("--max-num-batched-tokens", type=_named(human_readable_int), default=None)
    add("--dtype", default="auto")
    add("--quantization", "-q", default=None)
    add("--load-format", default="auto")
    add("--revision", default=None)
    add("--shutdown-timeout", type=float, default=0)
    add("--disable-access-log-for-endpoints", default="")
    add("--tool-call-parser", default=None)
    for flag in (
        "--enforce-eager",
        "--enable-sleep-mode",
        "--enable-prefix-caching",
        "--enable-server-load-tracking",
        "--enable-log-requests",
        "--disable-uvicorn-access-log",
        "--trust-remote-code",
        "--async-scheduling",
        "--enable-auto-tool-choice",
    ):
        add(flag, action=argparse.BooleanOptionalAction, default=flag == "--enable-prefix-caching")
    taken = {name for action in parser._actions for name in action.option_strings}
    for row in _passed_over(vllm_version):
        names = [name for name in row["names"] if name not in taken]
        if not names:
            continue
        taken.update(names)
        if row["takes"] == "none":
            add(*names, action="store_true", dest=names[0])
        else:
            kind = _KINDS.get(row.get("kind", ""), str)
            add(*names, nargs=_NARGS[row["takes"]], type=kind, choices=row.get("choices"), dest=names[0])
    return parser


def _named(function: Callable[[str], int]) -> Callable[[str], int]:
    """argparse prints the type's name in ``invalid … value``; vLLM's types print their own sentence."""

    def convert(text: str) -> int:
        try:
            return function(text)
        except argparse.ArgumentTypeError as error:
            raise ValueError(str(error)) from error

    convert.__name__ = function.__name__
    return convert


def _passed_over(vllm_version: str) -> list[dict[str, Any]]:
    """The rows of the launcher's table that hold for this version (or the nearest that the table knows)."""
    try:
        table = json.loads(FLAG_TABLE.read_text())
    except (OSError, ValueError):
        return []
    wanted = parse_version(vllm_version)
    known = sorted(table["versions"], key=parse_version)
    nearest = next((version for version in reversed(known) if parse_version(version) <= wanted), known[0])
    return [row for row in table["flags"] if nearest in row["versions"]]
