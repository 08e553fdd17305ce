"""The API server process: bind, start EngineCore, wait for it, serve, and end as ``vllm serve`` ends.

Signals as measured on vLLM 0.30 and 0.32: SIGTERM in the first moments ends the process at once; while the engine
starts it is swallowed; afterwards it ends EngineCore (after ``--shutdown-timeout``) and then waits for open
connections, however long their clients take. When EngineCore is gone ``/health`` is 503 for some seconds, and the
exit code is 0 all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from http import HTTPStatus
from types import FrameType
from typing import TYPE_CHECKING, Any

from models_app.simulator import core, logs
from models_app.simulator.channel import READ_SIZE, Lines
from models_app.simulator.config import Config
from models_app.simulator.facts import ModelError

if TYPE_CHECKING:
    from models_app.simulator.client import EngineClient

#: Imports of the real thing take longer; this much is shown of them.
IMPORT_S = 0.3
#: vLLM looks after a dead engine every five seconds; measured from the death, 4.2 to 5.0 s.
WATCHDOG_S = 4.6
SHORTEST_WATCHDOG_S = 0.6
BACKLOG = 2048
LOGO = (
    "",
    "       █     █     █▄   ▄█",
    " ▄▄ ▄█ █     █     █ ▀▄▀ █  version {version}",
    "  █▄█▀ █     █     █     █  model   {model}",
    "   ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀",
    "",
)
_FRAMES = ['  File "vllm/entrypoints/cli/serve.py", line 128, in cmd', "    uvloop.run(run_server(args))"]


def main(argv: list[str], started: float) -> int:
    """The whole life of ``vllm serve``. Returns the exit code; argparse ends the process itself with 2."""
    from models_app.simulator import config as config_module

    log = logs.Log("APIServer")
    try:
        config = config_module.read(argv)
    except ModelError as error:
        return _model_error(log, error)
    _pass_time(IMPORT_S / config.speed - (time.monotonic() - started))
    for line in LOGO:
        log.say("api_utils.py:347", line.format(version=config.vllm_version, model=config.model))
    log.say("api_utils.py:286", f"non-default args: {config.shown_args}")
    log.say("model.py:692", f"Resolved architecture: {config.facts.architecture}")
    log.say("model.py:2030", f"Using max model len {config.max_model_len}")
    try:
        listener = _bind(config)
    except OSError as error:
        _print_traceback(log, f"OSError: {error}")
        return 1
    ours, theirs = socket.socketpair()
    # EngineCore is forked before anything large is imported: that is what keeps it small.
    pid = os.fork()
    if pid == 0:
        ours.close()
        listener.close()
        os._exit(_flushed(core.run(config, theirs)))
    theirs.close()
    _ignore_sigterm_while_starting(config)
    from models_app.simulator import client as client_module

    faults = config.open_faults()
    ready = _wait_until_ready(ours)
    if ready is None:
        return _core_failed(log, pid, client_module.reap)
    faults.replace(ready["faults"])

    async def serve() -> int:
        client = client_module.EngineClient(config, ours, pid, log, faults)
        return await Server(config, client, log, listener).run(ready)

    return asyncio.run(serve())


def _flushed(code: int) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _pass_time(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


def _bind(config: Config) -> socket.socket:
    """Bound early, listening late: until the engine is up a connection is refused."""
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if config.version < (0, 30):
        # A second engine on the same port then starts "fine" and takes half of the requests.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((config.host, config.port))
    return listener


def _ignore_sigterm_while_starting(config: Config) -> None:
    def swallow(_number: int, _frame: FrameType | None) -> None:
        if "sigterm_hang" in config.open_faults():
            # As in the worst of the measured cases: only SIGINT and SIGKILL end this.
            while True:
                time.sleep(3600)

    signal.signal(signal.SIGTERM, swallow)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _wait_until_ready(connection: socket.socket) -> dict[str, Any] | None:
    """The engine's first message; None when it ended before it came."""
    lines = Lines()
    while True:
        data = connection.recv(READ_SIZE)
        if not data:
            return None
        for message in lines.feed(data):
            if message["k"] == "ready":
                return message


def _core_failed(log: logs.Log, pid: int, reap: Any) -> int:
    while (code := reap(pid)) is None:
        time.sleep(0.01)
    failed = {"EngineCore": code}
    _print_traceback(
        log, f"RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {failed}"
    )
    return 1


def _model_error(log: logs.Log, error: ModelError) -> int:
    if error.kind == "repo_id":
        _print_traceback(log, f"huggingface_hub.errors.HFValidationError: {error}")
    elif error.kind == "weights":
        log.bad("multiproc_executor.py:953", "WorkerProc failed to start.")
        log.traceback("multiproc_executor.py:953", _FRAMES, f"RuntimeError: {error}")
        _print_traceback(
            log,
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): "
            "{'EngineCore': 1}",
        )
    else:
        _print_traceback(
            log,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            f"  Value error, {error} [type=value_error, input_value=ArgsKwargs((), {{'model': ...}}), "
            "input_type=ArgsKwargs]\n    For further information visit https://errors.pydantic.dev/2.14/v/value_error",
        )
    return 1


