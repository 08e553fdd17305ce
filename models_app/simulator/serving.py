"""The API server process once the engine is ready: HTTP, signals, the death of the engine, the end. All async."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from models_app.simulator import logs
from models_app.simulator.client import EngineClient
from models_app.simulator.config import Config
from models_app.simulator.faults import Faults

#: vLLM looks after a dead engine every five seconds; measured from the death, 4.2 to 5.0 s.
WATCHDOG_S = 4.6
SHORTEST_WATCHDOG_S = 0.6
THROUGHPUT_LOG_S = 10.0
BACKLOG = 2048


def serve(
    config: Config, connection: socket.socket, core_pid: int, log: logs.Log, faults: Faults, listener: socket.socket
) -> int:
    """Serve until the end. Returns the exit code."""

    async def run() -> int:
        return await Server(config, EngineClient(config, connection, core_pid, log, faults), log, listener).run()

    return asyncio.run(run())


class _UvicornLog(logging.Handler):
    """uvicorn's lines in uvicorn's format, with vLLM's prefix (0.30; 0.32 has none)."""

    def __init__(self, prefix: str, quiet_paths: frozenset[str]) -> None:
        super().__init__()
        self._prefix = prefix
        self._quiet_paths = quiet_paths

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.name == "uvicorn.access" and isinstance(record.args, tuple) and len(record.args) == 5:
            address, method, path, version, status = record.args
            if str(path).partition("?")[0] in self._quiet_paths:
                return
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

    async def run(self) -> int:
        """Serve until a signal or the engine's death. Returns the exit code."""
        import uvicorn

        config, log = self._config, self._log
        await self._client.start()
        app = self._application()
        if app is None:
            await self._client.shutdown(0)
            await self._client.close()
            return 1
        prefix = log.prefix if config.version < (0, 32) else ""
        for name in ("uvicorn.error", "uvicorn.access"):
            logger = logging.getLogger(name)
            logger.handlers = [_UvicornLog(prefix, config.quiet_paths)]
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
        tasks = [asyncio.create_task(self._watch(server)), asyncio.create_task(self._log_throughput())]
        log.say("entry.py:139", f"Starting vLLM server on http://{config.host}:{config.port}")
        await server.serve(sockets=[self._listener])
        for task in tasks:
            task.cancel()
        if self._ending:
            await self._ending
        await self._client.close()
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
                log.raw(f"Traceback (most recent call last):\n{type(error).__name__}: {error}")
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

    async def _log_throughput(self) -> None:
        """vLLM's line every ten seconds while there is something to tell, and once more when it is over."""
        before, busy = self._client.stats, False
        while True:
            await asyncio.sleep(THROUGHPUT_LOG_S)
            now = self._client.stats
            prompt, generated = (
                (now.get(name, 0) - before.get(name, 0)) / THROUGHPUT_LOG_S
                for name in ("prompt_tokens", "generation_tokens")
            )
            before = now
            was_busy, busy = busy, bool(prompt or generated or now["running"] or now["waiting"])
            if busy or was_busy:
                queries, hits = now.get("prefix_queries", 0), now.get("prefix_hits", 0)
                self._log.say(
                    "loggers.py:335",
                    f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, Avg generation throughput: "
                    f"{generated:.1f} tokens/s, Running: {now['running']} reqs, Waiting: {now['waiting']} reqs, "
                    f"GPU KV cache usage: {100 * now['usage']:.1f}%, Prefix cache hit rate: "
                    f"{100 * hits / max(1, queries):.1f}%",
                )

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
