"""How far a start has got, read from vLLM's log as it grows.

Lines as 0.24, 0.30 and 0.32 write them (prefixed or not, coloured or not). Stages only go forward: vLLM's processes
write into one log, and their lines may cross. ``/health`` is the only proof of readiness; the log can only say
*almost*.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from models_app.engines.guardian import LOG_NAME
from models_app.states import Stage

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
#: ``(EngineCore_DP0 pid=17)``, ``(Worker_TP1_EP1 pid=18)``: the process without its ranks.
_WHO = re.compile(r"\(([A-Za-z]+)(?:_[A-Za-z]*\d+)*(?: [A-Za-z]+=\d+)* pid=(\d+)\) ?")
#: ``INFO 11-30 15:53:56 [core.py:123] ``, and uvicorn's ``INFO:     ``.
_LEVEL = re.compile(
    r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)(?::\s+| \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? (?:\[[^\]]*:\d+\] ?)?)"
)
_READ_LIMIT = 1 << 20

_PERCENT = re.compile(r":\s+(\d{1,3})%")
#: What a line tells: pattern, rank, stage. The first that matches counts. A start never goes back to a lower rank; vLLM
#: says that it loads before it downloads what it is to load, so these two share one.
_LINES: tuple[tuple[re.Pattern[str], int, Stage], ...] = (
    (re.compile(r"Capturing CUDA graph|Capturing cudagraphs|Graph capturing finished"), 5, Stage.CAPTURING_GRAPHS),
    (re.compile(r"Application startup complete"), 6, Stage.READY),
    (re.compile(r"init engine \(profile, create kv cache, warmup model\) took"), 4, Stage.WARMING_UP),
    (re.compile(r"Initial profiling/warmup run took|Memory profiling takes"), 4, Stage.WARMING_UP),
    (re.compile(r"(?:GPU|CPU) KV cache size:|Available KV cache memory"), 4, Stage.WARMING_UP),
    (re.compile(r"Init C\+\+ PageAllocator|Using kvcached process-local KV capacity"), 4, Stage.WARMING_UP),
    (re.compile(r"Waiting for physical KV capacity"), 4, Stage.WARMING_UP),
    (re.compile(r"torch\.compile took|Dynamo bytecode transform time|Compiling a graph for"), 3, Stage.COMPILING),
    (re.compile(r"Directly load .*(?:graph|AOT compilation)|Cache the graph of"), 3, Stage.COMPILING),
    (re.compile(r"Loading \w+ checkpoint shards|Loading safetensors using"), 2, Stage.LOADING_WEIGHTS),
    (re.compile(r"Loading weights took|Model loading took|Time spent downloading weights"), 2, Stage.LOADING_WEIGHTS),
    (re.compile(r"Starting to load model"), 1, Stage.LOADING_WEIGHTS),
    (re.compile(r"Fetching \d+ files:"), 1, Stage.DOWNLOADING),
    (re.compile(r"(?:Downloading \S+|\.(?:safetensors|bin|json|model)):\s+\d+%"), 1, Stage.DOWNLOADING),
    (re.compile(r"Initializing a V1 LLM engine|non-default args|vLLM API server version"), 0, Stage.STARTING),
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One line of the log without its decoration. ``who``: APIServer, EngineCore, Worker …, empty when not said."""

    text: str
    who: str = ""
    pid: int | None = None
    level: str = ""


@dataclass(frozen=True)
class Progress:
    """Stage of a start, and how much of that stage is done (0 to 1; None: not known). ``detail`` is the line's text."""

    stage: Stage
    progress: float | None = None
    detail: str = ""
    rank: int = 0


def read_line(raw: str) -> Line:
    """Take prefix, colour and logger off a line: ``(EngineCore_DP0 pid=9) ERROR 11-30 … [core.py:1366] text``."""
    text = _ANSI.sub("", raw).rstrip()
    who, pid, level = "", None, ""
    if match := _WHO.match(text):
        who, pid, text = match[1], int(match[2]), text[match.end() :]
    if match := _LEVEL.match(text):
        level, text = match[1], text[match.end() :]
    return Line(text, who, pid, level)