def _print_traceback(log: logs.Log, error: str) -> None:
    log.raw("\n".join(("Traceback (most recent call last):", *_FRAMES, error)))


class _UvicornLog(logging.Handler):
    """uvicorn's lines in uvicorn's format, with vLLM's prefix (0.30; 0.32 has none)."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.name == "uvicorn.access" and isinstance(record.args, tuple) and len(record.args) == 5:
            address, method, path, version, status = record.args
            phrase = HTTPStatus(int(str(status))).phrase
            message = f'{address} - "{method} {path} HTTP/{version}" {status} {phrase}'
        logs.write(f"{self._prefix}{record.levelname + ':':9} {message}\n")


class Server:
    """HTTP from the moment when the engine is ready."""

    def __init__(self, config: Config, client: EngineClient, log: logs.Log, listener: socket.socket) -> None:
        self._config = config
        self._client = client
        self._log = log
        self._listener = listener
        self._ending: asyncio.Task[None] | None = None

    async def run(self, ready: dict[str, Any]) -> int:
        """Serve until a signal or the engine's death. Returns the exit code."""
        import uvicorn

        config, log = self._config, self._log
        await self._client.start()
        app = self._application()
        if app is None:
            await self._client.shutdown(0)
            return 1
        prefix = log.prefix if config.version < (0, 32) else ""
        for name in ("uvicorn.error", "uvicorn.access"):
            logger = logging.getLogger(name)
            logger.handlers = [_UvicornLog(prefix)]
            logger.setLevel(logging.INFO)
            logger.propagate = False

        class Quiet(uvicorn.Server):
            @contextlib.contextmanager
            def capture_signals(self) -> Iterator[None]:
                # Signals are ours: they end the engine first.
                yield

        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=config.access_log,
            lifespan="on",
            loop="asyncio",
            ws="none",
            backlog=BACKLOG,
        )
        server = Quiet(settings)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number, server)
        watchdog = asyncio.create_task(self._watch(server))
        log.say("entry.py:139", f"Starting vLLM server on http://{config.host}:{config.port}")
        await server.serve(sockets=[self._listener])
        watchdog.cancel()
        if self._ending:
            await self._ending
        return 0

    def _application(self) -> Any:
        """The application inside its middleware; None when a middleware cannot be had: found out only now, as in
        vLLM.
        """
        from models_app.simulator import pretend
        from models_app.simulator.app import App

        config, log = self._config, self._log
        app = App(self._client)
        faults = self._client.faults
        for path, methods in app.route_table():
            log.say("launcher.py:70", f"Route: {path}, Methods: {methods}")
        outermost: Any = app
        wanted = [path for path in config.middleware if not path.endswith(".KVCacheMiddleware")]
        for path in wanted:
            try:
                outermost = _imported(path)(outermost)
            except (ImportError, AttributeError, ValueError) as error:
                _print_traceback(log, f"{type(error).__name__}: {error}")
                return None
        if "no_addon" not in faults:
            from models_app.kvcache_addon.middleware import KVCacheMiddleware
            from models_app.simulator.backend import SimBackend

            pretend.install_versions(config.vllm_version, config.kvcached_version if config.kvcached else "", log)
            outermost = KVCacheMiddleware(outermost, SimBackend(app.state, config))

        async def application(scope: Any, receive: Any, send: Any) -> None:
            # As Starlette does, so that middleware finds the application's state.
            scope["app"] = app
            await outermost(scope, receive, send)

        return application

    # -- the end -------------------------------------------------------------------------------------------------

    def _on_signal(self, _number: int, server: Any) -> None:
        if "ignore_sigterm" in self._client.faults or self._ending:
            return
        self._ending = asyncio.create_task(self._shut_down(server))

    async def _shut_down(self, server: Any) -> None:
        log, timeout = self._log, self._config.shutdown_timeout_s
        log.say("launcher.py:129", "[shutdown] API server: shutdown triggered")
        mode = "abort" if not timeout else "wait"
        log.say("launcher.py:145", f"[shutdown] API server: stopping engine client mode={mode} timeout={timeout:g}s")
        await self._client.shutdown(timeout)
        log.say("launcher.py:154", "[shutdown] API server: engine client stopped")
        log.say("launcher.py:157", "[shutdown] API server: signalling HTTP server shutdown")
        log.say("launcher.py:179", "[shutdown] API server: shutting down FastAPI HTTP server")
        server.should_exit = True

    async def _watch(self, server: Any) -> None:
        await self._client.died.wait()
        await self._client.core_ended.wait()
        if not self._ending:
            await asyncio.sleep(max(SHORTEST_WATCHDOG_S, WATCHDOG_S / self._config.speed))
            server.should_exit = True


def _imported(path: str) -> Any:
    import importlib

    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    if not isinstance(found, type):
        raise ValueError(f"Invalid middleware {path}. Must be a class.")
    return found
