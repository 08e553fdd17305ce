"""Why a start ended, in plain words: the first real error of the log, not its last line.

vLLM's last line is nearly always a consequence (``Engine core initialization failed. See root cause above``); the cause
stands further up, often on stdout and from another process. Warnings and the many harmless lines that look like errors
are passed over.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from models_app.engines.cause_rules import CONSEQUENCES, RULES, Rule
from models_app.engines.guardian import EXIT_CANNOT_START
from models_app.engines.progress import Line, read_line
from models_app.engines.rundir import Status

_QUIET = frozenset({"DEBUG", "INFO", "WARNING"})
#: ``{name: text {}}`` in a sentence: only when the group was found.
_OPTIONAL = re.compile(r"\{(\w+):((?:[^{}]|\{\})*)\}")
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception|Exit|Interrupt|Timeout))(?:: (.+))?$")
_CANNOT_START = re.compile(r"^sardeenz: cannot start (?P<program>.+): (?P<why>[^:]+)$")
#: Wrappers whose own text says nothing; the line after them does.
_WRAPPERS = frozenset({"ValidationError", "SystemExit", "KeyboardInterrupt", "CancelledError"})
_GENERIC_EXCEPTIONS = re.compile(
    r"Engine core initialization failed|EngineCore encountered|Executor failed|RPC call to"
)
_SERVING = "Application startup complete"
_TOLD_TO_END = ("[shutdown] API server: shutdown triggered", "KeyboardInterrupt: terminated")
_FATAL = ("EngineCore encountered a fatal error", "EngineCore failed to start", "WorkerProc hit an exception")
_END_LINES = 400
_LIMIT = 400


@dataclass(frozen=True)
class Cause:
    """``code`` is stable, ``sentence`` and ``advice`` are for people. ``permanent``: starting again as it is is
    useless.

    ``evidence_line`` is the log's own line (at most 400 characters), ``pid`` the process that wrote it, when it said
    so.
    """

    code: str
    sentence: str
    advice: str = ""
    evidence_line: str = ""
    pid: int | None = None
    permanent: bool = False


def explain(log_text: str, status: Status | None) -> Cause:
    """Why the start ended, from its log and the guardian's record (None: there is no guardian's record)."""
    if status and status.stop_requested:
        return Cause("stopped", "It was stopped, as asked.")
    lines = [read_line(raw) for raw in log_text.splitlines()]
    if status and status.exit_code == EXIT_CANNOT_START and (cause := _cannot_start(lines)):
        return cause
    served = next((i for i, line in enumerate(lines) if line.text.startswith(_SERVING)), None)
    if served is not None:
        # A server writes the errors of its clients too. What ended it stands at the end, and is the engine's.
        lines = lines[max(served, len(lines) - _END_LINES) :]
    if cause := _first(lines, RULES):
        return cause
    if status and status.signal:
        return _signalled(status.signal, lines)
    if cause := _exception(lines if served is None else _after_fatal(lines)):
        return cause
    if cause := _first(lines, CONSEQUENCES):
        return cause
    if any(line.text.startswith(_TOLD_TO_END) for line in lines):
        return _signalled(signal.SIGTERM, lines)
    return _silent(status, lines)


def _first(lines: list[Line], rules: tuple[Rule, ...]) -> Cause | None:
    for line in _telling(lines):
        for rule in rules:
            if match := rule.pattern.search(line.text):
                return Cause(
                    code=rule.code,
                    sentence=_fill(rule.sentence, match),
                    advice=_fill(rule.advice, match),
                    evidence_line=line.text.strip()[:_LIMIT],
                    pid=line.pid,
                    permanent=rule.permanent,
                )
    return None


def _telling(lines: Iterable[Line]) -> Iterator[Line]:
    """Lines that can hold an error: said as one, or part of a traceback. Source lines of a traceback cannot."""
    for line in lines:
        text = line.text
        if line.level in _QUIET or not text.strip():
            continue
        stripped = text.lstrip()
        if text.startswith(('  File "', "    ")) and not stripped.startswith(("Value error", "ValueError")):
            continue  # where it happened, and the source there: ``raise RuntimeError(`` explains nothing
        yield line


def _fill(template: str, match: re.Match[str]) -> str:
    groups = {name: value for name, value in match.groupdict().items() if value is not None}

    def optional(part: re.Match[str]) -> str:
        value = groups.get(part[1])
        return part[2].replace("{}", value) if value is not None else ""

    text = _OPTIONAL.sub(optional, template)
    for name, value in groups.items():
        text = text.replace(f"{{{name}}}", value.strip()[:200])
    return text.replace("..", ".") if text.endswith("..") else text


def _cannot_start(lines: list[Line]) -> Cause | None:
    for line in reversed(lines):
        if match := _CANNOT_START.match(line.text):
            return Cause(
                "program_missing",
                f"{match['program']} could not be started: {match['why']}.",
                "Install vLLM on this host, or set SARDEENZ_VLLM to the command that starts it.",
                line.text[:_LIMIT],
                permanent=True,
            )
    return None


def _signalled(number: int, lines: list[Line]) -> Cause:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    last = _last_text(lines)
    if number == signal.SIGKILL:
        return Cause(
            "killed",
            "The engine was killed from outside (SIGKILL), most likely by the kernel for lack of memory.",
            "Look for 'Out of memory' in the kernel log; give the host or container more memory.",
            last,
        )
    if number == signal.SIGILL:
        return Cause(
            "illegal_instruction",
            "The processor of this host lacks an instruction that the engine uses.",
            "Set another dtype (float32 on a CPU), or use another host.",
            last,
            permanent=True,
        )
    if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return Cause("signalled", f"Somebody else than Sardeenz asked the engine to end ({name}).", "", last)
    return Cause(
        "crashed", f"The engine crashed ({name}).", "If it comes back, try other engine options or versions.", last
    )


def _after_fatal(lines: list[Line]) -> list[Line]:
    """What follows the engine's own words that it is dying; nothing when it never said so."""
    start = next((i for i, line in enumerate(lines) if line.text.startswith(_FATAL)), len(lines))
    return lines[start:]


def _exception(lines: Iterable[Line]) -> Cause | None:
    """An error that no rule knows: the first exception that is not a wrapper or a consequence, in its own words."""
    for line in _telling(lines):
        match = _EXCEPTION.match(line.text.strip())
        if match and match[1] not in _WRAPPERS and not _GENERIC_EXCEPTIONS.search(line.text):
            what = (match[2] or match[1]).strip()
            return Cause(
                "error", f"vLLM says: {what[:300]}", "See the log.", line.text.strip()[:_LIMIT], line.pid, False
            )
        if line.text.startswith("  Value error, "):
            what = line.text.removeprefix("  Value error, ").split(" [type=")[0]
            return Cause(
                "error", f"vLLM says: {what[:300]}", "See the log.", line.text.strip()[:_LIMIT], line.pid, True
            )
    return None


def _silent(status: Status | None, lines: list[Line]) -> Cause:
    last = _last_text(lines)
    if status is None:
        return Cause("unknown", "There is no record of how it ended.", "", last)
    if status.exit_code == 0:
        return Cause(
            "ended_unasked",
            "The engine ended by itself without an error, though nobody asked it to.",
            "See the log for what came before.",
            last,
        )
    return Cause("error", f"The engine ended with exit code {status.exit_code} and said nothing more.", "", last)


def _last_text(lines: list[Line]) -> str:
    return next((line.text.strip()[:_LIMIT] for line in reversed(lines) if line.text.strip()), "")
