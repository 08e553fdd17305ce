"""Extra arguments of ``vllm serve``: split as a shell would, checked as vLLM's own parser would, refused with a reason.

Every spelling that the parser takes is resolved first, so that nothing slips past by its form: underscores for dashes,
unique prefixes (``--gpu-mem``), ``--flag=value``, one-dash short names with or without a space, dotted JSON
(``--compilation-config.level 3``) and ``-O3``. What comes out is written in full. Nothing is ever dropped in silence.

The table of flags (``data/vllm_flags.json``) was written from the real parsers of the versions named in it, by
``tests/contract/dump_flags.py``. A version between two of them is given what either knows.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from packaging.version import InvalidVersion, Version

from models_app.engines.argument_rules import HINTS, owned_reason, risky_reason

_NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
_SIZE = re.compile(r"\d+|\d+(?:\.\d+)?[kKmMgGtT]|auto|-1")


@dataclass(frozen=True)
class Flag:
    """One option of the parser. ``takes``: none, one, optional or many values."""

    names: tuple[str, ...]
    takes: str
    kind: str = "text"
    choices: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The spelling to use: the first long one."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])


@dataclass(frozen=True)
class Argument:
    """One flag with its values, resolved. ``spelling`` is what goes on the command line (``--no-…``, dotted)."""

    flag: Flag
    spelling: str
    values: tuple[str, ...]


@cache
def _table() -> tuple[tuple[str, ...], tuple[Flag, ...]]:
    data = json.loads(files("models_app.engines").joinpath("data/vllm_flags.json").read_text())
    flags = tuple(
        Flag(
            names=tuple(item["names"]),
            takes=item["takes"],
            kind=item.get("kind", "text"),
            choices=tuple(item.get("choices", ())),
            versions=tuple(item["versions"]),
        )
        for item in data["flags"]
    )
    return tuple(sorted(data["versions"], key=Version)), flags


@cache
def flags_of(vllm_version: str | None) -> dict[str, Flag]:
    """Every option string that this version of vLLM knows, to its flag. None: what any version knows."""
    versions, flags = _table()
    use = set(versions)
    if vllm_version:
        try:
            wanted = Version(vllm_version.split("+")[0])
        except InvalidVersion:
            wanted = Version(versions[-1])
        below = [v for v in versions if Version(v) <= wanted]
        above = [v for v in versions if Version(v) >= wanted]
        use = {below[-1] if below else above[0], above[0] if above else below[-1]}
    found: dict[str, Flag] = {}
    for version in sorted(use, key=Version):  # a newer definition wins
        found.update({name: flag for flag in flags if version in flag.versions for name in flag.names})
    return found


def check_extra_args(
    text: str, *, vllm_version: str | None = None, allow_risky: bool = False, kvcached: bool = True
) -> tuple[list[str], list[str]]:
    """The arguments as a list for exec, and a sentence for each one that cannot be accepted; then the list is empty.

    ``allow_risky``: the asker has the permission ``models_app.risky_arguments``. ``kvcached``: with it, KV memory is
    governed by limits, so the flags that would size it otherwise are refused as well.
    """
    parsed, errors = parse_extra_args(text, vllm_version=vllm_version)
    argv: list[str] = []
    for argument in parsed:
        name = argument.flag.name
        if reason := owned_reason(name, kvcached=kvcached):
            errors.append(f"{argument.spelling} cannot be given here: {reason}")
        elif (reason := risky_reason(name)) and not allow_risky and not argument.spelling.startswith("--no-"):
            errors.append(
                f"{argument.spelling} needs the permission to use risky arguments, because it {reason}. Ask an admin."
            )
        else:
            errors += _value_errors(argument)
            argv += _words(argument)
    return ([] if errors else argv), errors


def _words(argument: Argument) -> list[str]:
    """As they go on the command line. A value with a dash in front stays attached, or it would be taken for a flag."""
    values = argument.values
    if len(values) == 1 and values[0].startswith("-") and not _NEGATIVE_NUMBER.fullmatch(values[0]):
        return [f"{argument.spelling}={values[0]}"]
    return [argument.spelling, *values]


def parse_extra_args(text: str, *, vllm_version: str | None = None) -> tuple[list[Argument], list[str]]:
    """Resolve the text into flags with values, and say what could not be. Judges nothing else."""
    try:
        words = shlex.split(text.replace("\\\r\n", " ").replace("\\\n", " "))
    except ValueError as exc:
        what = "a quote is opened and never closed" if "quotation" in str(exc) else "it ends in a backslash"
        return [], [f"The extra arguments cannot be split: {what}."]
    known = flags_of(vllm_version)
    arguments: list[Argument] = []
    errors: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not _is_flag(word, known):
            errors.append(_stray(word, after=arguments[-1] if arguments else None))
            continue
        if word == "-O" and index < len(words) and words[index] in ("0", "1", "2", "3"):
            word, index = f"-O{words[index]}", index + 1
        resolved = _resolve(word, known, vllm_version)
        if isinstance(resolved, str):
            errors.append(resolved)
            while index < len(words) and not _is_flag(words[index], known):
                index += 1  # its values: one sentence about the flag is enough
            continue
        flag, spelling, given = resolved
        values = [given] if given is not None else []
        if given is None and flag.takes != "none":
            most = len(words) if flag.takes == "many" else 1
            while index < len(words) and len(values) < most and not _is_flag(words[index], known):
                values.append(words[index])
                index += 1
        if given is not None and flag.takes == "none":
            errors.append(f"{spelling} takes no value, but was given {given!r}.")
        elif not values and flag.takes in ("one", "many"):
            errors.append(f"{spelling} needs a value.")
        else:
            arguments.append(Argument(flag, spelling, tuple(values)))
    return arguments, errors


def _is_flag(word: str, known: Mapping[str, Flag]) -> bool:
    """As argparse sees it: a dash in front, not a number, no blank in its name; a short one may have a value glued on.

    A blank after the first ``=`` is one of the value: ``"--flag=a b"`` is a flag wherever it stands.
    """
    if len(word) < 2 or word[0] != "-" or _NEGATIVE_NUMBER.fullmatch(word):
        return False
    name = word.partition("=")[0]
    return " " not in name or (not word.startswith("--") and word[:2] in known)


def _stray(word: str, after: Argument | None) -> str:
    if word[:1] in ("–", "—"):
        return f"{word!r} begins with a typographic dash; write two plain ones: --{word.lstrip('–—-')}."
    if after and after.flag.takes == "none":
        return f"{word!r} follows {after.spelling}, which takes no value."
    if after:
        return f"{word!r} is one value too many for {after.spelling}. Put values with blanks into quotes."
    return f"{word!r} stands alone: arguments begin with --. (The model is set by its own field.)"


def _resolve(word: str, known: dict[str, Flag], version: str | None) -> tuple[Flag, str, str | None] | str:
    """Flag, full spelling and attached value of one word; or a sentence why not."""
    if word == "--":
        return "-- cannot be given here: arguments begin with a name."
    if word.startswith("-O") and len(word) > 2:
        level = word[2:].removeprefix("=")
        return (known["--optimization-level"], "--optimization-level", level)
    name, equals, value = word.partition("=")
    given = value if equals else None
    name, dot, path = name.partition(".")
    if name.startswith("--"):
        name = name.replace("_", "-")
    matches, attached = _candidates(name, known)
    if len({known[match].name for match in matches}) > 1 or len(matches) > 1:
        return _ambiguous(word, matches, known)
    if not matches:
        return _unknown(name, known, version)
    full, flag = matches[0], known[matches[0]]
    if attached is not None:
        given = attached if given is None else f"{attached}={given}"
    if full not in flag.names or not full.startswith("--"):
        full = flag.name
    return flag, f"{full}{dot}{path}", given


def _candidates(name: str, known: dict[str, Flag]) -> tuple[list[str], str | None]:
    """Option strings that argparse would take a name for, and a value glued to a one-letter flag (``-qawq``)."""
    if name in known:
        return [name], None
    if not name.startswith("--") and name[:2] in known:
        return [name[:2]], name[2:]
    return sorted(option for option in known if option.startswith(name)), None


def _ambiguous(word: str, matches: list[str], known: dict[str, Flag]) -> str:
    owned = [match for match in matches if owned_reason(known[match].name, kvcached=True)]
    if owned and len(owned) == len(matches):
        return f"{word} cannot be given here: {owned_reason(known[owned[0]].name, kvcached=True)}"
    shown = ", ".join(matches[:5]) + (" …" if len(matches) > 5 else "")
    return f"{word} could mean {shown}: write it in full."


def _unknown(name: str, known: dict[str, Flag], version: str | None) -> str:
    if name in HINTS:
        return f"vLLM does not know {name}. {HINTS[name]}"
    elsewhere = flags_of(None).get(name)
    if elsewhere:
        return f"vLLM {version} does not know {name}; {', '.join(elsewhere.versions)} does."
    near = difflib.get_close_matches(name, [option for option in known if option.startswith("--")], n=1, cutoff=0.75)
    return f"vLLM does not know {name}." + (f" Did you mean {near[0]}?" if near else "")


def _value_errors(argument: Argument) -> Iterator[str]:
    """What vLLM's parser would refuse anyway, said before a start is spent on it."""
    flag = argument.flag
    if "." in argument.spelling:
        return
    for value in argument.values:
        if flag.choices and value not in flag.choices:
            yield f"{argument.spelling} {value}: choose from {', '.join(flag.choices)}."
        elif flag.kind == "int" and not re.fullmatch(r"[+-]?\d+", value):
            yield f"{argument.spelling} needs a whole number, not {value!r}."
        elif flag.kind == "float" and not _is_float(value):
            yield f"{argument.spelling} needs a number, not {value!r}."
        elif flag.kind == "size" and not _SIZE.fullmatch(value):
            yield f"{argument.spelling} needs a number such as 4096, 4k or 1.5M, not {value!r}."
        elif value[:1] in ("{", "[") and not _is_json(value):
            yield f"{argument.spelling}: {value!r} is not JSON. Put single quotes around it to keep its own quotes."


def _is_float(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _is_json(value: str) -> bool:
    try:
        json.loads(value)
    except ValueError:
        return False
    return True