def parse_progress(raw: str) -> Progress | None:
    """What one line says of the stage; None when nothing."""
    text = read_line(raw).text
    for pattern, rank, stage in _LINES:
        if pattern.search(text):
            return Progress(stage, _share(stage, text), text[:200], rank)
    return None


def _share(stage: Stage, text: str) -> float | None:
    """The percentage of a bar. One file of a download tells nothing of the whole, so it counts for nothing."""
    if "Graph capturing finished" in text or "Loading weights took" in text:
        return 1.0
    percent = _PERCENT.search(text)
    if percent is None or stage is Stage.READY or (stage is Stage.DOWNLOADING and not text.startswith("Fetching")):
        return None
    return min(int(percent[1]), 100) / 100


def advance(now: Progress, line: Progress) -> Progress:
    """The later of two. Within a stage a bar only grows, unless another bar begins (graphs of a second kind)."""
    if line.rank != now.rank:
        return line if line.rank > now.rank else now
    if line.stage is not now.stage:
        return line
    if line.progress is None:
        return now
    same_bar = line.detail.partition(":")[0] == now.detail.partition(":")[0]
    return line if now.progress is None or not same_bar or line.progress >= now.progress else now


def progress_of(text: str) -> Progress:
    """The stage that a whole log has reached."""
    now = Progress(Stage.STARTING)
    for raw in text.splitlines():
        if found := parse_progress(raw):
            now = advance(now, found)
    return now


class LogFollower:
    """Reads what is new in ``engine.log``, through its rotation, and keeps the furthest stage seen.

    Cheap to make anew: a worker that knows nothing begins at the start of the log. ``READY`` is never answered before
    the server says that its start is complete.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / LOG_NAME
        self.now = Progress(Stage.STARTING)
        self._offset = 0
        self._inode: int | None = None
        self._rest = b""

    def poll(self) -> list[str]:
        """New whole lines since the last call (at most 1 MiB of them); ``now`` is brought up to date."""
        data = self._read()
        if not data:
            return []
        data = self._rest + data
        whole, newline, self._rest = data.rpartition(b"\n")
        lines = (whole + newline).decode("utf-8", "replace").splitlines()
        for raw in lines:
            if found := parse_progress(raw):
                self.now = advance(self.now, found)
        return lines

    def _read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                inode = file.fileno() and self.path.stat().st_ino
                if self._inode is not None and inode != self._inode:
                    return self._rest_of_old() + self._from_new(inode)
                self._inode = inode
                file.seek(self._offset)
                data = file.read(_READ_LIMIT)
                self._offset += len(data)
                return data
        except OSError:
            return b""

    def _rest_of_old(self) -> bytes:
        """What came into the log after the last look and before it was put aside."""
        old = self.path.with_name(f"{LOG_NAME}.1")
        try:
            if old.stat().st_ino != self._inode:
                return b""
            with old.open("rb") as file:
                file.seek(self._offset)
                return file.read()
        except OSError:
            return b""

    def _from_new(self, inode: int) -> bytes:
        self._inode, self._offset = inode, 0
        with self.path.open("rb") as file:
            data = file.read(_READ_LIMIT)
        self._offset = len(data)
        return data


def tail(run_dir: Path, lines: int, *, limit_bytes: int = 4 << 20) -> list[str]:
    """The last lines of a start's log, the older half included when the newer is too short. Empty without a log."""
    if lines <= 0:
        return []
    data = b""
    for name in (LOG_NAME, f"{LOG_NAME}.1"):
        path = run_dir / name
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - (limit_bytes - len(data))))
                data = file.read() + data
        except OSError:
            continue
        if data.count(b"\n") > lines or len(data) >= limit_bytes:
            break
    return data.decode("utf-8", "replace").splitlines()[-lines:]


def head(run_dir: Path, *, limit_bytes: int = 2 << 20) -> str:
    """The beginning of a start's log, where its load is told; from the older half when the log was rotated."""
    for name in (f"{LOG_NAME}.1", LOG_NAME):
        try:
            with (run_dir / name).open("rb") as file:
                return file.read(limit_bytes).decode("utf-8", "replace")
        except OSError:
            continue
    return ""
