"""The detached parent of one engine: ``python -m models_app.engines.guardian RUN_DIR -- ARGV…``.

It starts the engine in its own session, writes the engine's output into a rotating log, waits, and leaves a record of
how it ended. It outlives the worker that started it and the worker's whole process group; several guardians of one
start cannot both run, because the first holds ``lock``. Standard library only, and little of it: it lives as long as
an engine.

Exit status of the first process, which returns as soon as the second is on its way: 0, or 75 when the lock is taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from models_app.engines import identity, procfs

EXIT_TAKEN = 75
EXIT_CANNOT_START = 127
LOG_NAME = "engine.log"
LOG_LIMIT_BYTES = 32 * 1024 * 1024
#: How long the rest of a dead engine's family may take to go by itself, then after SIGTERM, before SIGKILL.
LEAVE_LIMIT_S = 1.0
TERM_LIMIT_S = 6.0
_PARTIAL_LINE_LIMIT = 64 * 1024
#: So many bytes of a secret at the end of an unfinished line are held back until the line goes on.
_PART_OF_SECRET = 4


class Log:
    """The engine's output on disk: at most ``limit`` bytes and as many again in ``engine.log.1``.

    A full disk must never stop an engine, so what cannot be written is dropped, and said so once it can be again.
    """

    def __init__(self, path: Path, *, secrets: tuple[bytes, ...] = (), limit: int = LOG_LIMIT_BYTES) -> None:
        self.path = path
        self.limit = limit
        self.secrets = secrets
        self.dropped = 0
        self._rest = b""
        self._open()

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size

    def _turn(self) -> None:
        """Begin the next file. Where that cannot be done now, the old one stays open and it is tried again later."""
        old = self._file
        with contextlib.suppress(FileNotFoundError):  # moved already, by a turn that got no further
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        self._open()
        os.close(old)

    def feed(self, data: bytes) -> None:
        """Take output as it comes; whole lines are written. Progress bars end their lines with \\r: made \\n."""
        data = self._rest + data
        if data.endswith(b"\r"):  # perhaps half of \r\n
            data, held = data[:-1], b"\r"
        else:
            held = b""
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        end = data.rfind(b"\n") + 1
        if end == 0 and len(data) > _PARTIAL_LINE_LIMIT:
            end = len(data)
        self._write(data[:end])
        self._rest = data[end:] + held

    def flush(self) -> None:
        """Write an unfinished line too: a prompt or a half bar is worth seeing while the engine is silent."""
        line = self._rest.replace(b"\r", b"\n")
        end = len(line) - self._half_a_secret(line)
        self._rest = line[end:]
        self._write(line[:end])

    def _half_a_secret(self, line: bytes) -> int:
        """Length of the end of ``line`` that may be the beginning of a secret, whose rest is on its way."""
        longest = max((len(secret) for secret in self.secrets), default=0)
        for size in range(min(len(line), longest - 1), _PART_OF_SECRET - 1, -1):
            if any(secret.startswith(line[-size:]) for secret in self.secrets):
                return size
        return 0

    def say(self, sentence: str) -> None:
        self.flush()
        self._write(f"sardeenz: {sentence}\n".encode())

    def _write(self, data: bytes) -> None:
        if not data:
            return
        for secret in self.secrets:
            data = data.replace(secret, b"***")
        try:
            if self._size and self._size + len(data) > self.limit:
                self._turn()
            if self.dropped:
                note = f"sardeenz: {self.dropped} bytes of output were lost, the disk was full\n".encode()
                self._size += os.write(self._file, note)
                self.dropped = 0
            while data:  # the last block of a disk takes a part
                written = os.write(self._file, data)
                self._size += written
                data = data[written:]
        except OSError:
            self.dropped += len(data)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace the file at once, so that a reader sees the old or the new, never a half."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    draft.write_text(json.dumps(value))
    draft.replace(path)


class Guardian:
    """One engine from exec to the end of its last child."""

    def __init__(self, run_dir: Path, argv: list[str], env: dict[str, str]) -> None:
        self.run_dir = run_dir
        self.argv = argv
        self.env = env
        self.shared_memory: dict[str, int] = {}
        self.status: dict[str, Any] = {
            "guardian_pid": os.getpid(),
            "guardian_start_ticks": procfs.start_ticks(os.getpid()),
            "engine_pid": None,
            "engine_start_ticks": None,
            "started_at": time.time(),
            "ended_at": None,
            "exit_code": None,
            "signal": None,
            "stop_requested": False,
            "cleaned_at": None,
            "shared_memory": self.shared_memory,
        }
        secrets = [env.get("HF_TOKEN", "")]
        token_file = env.get("SARDEENZ_ENGINE_TOKEN_FILE")
        if token_file and Path(token_file).is_file():
            secrets.append(Path(token_file).read_text().strip())
        self.log = Log(run_dir / LOG_NAME, secrets=tuple(s.encode() for s in secrets if len(s) >= 8))

    def run(self) -> None:
        if (self.run_dir / "stop").exists():  # asked to end before it began
            self._end(exit_code=None, number=None)
            self._cleaned()
            return
        try:
            engine = subprocess.Popen(
                self.argv,
                env=self.env,
                cwd=self.run_dir,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as exc:
            self.log.say(f"cannot start {self.argv[0]}: {exc.strerror or exc}")
            self._end(exit_code=EXIT_CANNOT_START, number=None)
            self._cleaned()
            return
        self.status["engine_pid"] = engine.pid
        stat = procfs.read_stat(engine.pid)
        self.status["engine_start_ticks"] = stat.start_ticks if stat else None
        self._save()
        if self.status["stop_requested"] and stat:  # asked while it was being started: nobody saw a process to signal
            procfs.send(engine.pid, stat.start_ticks, signal.SIGTERM)
        assert engine.stdout is not None  # noqa: S101 - asked for above
        output = engine.stdout.fileno()
        os.set_blocking(output, False)
        self._follow(engine.pid, output)
        # The leader stays a zombie until its family is gone: so long its number cannot be given to another session.
        how = os.waitid(os.P_PID, engine.pid, os.WEXITED | os.WNOWAIT)
        assert how is not None  # noqa: S101 - no WNOHANG
        exited = how.si_code == os.CLD_EXITED
        self._end(exit_code=how.si_status if exited else None, number=None if exited else how.si_status)
        self._see_family_off(engine.pid, output)
        engine.wait()
        self._cleaned()

    def _follow(self, pid: int, output: int) -> None:
        """Copy output until the engine's first process ends. Its children may hold the pipe open long after that."""
        began, looked = time.monotonic(), 0.0
        open_pipe = True
        while True:
            if not open_pipe:
                time.sleep(0.2)
            elif select.select([output], [], [], 0.5)[0]:
                open_pipe = self._pump(output)
            else:
                self.log.flush()
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                self._pump(output)
                return
            # Shared memory is made while an engine starts: look closely then, and seldom later.
            now = time.monotonic()
            if now - looked > (10.0 if now - began < 300.0 else 120.0):
                looked = now
                self._note_shared_memory(pid)

    def _pump(self, output: int, limit: int = 64) -> bool:
        """Read what is there, at most ``limit`` chunks. False at end of file."""
        for _ in range(limit):
            try:
                data = os.read(output, 65536)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                self.log.flush()
                return False
            self.log.feed(data)
        return True

    def _family(self, session: int) -> list[procfs.ProcessStat]:
        marker = self.env.get(identity.MARKER)
        members = {p.pid: p for p in procfs.session_members(session, self.status["engine_start_ticks"] or 0)}
        if marker:
            for process in procfs.processes():
                if process.pid not in members and procfs.environment_value(process.pid, identity.MARKER) == marker:
                    members[process.pid] = process
        return list(members.values())

    def _note_shared_memory(self, session: int) -> None:
        before = len(self.shared_memory)
        pids = [p.pid for p in procfs.session_members(session, self.status["engine_start_ticks"] or 0)]
        self.shared_memory.update(procfs.shared_memory(pids))
        if len(self.shared_memory) > before:
            self._save()  # another may have to tidy up, should this process be killed

    def _see_family_off(self, session: int, output: int) -> None:
        """SIGKILL of the API server leaves EngineCore with all its GPU memory: nobody else will end it."""
        began = time.monotonic()
        told: set[int] = set()
        while family := self._family(session):
            self._note_shared_memory(session)
            self._pump(output)
            passed = time.monotonic() - began
            if passed > LEAVE_LIMIT_S + TERM_LIMIT_S:
                trackers = [p for p in family if procfs.is_resource_tracker(p.pid)]
                # The tracker goes last: when its clients are gone it unlinks their shared memory.
                for process in [p for p in family if p not in trackers] or trackers:
                    procfs.send(process.pid, process.start_ticks, signal.SIGKILL)
                time.sleep(0.5)
            elif passed > LEAVE_LIMIT_S:
                for process in family:
                    if process.pid not in told and not procfs.is_resource_tracker(process.pid):
                        told.add(process.pid)
                        procfs.send(process.pid, process.start_ticks, signal.SIGTERM)
            time.sleep(0.1)
        self._pump(output)
        self.log.flush()

    def _end(self, *, exit_code: int | None, number: int | None) -> None:
        self.status.update(ended_at=time.time(), exit_code=exit_code, signal=number)
        self._save()

    def _cleaned(self) -> None:
        for name, inode in self.shared_memory.items():
            path = Path(name)
            try:
                if path.stat().st_ino == inode and not procfs.holders(path):
                    path.unlink()
            except OSError:
                continue
        folder = self.env.get("TMPDIR", "")
        if identity.is_tmp_dir(folder):
            shutil.rmtree(folder, ignore_errors=True)
        self.status["cleaned_at"] = time.time()
        self._save()

    def _save(self) -> None:
        self.status["stop_requested"] = (self.run_dir / "stop").exists()
        try:
            write_json(self.run_dir / "status.json", self.status)
        except OSError as exc:  # full disk, or the folder was removed: the lock, then its absence, still tell
            self.log.say(f"cannot write status.json: {exc.strerror or exc}")


def _let_pass(number: int, frame: FrameType | None) -> None:
    """Signals that end the worker are not for the guardian: it ends with its engine.

    A handler, not SIG_IGN: what is ignored stays ignored in the child after exec.
    """


def main(arguments: list[str]) -> int:
    if len(arguments) < 3 or arguments[1] != "--":
        sys.stderr.write("usage: python -m models_app.engines.guardian RUN_DIR -- ARGV…\n")
        return 2
    run_dir, argv = Path(arguments[0]).resolve(), arguments[2:]
    lock = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return EXIT_TAKEN
    if (run_dir / "status.json").exists():  # ran already; one attempt is one start
        return EXIT_TAKEN
    if os.fork():
        return 0
    # The child keeps the lock: it belongs to the open file that both share, and the engine never gets it.
    if os.getsid(0) != os.getpid():
        os.setsid()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, _let_pass)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    env = dict(os.environ)
    marker = env.pop(identity.GUARDIAN_MARKER, None)
    if marker:
        env[identity.MARKER] = marker
    os.chdir("/")
    try:
        Guardian(run_dir, argv, env).run()
    except BaseException as exc:
        (run_dir / "guardian.error").write_text(f"{type(exc).__name__}: {exc}\n")
        raise
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
